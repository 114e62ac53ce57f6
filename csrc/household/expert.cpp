#include "household/expert.h"

#include <algorithm>

#include "household/vocabulary.h"

namespace manus_fast::household {
namespace {

constexpr int kImpossible = 1 << 20;

// Walks through a plan, counting commands and, where asked, recording them. Holds just the parts of the state that
// decide how many commands a step takes.
class Walker {
 public:
  Walker(const World& world, const State& state, bool known_only, std::vector<Move>* out = nullptr)
      : world_(world), out_(out), location_(state.location) {
    for (int i = 0; i < 2; ++i) opened_[i] = state.opened[i] & (known_only ? state.seen[i] : ~0ull);
  }

  int cost() const { return cost_; }

  void go(int r, Reason reason, int object) {
    if (world_.spec().receptacles[r].location == location_) return;
    location_ = world_.spec().receptacles[r].location;
    add({Verb::kGo, kNone, index(r), kNone}, reason, object);
  }

  void reach(int r, Reason reason, int object) {
    go(r, reason, object);
    if (!world_.spec().receptacles[r].openable || (opened_[r >> 6] >> (r & 63) & 1)) return;
    opened_[r >> 6] |= 1ull << (r & 63);
    add({Verb::kOpen, kNone, index(r), kNone}, reason, object);
  }

  void take(int o, int r) {
    reach(r, Reason::kTake, o);
    add({Verb::kTake, index(o), index(r), kNone}, Reason::kTake, o);
  }

  void put(int o, int r, Reason reason) {
    reach(r, reason, o);
    add({Verb::kPut, index(o), index(r), kNone}, reason, o);
  }

  void process(Verb verb, int o, int r) {
    go(r, Reason::kProcess, o);
    add({verb, index(o), index(r), kNone}, Reason::kProcess, o);
  }

  void use(int lamp) { add({Verb::kUse, index(lamp), kNone, kNone}, Reason::kLamp, lamp); }

 private:
  static std::uint8_t index(int i) { return static_cast<std::uint8_t>(i); }

  void add(Command command, Reason reason, int object) {
    ++cost_;
    if (out_ != nullptr) out_->push_back({command, reason, index(object), kNone});
  }

  const World& world_;
  std::vector<Move>* out_;
  std::uint64_t opened_[2];
  std::uint8_t location_;
  int cost_ = 0;
};

}  // namespace

// Enumerates which object, which tool and which receptacle to use; for each choice the commands are forced, so the
// cheapest choice is a shortest plan.
class Planner {
 public:
  Planner(const World& world, const State& state, bool known_only)
      : world_(world), spec_(world.spec()), state_(state), known_only_(known_only) {}

  std::vector<Move> best(bool partial) {
    std::vector<Move> moves;
    Choice choice;
    if (!partial) {
      choose(choice);
    } else {
      choose_partial(choice);
    }
    if (choice.cost < kImpossible) walk(choice, &moves);
    return moves;
  }

 private:
  struct Choice {
    int cost = kImpossible;
    int aside = -1;   // receptacle for a held object that is in the way
    int first = -1;   // object
    int tool = -1;    // receptacle that heats, cools or cleans
    int target = -1;  // goal receptacle
    int second = -1;  // second object of kTwo
    int lamp = -1;
  };

  bool known(int o) const { return !known_only_ || state_.held == o || state_.conditions[o] & kKnown; }
  bool reachable(int r) const { return r != kNone && spec_.receptacles[r].location != kNone; }
  bool available(int o) const {
    return known(o) && (state_.held == o || (reachable(state_.place[o]) && spec_.objects[o].properties & kPickupable));
  }
  // A goal receptacle that takes the object.
  bool takes(int r, int o) const { return reachable(r) && world_.can_contain(r, o); }
  bool in_goal(int o) const {
    const std::uint8_t r = state_.place[o];
    return r != kNone && spec_.receptacles[r].type == spec_.goal.receptacle_type;
  }

  int walk(const Choice& c, std::vector<Move>* out) const {
    Walker w(world_, state_, known_only_, out);
    if (c.aside >= 0) w.put(state_.held, c.aside, Reason::kPutAside);
    if (c.first >= 0 && state_.held != c.first) w.take(c.first, state_.place[c.first]);
    if (c.tool >= 0) w.process(process_verb(), c.first, c.tool);
    if (c.lamp >= 0) {
      w.go(state_.place[c.lamp], Reason::kLamp, c.lamp);
      if (!(state_.conditions[c.lamp] & kToggled)) w.use(c.lamp);
    }
    if (c.target >= 0) w.put(c.first, c.target, Reason::kPlace);
    if (c.second >= 0) {
      w.take(c.second, state_.place[c.second]);
      w.put(c.second, c.target, Reason::kPlace);
    }
    return w.cost();
  }

  Verb process_verb() const {
    switch (spec_.goal.kind) {
      case GoalKind::kClean: return Verb::kCleanWith;
      case GoalKind::kHeat: return Verb::kHeatWith;
      default: return Verb::kCoolWith;
    }
  }

  Role process_role() const {
    switch (spec_.goal.kind) {
      case GoalKind::kClean: return Role::kSink;
      case GoalKind::kHeat: return Role::kMicrowave;
      default: return Role::kFridge;
    }
  }

  std::uint8_t process_condition() const {
    switch (spec_.goal.kind) {
      case GoalKind::kClean: return kClean;
      case GoalKind::kHeat: return kHot;
      default: return kCool;
    }
  }

  // Tries every useful place for an object that is in the way, then the choice itself.
  void consider(Choice choice, Choice& best) const {
    if (state_.held == kNone || state_.held == choice.first) {
      try_one(choice, best);
      return;
    }
    // Receptacles that the plan visits anyway may save a walk; of all others only the cheapest kinds matter.
    const auto aside = [&](int r) {
      if (r < 0 || !takes(r, state_.held)) return;
      choice.aside = r;
      try_one(choice, best);
    };
    for (const std::uint8_t r : world_.at(state_.location)) aside(r);
    aside(choice.first >= 0 ? state_.place[choice.first] : -1);
    aside(choice.second >= 0 ? state_.place[choice.second] : -1);
    aside(choice.lamp >= 0 ? state_.place[choice.lamp] : -1);
    aside(choice.target);
    aside(choice.tool);
    bool open_done = false, closed_done = false;
    for (int r = 0; r < world_.num_receptacles() && !(open_done && closed_done); ++r) {
      if (!takes(r, state_.held)) continue;
      const bool told = !known_only_ || !spec_.receptacles[r].openable || state_.has_seen(r);
      bool& done = world_.accessible(state_, r) && told ? open_done : closed_done;
      if (!done) aside(r);
      done = true;
    }
  }

  void try_one(Choice choice, Choice& best) const {
    choice.cost = walk(choice, nullptr);
    if (choice.cost < best.cost) best = choice;
  }

  void choose(Choice& best) const {
    if (spec_.goal.kind == GoalKind::kTwo) return choose_two(best);
    if (spec_.goal.kind == GoalKind::kLook) return choose_look(best);
    const bool process = spec_.goal.kind != GoalKind::kPlace;
    for (const std::uint8_t o : world_.goal_objects()) {
      if (!available(o)) continue;
      for (const std::uint8_t target : world_.goal_receptacles()) {
        if (!takes(target, o)) continue;
        Choice choice;
        choice.first = o;
        choice.target = target;
        if (!process || state_.conditions[o] & process_condition()) {
          consider(choice, best);
          continue;
        }
        for (int tool = 0; tool < world_.num_receptacles(); ++tool) {
          if (spec_.receptacles[tool].role != process_role() || !reachable(tool)) continue;
          choice.tool = tool;
          consider(choice, best);
        }
      }
    }
  }

  void choose_look(Choice& best) const {
    for (const std::uint8_t o : world_.goal_objects()) {
      if (!available(o)) continue;
      for (int lamp = 0; lamp < world_.num_objects(); ++lamp) {
        if (!is_lamp(lamp) || !known(lamp) || !reachable(state_.place[lamp])) continue;
        Choice choice;
        choice.first = o;
        choice.lamp = lamp;
        consider(choice, best);
      }
    }
  }

  bool is_lamp(int o) const {
    return spec_.objects[o].type == spec_.goal.toggle_type && spec_.objects[o].properties & kToggleable;
  }

  void choose_two(Choice& best) const {
    const auto& objects = world_.goal_objects();
    const bool holding_one = std::find(objects.begin(), objects.end(), state_.held) != objects.end();
    for (const std::uint8_t target : world_.goal_receptacles()) {
      const auto inside = [&](int o) { return state_.place[o] == target; };
      const bool one_there = std::any_of(objects.begin(), objects.end(), inside);
      for (const std::uint8_t first : objects) {
        if (!available(first) || inside(first) || !takes(target, first)) continue;
        if (holding_one && first != state_.held) continue;
        Choice choice;
        choice.first = first;
        choice.target = target;
        if (one_there) {
          consider(choice, best);
          continue;
        }
        for (const std::uint8_t second : objects) {
          if (second == first || !available(second) || !takes(target, second)) continue;
          choice.second = second;
          consider(choice, best);
        }
      }
    }
  }

  // Of the explorer: no whole plan yet, but something useful is known.
  void choose_partial(Choice& best) const {
    const GoalKind kind = spec_.goal.kind;
    if (kind != GoalKind::kTwo && kind != GoalKind::kLook) return;
    const auto& objects = world_.goal_objects();
    const auto held = [&](int o) { return state_.held == o; };
    if (kind == GoalKind::kTwo) {  // put the first one where it belongs, unless one lies there already
      if (std::any_of(objects.begin(), objects.end(), [&](int o) { return known(o) && in_goal(o); })) return;
    } else if (std::any_of(objects.begin(), objects.end(), held)) {
      return;  // in hand: the lamp is to be found
    }
    for (const std::uint8_t o : objects) {
      if (!available(o)) continue;
      Choice choice;
      choice.first = o;
      if (kind == GoalKind::kLook) {
        consider(choice, best);
        continue;
      }
      for (const std::uint8_t target : world_.goal_receptacles()) {
        if (!takes(target, o)) continue;
        choice.target = target;
        consider(choice, best);
      }
    }
  }

  const World& world_;
  const WorldSpec& spec_;
  const State& state_;
  const bool known_only_;
};

std::vector<Move> plan(const World& world, const State& state, bool known_only) {
  if (world.goal_reached(state)) return {};
  return Planner(world, state, known_only).best(false);
}

namespace {

// How likely a receptacle of this class is to hold an object of that class, as an arbitrary weight.
int prior(const World& world, int receptacle, int object_type) {
  const Vocabulary& words = vocabulary();
  const int r = words.receptacle(world.spec().receptacle_types[world.spec().receptacles[receptacle].type]);
  const int o = words.object(world.spec().object_types[object_type]);
  const int weight = r >= 0 && o >= 0 ? words.objects[o].homes[r] : 0;
  const bool fits = world.spec().can_contain[world.spec().receptacles[receptacle].type][object_type];
  return 2 * weight + fits;
}

Move search(const World& world, const State& state, ExpertKind kind) {
  const Goal& goal = world.spec().goal;
  const bool holding = state.held != kNone && world.spec().objects[state.held].type == goal.object_type;
  const std::uint8_t wanted = goal.kind == GoalKind::kLook && holding ? goal.toggle_type : goal.object_type;
  int best = -1, best_score = -1;
  for (int r = 0; r < world.num_receptacles(); ++r) {
    if (state.has_seen(r) || world.spec().receptacles[r].location == kNone) continue;
    const int score = kind == ExpertKind::kSweep ? 0 : prior(world, r, wanted);
    if (score > best_score) best = r, best_score = score;
  }
  Move move;
  move.object_type = wanted;
  if (best < 0) return move;  // everything seen, nothing found
  const auto r = static_cast<std::uint8_t>(best);
  move.reason = Reason::kSearch;
  if (world.spec().receptacles[best].location != state.location) {
    move.command = {Verb::kGo, kNone, r, kNone};
  } else {  // here, yet unseen: closed, or the player started here or shares the location with another receptacle
    move.command = {world.accessible(state, best) ? Verb::kExamineReceptacle : Verb::kOpen, kNone, r, kNone};
  }
  return move;
}

}  // namespace

Move next_move(const World& world, const State& state, ExpertKind kind) {
  if (world.goal_reached(state)) return {};
  const bool known_only = kind != ExpertKind::kPlanner;
  Planner planner(world, state, known_only);
  std::vector<Move> moves = planner.best(false);
  if (moves.empty() && known_only) moves = planner.best(true);
  if (!moves.empty()) {
    // The explorer supposes an unseen container to be closed; it arrives, is told that it is open, and plans again.
    return moves.front();
  }
  return known_only ? search(world, state, kind) : Move();
}

std::string subgoal(const World& world, const Move& move) {
  const WorldSpec& spec = world.spec();
  const std::string o = move.object != kNone ? spec.objects[move.object].name : "";
  switch (move.reason) {
    case Reason::kSearch: return "find " + spec.object_types[move.object_type];
    case Reason::kTake: return "take " + o;
    case Reason::kProcess: {
      const GoalKind kind = spec.goal.kind;
      return (kind == GoalKind::kClean ? "clean " : kind == GoalKind::kHeat ? "heat " : "cool ") + o;
    }
    case Reason::kPlace: return "put " + o;
    case Reason::kLamp: return "use " + o;
    case Reason::kPutAside: return "put aside " + o;
    case Reason::kStuck: return "look";
  }
  return "";
}

std::string thought(const World& world, const Move& move) {
  const WorldSpec& spec = world.spec();
  const std::string r = move.command.receptacle != kNone ? spec.receptacles[move.command.receptacle].name : "";
  const std::string o = move.object != kNone ? spec.objects[move.object].name : "";
  const bool go = move.command.verb == Verb::kGo;
  const bool open = move.command.verb == Verb::kOpen;
  const std::string here = go ? "Go to " + r : open ? "Open " + r : "";
  switch (move.reason) {
    case Reason::kSearch:
      return "I need to find a " + spec.object_types[move.object_type] + ". " +
             (go ? "Look at " : open ? "Look inside " : "Look on ") + r + ".";
    case Reason::kTake:
      return go || open ? here + " to take " + o + "." : "Take " + o + " from " + r + ".";
    case Reason::kProcess: {
      const GoalKind kind = spec.goal.kind;
      const std::string verb = kind == GoalKind::kClean ? "clean" : kind == GoalKind::kHeat ? "heat" : "cool";
      if (go) return here + " to " + verb + " " + o + ".";
      return "Now " + verb + " " + o + " with " + r + ".";
    }
    case Reason::kPlace:
      return go || open ? here + " to put " + o + " there." : "Put " + o + " where it belongs: " + r + ".";
    case Reason::kLamp:
      return go ? here + " to use " + o + "." : "Use " + o + " to look at what I hold.";
    case Reason::kPutAside:
      return go || open ? here + " to put " + o + " aside." : "I do not need " + o + ". Put it aside.";
    case Reason::kStuck:
      return "I see no way to go on.";
  }
  return "";
}

}  // namespace manus_fast::household

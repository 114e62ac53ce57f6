#include "household/generator.h"

#include <algorithm>

#include "common/check.h"
#include "common/rng.h"
#include "household/expert.h"

namespace manus_fast::household {
namespace {

constexpr std::uint64_t kTaskStream = 0x7461736bull;
constexpr std::uint64_t kLayoutStream = 0x6c61796full;
constexpr std::uint64_t kGameStream = 0x67616d65ull;
constexpr int kAttempts = 1000;

// The rooms that ALFRED has each task type in, indexed by GoalKind.
const std::vector<Room> kRoomsOf[kGoalKinds] = {
    {Room::kBedroom, Room::kLivingRoom},
    {Room::kKitchen, Room::kBathroom, Room::kBedroom, Room::kLivingRoom},
    {Room::kKitchen, Room::kBathroom},
    {Room::kKitchen},
    {Room::kKitchen},
    {Room::kKitchen, Room::kBathroom, Room::kBedroom, Room::kLivingRoom}};

std::uint64_t pack(const Difficulty& d) {
  return d.min_receptacles | static_cast<std::uint64_t>(d.max_receptacles) << 8 |
         static_cast<std::uint64_t>(d.min_objects) << 16 | static_cast<std::uint64_t>(d.max_objects) << 24 |
         static_cast<std::uint64_t>(d.copies) << 32;
}

std::uint32_t between(Rng& rng, std::uint32_t low, std::uint32_t high) { return low + rng.below(high - low + 1); }

// A draw of an index by weight; -1 where all weights are 0.
template <typename Weight>
int pick(Rng& rng, std::size_t n, const Weight& weight) {
  std::uint32_t total = 0;
  for (std::size_t i = 0; i < n; ++i) total += weight(i);
  if (total == 0) return -1;
  std::uint32_t left = rng.below(total);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t w = weight(i);
    if (left < w) return static_cast<int>(i);
    left -= w;
  }
  return -1;
}

// One game in the making.
class Draft {
 public:
  Draft(const Recipe& recipe, const std::vector<std::uint8_t>& counts, std::uint64_t attempt)
      : recipe_(recipe), words_(vocabulary()), counts_(counts), rng_(recipe.seed, kGameStream + attempt) {}

  // False where the draw led nowhere.
  bool draw() {
    add_receptacles();
    if (!choose_goal()) return false;
    const Difficulty& d = recipe_.difficulty;
    const int total = static_cast<int>(between(rng_, d.min_objects, d.max_objects));
    const int needed = recipe_.kind == GoalKind::kTwo ? 2 : 1;
    const int most = std::max<int>(needed, d.copies);
    const int copies = static_cast<int>(between(rng_, needed, most));
    for (int i = 0; i < copies && (i < needed || size() < total); ++i) {
      if (!place(goal_object_, goal_receptacle_)) return false;
    }
    if (recipe_.kind == GoalKind::kLook && !place(lamp_, -1)) return false;
    fill(total);
    first_wording_ = rng_.below(2) == 0;
    // Lists go by class.
    std::stable_sort(placed_.begin(), placed_.end(),
                     [](const Placed& a, const Placed& b) { return a.object < b.object; });
    return size() <= std::max(total, needed + (recipe_.kind == GoalKind::kLook));
  }

  // Equal for two drafts that give the same game.
  std::uint64_t signature() const {
    std::uint64_t h = layout_signature(recipe_.room, counts_);
    h = mix64(h ^ (static_cast<std::uint64_t>(recipe_.kind) << 1 | first_wording_));
    h = mix64(h ^ (static_cast<std::uint64_t>(goal_object_) << 16 | static_cast<std::uint16_t>(goal_receptacle_)));
    for (const ReceptacleSpec& r : receptacles_) h = (h << 1 | h >> 63) ^ r.opened;
    for (const Placed& p : placed_) h = mix64(h ^ (p.object << 8 | p.receptacle));
    return h;
  }

  std::shared_ptr<const World> finish() {
    WorldSpec spec;
    spec.receptacle_types = words_.receptacle_names;
    spec.object_types = words_.object_names;
    spec.can_contain = words_.can_contain;
    spec.receptacles = receptacles_;
    spec.put_grammar = recipe_.put_grammar != 0;
    number_objects(spec);
    spec.goal.kind = recipe_.kind;
    spec.goal.object_type = static_cast<std::uint8_t>(goal_object_);
    if (recipe_.kind == GoalKind::kLook) {
      spec.goal.toggle_type = static_cast<std::uint8_t>(lamp_);
    } else {
      spec.goal.receptacle_type = static_cast<std::uint8_t>(goal_receptacle_);
    }
    spec.task = task_text();
    return std::make_shared<const World>(std::move(spec));
  }

 private:
  int size() const { return static_cast<int>(placed_.size()); }

  bool in_room(int object) const { return words_.objects[object].rooms >> static_cast<int>(recipe_.room) & 1; }

  void add_receptacles() {
    first_.assign(counts_.size(), 0);
    for (std::size_t c = 0; c < counts_.size(); ++c) {
      first_[c] = static_cast<int>(receptacles_.size());
      for (int number = counts_[c]; number >= 1; --number) {  // ALFWorld numbers in descending order
        ReceptacleSpec r;
        r.name = words_.receptacles[c].name + " " + std::to_string(number);
        r.type = static_cast<std::uint8_t>(c);
        r.location = static_cast<std::uint8_t>(receptacles_.size());
        r.openable = words_.receptacles[c].openable;
        r.opened = r.openable && rng_.below(8) == 0;
        r.role = words_.receptacles[c].role;
        receptacles_.push_back(std::move(r));
      }
    }
  }

  bool fits_goal(int object) const {
    const std::uint16_t p = words_.objects[object].properties;
    if (!in_room(object) || !(p & kPickupable)) return false;
    switch (recipe_.kind) {
      case GoalKind::kClean: return p & kCleanable;
      case GoalKind::kHeat: return p & kHeatable;
      case GoalKind::kCool: return p & kCoolable;
      default: return true;
    }
  }

  // Somewhere to find the object when receptacles of class `avoid` are left out.
  bool has_home(int object, int avoid) const {
    for (std::size_t c = 0; c < counts_.size(); ++c) {
      if (static_cast<int>(c) != avoid && counts_[c] > 0 && words_.objects[object].homes[c] > 0) return true;
    }
    return false;
  }

  bool fits_receptacle(int receptacle, int object) const {
    if (counts_[receptacle] == 0 || !words_.can_contain[receptacle][object]) return false;
    // What cleans, heats or cools is no goal of the same task: being there would end it by itself.
    const Role role = words_.receptacles[receptacle].role;
    if (recipe_.kind == GoalKind::kClean && role == Role::kSink) return false;
    if (recipe_.kind == GoalKind::kHeat && role == Role::kMicrowave) return false;
    if (recipe_.kind == GoalKind::kCool && role == Role::kFridge) return false;
    return has_home(object, receptacle);
  }

  bool choose_goal() {
    lamp_ = words_.object("desklamp");
    const bool look = recipe_.kind == GoalKind::kLook;
    const std::size_t num_objects = words_.objects.size(), num_receptacles = counts_.size();
    goal_object_ = pick(rng_, num_objects, [&](std::size_t o) -> std::uint32_t {
      if (!fits_goal(static_cast<int>(o))) return 0;
      if (look) return has_home(static_cast<int>(o), -1);
      for (std::size_t r = 0; r < num_receptacles; ++r) {
        if (fits_receptacle(static_cast<int>(r), static_cast<int>(o))) return 1;
      }
      return 0;
    });
    if (goal_object_ < 0) return false;
    if (look) return has_home(lamp_, -1);
    goal_receptacle_ = pick(rng_, num_receptacles, [&](std::size_t r) -> std::uint32_t {
      return fits_receptacle(static_cast<int>(r), goal_object_);
    });
    return goal_receptacle_ >= 0;
  }

  bool place(int object, int avoid) {
    const std::vector<std::uint8_t>& homes = words_.objects[object].homes;
    const int home = pick(rng_, counts_.size(), [&](std::size_t c) -> std::uint32_t {
      return static_cast<int>(c) == avoid || counts_[c] == 0 ? 0 : homes[c];
    });
    if (home < 0) return false;
    placed_.push_back({object, first_[home] + static_cast<int>(rng_.below(counts_[home]))});
    return true;
  }

  void fill(int total) {
    std::vector<int> left(words_.objects.size(), 0);
    for (std::size_t o = 0; o < left.size(); ++o) {
      if (!in_room(static_cast<int>(o)) || static_cast<int>(o) == goal_object_) continue;
      left[o] = recipe_.difficulty.copies;
    }
    for (const Placed& p : placed_) left[p.object] = std::max(0, left[p.object] - 1);
    while (size() < total) {
      const int object = pick(rng_, left.size(), [&](std::size_t o) -> std::uint32_t { return left[o] > 0; });
      if (object < 0) return;  // the room has no more classes to offer
      // What is fixed (a lamp, a plant) comes alone.
      left[object] = words_.objects[object].properties & kPickupable ? left[object] - 1 : 0;
      if (!place(object, -1)) left[object] = 0;
    }
  }

  // Numbers descend within a class.
  void number_objects(WorldSpec& spec) {
    for (std::size_t i = 0; i < placed_.size();) {
      std::size_t end = i;
      while (end < placed_.size() && placed_[end].object == placed_[i].object) ++end;
      for (std::size_t number = end - i; i < end; ++i, --number) {
        ObjectSpec o;
        o.name = words_.objects[placed_[i].object].name + " " + std::to_string(number);
        o.type = static_cast<std::uint8_t>(placed_[i].object);
        o.properties = words_.objects[placed_[i].object].properties;
        o.receptacle = static_cast<std::uint8_t>(placed_[i].receptacle);
        o.location = spec.receptacles[placed_[i].receptacle].location;
        spec.objects.push_back(std::move(o));
      }
    }
  }

  // Two wordings per type, those of ALFRED's goal templates.
  std::string task_text() {
    const std::string object = words_.objects[goal_object_].name;
    const std::string receptacle = goal_receptacle_ >= 0 ? words_.receptacles[goal_receptacle_].name : "";
    const bool first = first_wording_;
    switch (recipe_.kind) {
      case GoalKind::kLook:
        return first ? "look at " + object + " under the desklamp" : "examine the " + object + " with the desklamp";
      case GoalKind::kPlace:
        return first ? "put a " + object + " in " + receptacle : "put some " + object + " on " + receptacle;
      case GoalKind::kClean:
        return first ? "put a clean " + object + " in " + receptacle
                     : "clean some " + object + " and put it in " + receptacle;
      case GoalKind::kHeat:
        return first ? "put a hot " + object + " in " + receptacle
                     : "heat some " + object + " and put it in " + receptacle;
      case GoalKind::kCool:
        return first ? "put a cool " + object + " in " + receptacle
                     : "cool some " + object + " and put it in " + receptacle;
      case GoalKind::kTwo:
        return first ? "put two " + object + " in " + receptacle
                     : "find two " + object + " and put them in " + receptacle;
    }
    return "";
  }

  struct Placed {
    int object;      // class
    int receptacle;  // instance
  };

  const Recipe& recipe_;
  const Vocabulary& words_;
  const std::vector<std::uint8_t>& counts_;
  Rng rng_;
  std::vector<ReceptacleSpec> receptacles_;
  std::vector<int> first_;  // the first instance of each receptacle class
  std::vector<Placed> placed_;
  int goal_object_ = -1;
  int goal_receptacle_ = -1;
  int lamp_ = -1;
  bool first_wording_ = true;
};

bool planner_wins(const World& world) {
  State state;
  world.reset(state);
  if (state.won) return false;
  std::string text;
  for (const Move& move : plan(world, state)) {
    if (!world.applicable(state, move.command)) return false;
    world.apply(state, move.command);
  }
  return world.goal_reached(state);
}

}  // namespace

Difficulty difficulty(int level) {
  MF_CHECK(level >= 1 && level <= 3, "level: expected 1, 2 or 3, got ", level);
  if (level == 1) return {6, 8, 6, 6, 2};
  if (level == 2) return {10, 14, 12, 18, 3};
  return {20, 28, 30, 40, 4};
}

Recipe recipe(Split split, std::uint64_t index, std::uint64_t base_seed, const std::vector<GoalKind>& kinds,
              std::uint32_t layouts, std::uint32_t num_train, const Difficulty& difficulty) {
  MF_CHECK(!kinds.empty(), "task_types: expected at least one");
  MF_CHECK(num_train >= kinds.size(), "num_train: expected at least one task per type (", kinds.size(), "), got ",
           num_train);
  MF_CHECK(layouts >= 1, "layouts: expected a count >= 1, got ", layouts);
  Rng rng(mix64(base_seed) ^ index, kTaskStream + static_cast<std::uint64_t>(split));
  Recipe r;
  r.split = split;
  r.kind = kinds[index % kinds.size()];
  const std::vector<Room>& rooms = kRoomsOf[static_cast<int>(r.kind)];
  r.room = rooms[rng.below(static_cast<std::uint32_t>(rooms.size()))];
  r.layout = rng.below(layouts);
  r.seed = rng.next() >> 11;  // 53 bits: exact in JSON whatever reads it
  r.difficulty = difficulty;
  if (split == Split::kValidSeen) {
    const auto types = static_cast<std::uint32_t>(kinds.size());
    const std::uint64_t twin = std::uint64_t{rng.below(num_train / types)} * types + index % types;
    const Recipe train = recipe(Split::kTrain, twin, base_seed, kinds, layouts, num_train, difficulty);
    r.room = train.room;
    r.layout = train.layout;
  }
  return r;
}

void check(const Recipe& recipe) {
  MF_CHECK(static_cast<int>(recipe.split) < 3 && static_cast<int>(recipe.kind) < kGoalKinds &&
               static_cast<int>(recipe.room) < kRooms,
           "recipe: expected a known split, task type and room");
  const Difficulty& d = recipe.difficulty;
  MF_CHECK(d.min_receptacles >= 1 && d.min_receptacles <= d.max_receptacles && d.max_receptacles <= kMaxReceptacles,
           "receptacles: expected 1 <= low <= high <= ", kMaxReceptacles, ", got ", int{d.min_receptacles}, " and ",
           int{d.max_receptacles});
  MF_CHECK(d.min_objects >= 1 && d.min_objects <= d.max_objects && d.max_objects <= kMaxObjects,
           "objects: expected 1 <= low <= high <= ", kMaxObjects, ", got ", int{d.min_objects}, " and ",
           int{d.max_objects});
  MF_CHECK(d.copies >= 1, "copies: expected a count >= 1, got ", int{d.copies});
}

std::vector<std::uint8_t> layout_counts(const Recipe& recipe) {
  check(recipe);
  const Difficulty& d = recipe.difficulty;
  const std::vector<RoomReceptacle>& rows = vocabulary().rooms[static_cast<int>(recipe.room)];
  const bool unseen = recipe.split == Split::kValidUnseen;
  std::vector<std::uint8_t> counts(vocabulary().receptacles.size());
  const std::uint64_t key = mix64(pack(d)) ^ (static_cast<std::uint64_t>(recipe.room) << 40 | recipe.layout);
  for (std::uint64_t attempt = 0; attempt < kAttempts; ++attempt) {
    Rng rng(key, kLayoutStream + attempt * 2 + unseen);
    std::fill(counts.begin(), counts.end(), 0);
    std::uint32_t total = 0;
    for (const RoomReceptacle& row : rows) total += counts[row.receptacle] = row.required;
    const std::uint32_t wanted = std::max<std::uint32_t>(total, between(rng, d.min_receptacles, d.max_receptacles));
    while (total < wanted) {
      const int i = pick(rng, rows.size(), [&](std::size_t k) -> std::uint32_t {
        return counts[rows[k].receptacle] < rows[k].limit ? rows[k].weight : 0;
      });
      if (i < 0) break;
      ++counts[rows[i].receptacle];
      ++total;
    }
    if (total <= d.max_receptacles && total >= d.min_receptacles &&
        is_unseen_layout(layout_signature(recipe.room, counts)) == unseen) {
      return counts;
    }
  }
  throw std::invalid_argument(concat("receptacles: no layout of a ", kRoomNames[static_cast<int>(recipe.room)], " with ",
                                  int{d.min_receptacles}, " to ", int{d.max_receptacles},
                                  " receptacles was found; widen the range"));
}

std::uint64_t layout_signature(Room room, const std::vector<std::uint8_t>& counts) {
  std::uint64_t h = mix64(static_cast<std::uint64_t>(room));
  for (std::size_t c = 0; c < counts.size(); ++c) {
    if (counts[c] > 0) h = mix64(h ^ (c << 8 | counts[c]));
  }
  return h;
}

bool is_unseen_layout(std::uint64_t signature) { return mix64(signature) % 5 == 0; }
bool is_valid_game(std::uint64_t fingerprint) { return mix64(fingerprint) % 4 == 0; }

std::shared_ptr<const World> generate(const Recipe& recipe) {
  const std::vector<std::uint8_t> counts = layout_counts(recipe);
  for (std::uint64_t attempt = 0; attempt < kAttempts; ++attempt) {
    Draft draft(recipe, counts, attempt);
    if (!draft.draw()) continue;
    if (recipe.split != Split::kValidUnseen &&
        is_valid_game(draft.signature()) != (recipe.split == Split::kValidSeen)) {
      continue;
    }
    const std::shared_ptr<const World> world = draft.finish();
    if (planner_wins(*world)) return world;
  }
  throw std::invalid_argument(concat("objects: no solvable ", kGoalNames[static_cast<int>(recipe.kind)],
                                  " game was found for seed ", recipe.seed, "; widen the ranges"));
}

}  // namespace manus_fast::household

// Reading commands, and what they do.
#include "household/world.h"

#include <algorithm>

#include "common/rng.h"

namespace manus_fast::household {

namespace {

bool strip_prefix(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Splits "apple 1 from fridge 1" at " from ". No name has such a word in it (checked for each spec).
bool split(std::string_view text, std::string_view word, std::string_view& left, std::string_view& right) {
  const std::size_t at = text.find(word);
  if (at == std::string_view::npos) return false;
  left = text.substr(0, at);
  right = text.substr(at + word.size());
  return true;
}

}  // namespace

void World::reset(State& state) const {
  state = State();
  state.location = spec_.start;
  for (std::size_t r = 0; r < spec_.receptacles.size(); ++r) {
    if (spec_.receptacles[r].opened) state.opened[r >> 6] |= 1ull << (r & 63);
  }
  for (std::size_t o = 0; o < spec_.objects.size(); ++o) {
    state.place[o] = spec_.objects[o].receptacle;
    state.spot[o] = kNone;
    state.conditions[o] = spec_.objects[o].conditions & static_cast<std::uint8_t>(~kAtOrigin);
    if (spec_.objects[o].location != kNone) state.conditions[o] |= kAtOrigin;
  }
  std::size_t slot = 0;
  for (const ObjectSpec& object : spec_.objects) {
    for (const std::uint8_t r : object.also) state.extra[slot++] = r;
  }
  state.won = goal_reached(state);
}

bool World::valid(const State& state) const {
  const auto location = [&](std::uint8_t l) { return l == kNone || !at_[l].empty() || l == spec_.start; };
  if (!location(state.location) || (state.held != kNone && state.held >= spec_.objects.size())) return false;
  for (std::size_t o = 0; o < spec_.objects.size(); ++o) {
    if (state.place[o] != kNone && state.place[o] >= spec_.receptacles.size()) return false;
    if (!location(state.spot[o])) return false;
  }
  for (std::size_t i = 0; i < extra_owner_.size(); ++i) {
    if (state.extra[i] != kNone && state.extra[i] >= spec_.receptacles.size()) return false;
  }
  return true;
}

bool World::parse(std::string_view text, Command& command) const {
  command = Command();
  const auto receptacle = [&](Verb verb, std::string_view name) {
    const int r = find_receptacle(name);
    if (r < 0) return false;
    command.verb = verb;
    command.receptacle = static_cast<std::uint8_t>(r);
    return true;
  };
  const auto object = [&](Verb verb, std::string_view name) {
    const int o = find_object(name);
    if (o < 0) return false;
    command.verb = verb;
    command.object = static_cast<std::uint8_t>(o);
    return true;
  };
  std::string_view left, right;
  const auto both = [&](Verb verb, std::string_view word) {
    return split(text, word, left, right) && object(verb, left) && receptacle(verb, right);
  };
  if (text == "look") return true;
  if (text == "inventory") return command.verb = Verb::kInventory, true;
  if (text == "help") return command.verb = Verb::kHelp, true;
  if (strip_prefix(text, "go to ")) return receptacle(Verb::kGo, text);
  if (strip_prefix(text, "open ")) return receptacle(Verb::kOpen, text);
  if (strip_prefix(text, "close ")) return receptacle(Verb::kClose, text);
  if (strip_prefix(text, "examine ")) {
    return receptacle(Verb::kExamineReceptacle, text) || object(Verb::kExamineObject, text);
  }
  if (strip_prefix(text, "take ")) return both(Verb::kTake, " from ");
  if (strip_prefix(text, spec_.put_grammar ? "put " : "move ")) {
    return both(Verb::kPut, spec_.put_grammar ? " in/on " : " to ");
  }
  if (strip_prefix(text, "use ")) return object(Verb::kUse, text);
  if (strip_prefix(text, "clean ")) return both(Verb::kCleanWith, " with ");
  if (strip_prefix(text, "heat ")) return both(Verb::kHeatWith, " with ");
  if (strip_prefix(text, "cool ")) return both(Verb::kCoolWith, " with ");
  if (strip_prefix(text, "slice ")) {
    if (!split(text, " with ", left, right)) return false;
    const int knife = find_object(right);
    if (knife < 0) return false;
    command.tool = static_cast<std::uint8_t>(knife);
    return object(Verb::kSlice, left);
  }
  return false;
}

// In a receptacle at the player's location, open or not.
bool World::lies_here(const State& state, int object) const {
  const std::uint8_t r = state.place[object];
  if (r != kNone && spec_.receptacles[r].location == state.location) return true;
  if (!(spec_.objects[object].properties & kSpread)) return false;
  for (const std::uint8_t here : at_[state.location]) {
    if (extra_slot(state, object, here) >= 0) return true;
  }
  return false;
}

// objectAtLocation. An object's own location need not be its receptacle's; it holds until the object is taken there.
bool World::is_at(const State& state, int object, std::uint8_t location) const {
  return location != kNone && (state.spot[object] == location || (state.conditions[object] & kAtOrigin &&
                                                                  spec_.objects[object].location == location));
}

// The slot of State::extra that says that `object` is in `receptacle` (kNone: a free slot of the object), or -1.
int World::extra_slot(const State& state, int object, std::uint8_t receptacle) const {
  for (std::size_t i = 0; i < extra_owner_.size(); ++i) {
    if (extra_owner_[i] == object && state.extra[i] == receptacle) return static_cast<int>(i);
  }
  return -1;
}

void World::take(State& state, std::uint8_t o, std::uint8_t r) const {
  if (state.place[o] == r) {
    state.place[o] = kNone;
  } else {
    state.extra[extra_slot(state, o, r)] = kNone;
  }
  if (state.spot[o] == state.location) state.spot[o] = kNone;
  if (spec_.objects[o].location == state.location) state.conditions[o] &= static_cast<std::uint8_t>(~kAtOrigin);
  if (shared_[r] != kNone) state.left[o] |= 1ull << shared_[r];
  state.held = o;
}

void World::put(State& state, std::uint8_t o, std::uint8_t r) const {
  if (!lies_in(state, o, r)) {
    // An object taken from one of its receptacles has given a slot free.
    if (state.place[o] == kNone) {
      state.place[o] = r;
    } else {
      state.extra[extra_slot(state, o, kNone)] = r;
    }
  }
  if (spec_.objects[o].location == state.location) {
    state.conditions[o] |= kAtOrigin;
  } else {
    state.spot[o] = state.location;
  }
  if (shared_[r] != kNone) state.left[o] &= ~(1ull << shared_[r]);
  state.held = kNone;
}

bool World::applicable(const State& state, const Command& command) const {
  const bool here = command.receptacle != kNone && spec_.receptacles[command.receptacle].location == state.location;
  const ReceptacleSpec* r = command.receptacle != kNone ? &spec_.receptacles[command.receptacle] : nullptr;
  const std::uint16_t properties = command.object != kNone ? spec_.objects[command.object].properties : 0;
  const bool held = command.object != kNone && state.held == command.object;
  switch (command.verb) {
    case Verb::kLookAround:
    case Verb::kInventory:
      return true;
    case Verb::kHelp:
      return spec_.help;
    case Verb::kGo:
      return !here && r->location != kNone;
    case Verb::kOpen:
      return here && r->openable && !state.is_open(command.receptacle);
    case Verb::kClose:
      return here && r->openable && state.is_open(command.receptacle);
    case Verb::kExamineReceptacle:
      return here;
    case Verb::kExamineObject:
      // The domain's other case, an object in an open receptacle here, asks for something of type "location,": a
      // comma too many, so that no game has it.
      return held;
    case Verb::kTake:
      return here && properties & kPickupable && state.held == kNone &&
             lies_in(state, command.object, command.receptacle) && accessible(state, command.receptacle);
    case Verb::kPut:
      return here && held && accessible(state, command.receptacle) && can_contain(command.receptacle, command.object);
    case Verb::kUse:  // works on what lies in a closed receptacle, too: the domain does not ask for an open one
      return properties & kToggleable && lies_here(state, command.object);
    case Verb::kCleanWith:
      return here && held && properties & kCleanable && r->role == Role::kSink;
    case Verb::kHeatWith:
      return here && held && properties & kHeatable && r->role == Role::kMicrowave;
    case Verb::kCoolWith:
      return here && held && properties & kCoolable && r->role == Role::kFridge;
    case Verb::kSlice:  // an object in a closed receptacle of this location can be sliced: same remark as for kUse
      return properties & kSliceable && state.held == command.tool && spec_.objects[command.tool].properties & kKnife &&
             is_at(state, command.object, state.location);
  }
  return false;
}

void World::learn(State& state, int receptacle) const {
  if (!accessible(state, receptacle)) return;
  state.seen[receptacle >> 6] |= 1ull << (receptacle & 63);
  for (std::size_t o = 0; o < spec_.objects.size(); ++o) {
    if (lies_in(state, static_cast<int>(o), receptacle)) state.conditions[o] |= kKnown;
  }
}

void World::apply(State& state, const Command& command) const {
  const std::uint8_t r = command.receptacle;
  const std::uint8_t o = command.object;
  switch (command.verb) {
    case Verb::kGo:
      state.location = spec_.receptacles[r].location;
      learn(state, r);
      break;
    case Verb::kOpen:
      state.opened[r >> 6] |= 1ull << (r & 63);
      learn(state, r);
      break;
    case Verb::kClose:
      state.opened[r >> 6] &= ~(1ull << (r & 63));
      break;
    case Verb::kExamineReceptacle:
      learn(state, r);
      break;
    case Verb::kTake:
      take(state, o, r);
      state.conditions[o] |= kKnown;
      break;
    case Verb::kPut:
      put(state, o, r);
      break;
    case Verb::kUse:
      state.conditions[o] |= kToggled;
      break;
    case Verb::kCleanWith:
      state.conditions[o] |= kClean;
      break;
    case Verb::kHeatWith:
      state.conditions[o] = static_cast<std::uint8_t>((state.conditions[o] | kHot) & ~kCool);
      break;
    case Verb::kCoolWith:
      state.conditions[o] = static_cast<std::uint8_t>((state.conditions[o] | kCool) & ~kHot);
      break;
    case Verb::kSlice:
      state.conditions[o] |= kSliced;
      break;
    case Verb::kLookAround:
    case Verb::kInventory:
    case Verb::kHelp:
    case Verb::kExamineObject:
      break;
  }
}

bool World::goal_reached(const State& state) const {
  const Goal& goal = spec_.goal;
  if (goal.kind == GoalKind::kLook) {
    if (state.held == kNone || spec_.objects[state.held].type != goal.object_type) return false;
    for (const std::uint8_t lamp : goal_toggles_) {
      if (state.conditions[lamp] & kToggled && lies_here(state, lamp)) return true;
    }
    return false;
  }
  std::uint8_t needed = 0;
  if (goal.kind == GoalKind::kClean) needed = kClean;
  if (goal.kind == GoalKind::kHeat) needed = kHot;
  if (goal.kind == GoalKind::kCool) needed = kCool;
  std::uint64_t once[2] = {0, 0};  // receptacles that already have one
  for (const std::uint8_t o : goal_objects_) {
    if ((state.conditions[o] & needed) != needed) continue;
    const auto reaches = [&](std::uint8_t r) {
      if (r == kNone || spec_.receptacles[r].type != goal.receptacle_type) return false;
      if (goal.kind != GoalKind::kTwo) return true;
      const std::uint64_t bit = 1ull << (r & 63);
      if (once[r >> 6] & bit) return true;
      once[r >> 6] |= bit;
      return false;
    };
    if (reaches(state.place[o])) return true;
    if (!(spec_.objects[o].properties & kSpread)) continue;
    for (std::size_t i = 0; i < extra_owner_.size(); ++i) {
      if (extra_owner_[i] == o && reaches(state.extra[i])) return true;
    }
  }
  return false;
}

float World::progress(const State& state) const {
  if (goal_reached(state)) return 1.0f;
  const GoalKind kind = spec_.goal.kind;
  const bool holds_one = state.held != kNone && spec_.objects[state.held].type == spec_.goal.object_type;
  if (kind == GoalKind::kPlace || kind == GoalKind::kLook) return holds_one ? 1.0f / 2 : 0.0f;
  if (kind == GoalKind::kTwo) {  // not reached: no receptacle has two
    bool one_there = false;
    for (const std::uint8_t o : goal_objects_) {
      const std::uint8_t r = state.place[o];
      one_there |= r != kNone && spec_.receptacles[r].type == spec_.goal.receptacle_type;
    }
    return (holds_one + 2 * one_there) / 4.0f;
  }
  const std::uint8_t needed = kind == GoalKind::kClean ? kClean : kind == GoalKind::kHeat ? kHot : kCool;
  int most = 0;
  for (const std::uint8_t o : goal_objects_) {
    most = std::max(most, (state.held == o) + ((state.conditions[o] & needed) == needed));
  }
  return most / 3.0f;
}

std::uint64_t World::hash(const State& state) const {
  std::uint64_t h = mix64(fingerprint_ ^ state.location ^ static_cast<std::uint64_t>(state.held) << 8);
  h = mix64(h ^ state.opened[0]);
  h = mix64(h ^ state.opened[1]);
  for (std::size_t o = 0; o < spec_.objects.size(); o += 2) {
    std::uint64_t word = 0;
    for (std::size_t i = o; i < std::min(o + 2, spec_.objects.size()); ++i) {
      const std::uint64_t conditions = state.conditions[i] & ~static_cast<unsigned>(kKnown);
      const std::uint8_t place = spec_.objects[i].properties & kSpread ? kNone : state.place[i];
      word = word << 24 | place | static_cast<std::uint64_t>(state.spot[i]) << 8 | conditions << 16;
    }
    h = mix64(h ^ word);
  }
  for (std::size_t o = 0; num_shared_ > 0 && o < spec_.objects.size(); ++o) {
    if (state.left[o] != 0) h = mix64(mix64(h ^ (o + 1)) ^ state.left[o]);
  }
  // Which slot says where an object is makes no difference.
  std::uint64_t extras = 0;
  for (std::size_t i = 0; i < extra_owner_.size(); ++i) {
    const std::uint64_t owner = static_cast<std::uint64_t>(extra_owner_[i] + 1) << 8;
    extras += mix64(owner | state.extra[i]);
    if (i == 0 || extra_owner_[i] != extra_owner_[i - 1]) extras += mix64(owner | state.place[extra_owner_[i]]);
  }
  return extra_owner_.empty() ? h : mix64(h ^ extras);
}

bool World::step(State& state, std::string_view text, std::string& out) const {
  out.clear();
  Command command;
  if (!parse(text, command) || !applicable(state, command)) {
    out = "Nothing happens.";
    return false;
  }
  apply(state, command);
  state.won = goal_reached(state);
  feedback(state, command, out);
  return true;
}

}  // namespace manus_fast::household

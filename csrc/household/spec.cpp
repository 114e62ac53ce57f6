// How a `WorldSpec` is checked and prepared for play.
#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "common/rng.h"
#include "household/world.h"

namespace manus_fast::household {

const std::array<const char*, kGoalKinds> kGoalNames = {
    "look_at_obj_in_light",          "pick_and_place_simple",         "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place"};

namespace {

template <typename Specs>
std::vector<std::uint8_t> sorted_by_name(const Specs& specs, const char* what) {
  std::vector<std::uint8_t> order(specs.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint8_t>(i);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return specs[a].name < specs[b].name; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    MF_CHECK(specs[order[i - 1]].name != specs[order[i]].name, what, ": the name '", specs[order[i]].name,
             "' occurs twice");
  }
  return order;
}

void check_name(const std::string& name, const char* what) {
  MF_CHECK(!name.empty(), what, ": expected a name, got an empty one");
  for (const char c : name) {
    MF_CHECK(static_cast<unsigned char>(c) >= 0x20, what, ": the name '", name, "' has a control character");
  }
}

template <typename Specs>
int find(const Specs& specs, const std::vector<std::uint8_t>& order, std::string_view name) {
  const auto it = std::lower_bound(order.begin(), order.end(), name, [&](int i, std::string_view wanted) {
    return std::string_view(specs[i].name) < wanted;
  });
  return it != order.end() && specs[*it].name == name ? *it : -1;
}

}  // namespace

World::World(WorldSpec spec) : spec_(std::move(spec)) {
  MF_CHECK(spec_.receptacles.size() <= kMaxReceptacles, "receptacles: expected at most ", kMaxReceptacles, ", got ",
           spec_.receptacles.size());
  MF_CHECK(spec_.objects.size() <= kMaxObjects, "objects: expected at most ", kMaxObjects, ", got ",
           spec_.objects.size());
  MF_CHECK(spec_.can_contain.size() == spec_.receptacle_types.size(),
           "can_contain: expected one row per receptacle type");
  contains_.reserve(spec_.receptacle_types.size() * spec_.object_types.size());
  for (const std::vector<bool>& row : spec_.can_contain) {
    MF_CHECK(row.size() == spec_.object_types.size(), "can_contain: expected one column per object type");
    contains_.insert(contains_.end(), row.begin(), row.end());
  }
  for (std::size_t r = 0; r < spec_.receptacles.size(); ++r) {
    const ReceptacleSpec& receptacle = spec_.receptacles[r];
    check_name(receptacle.name, "receptacles");
    MF_CHECK(receptacle.type < spec_.receptacle_types.size(), "receptacles: '", receptacle.name, "' has no known type");
    MF_CHECK(receptacle.location != kNone || spec_.start != kNone, "receptacles: '", receptacle.name,
             "' has no location, and the player starts at none");
    if (receptacle.location != kNone) at_[receptacle.location].push_back(static_cast<std::uint8_t>(r));
  }
  for (const ReceptacleSpec& receptacle : spec_.receptacles) {
    const bool shares = receptacle.location != kNone && at_[receptacle.location].size() > 1;
    shared_.push_back(shares ? static_cast<std::uint8_t>(num_shared_++) : kNone);
  }
  MF_CHECK(num_shared_ <= kMaxShared, "receptacles: expected at most ", kMaxShared, " that share a location, got ",
           num_shared_);
  for (ObjectSpec& object : spec_.objects) {
    check_name(object.name, "objects");
    object.properties &= static_cast<std::uint16_t>(~kSpread);
    for (const std::uint8_t r : object.also) {
      MF_CHECK(r < spec_.receptacles.size() && object.receptacle != kNone, "objects: '", object.name,
               "' lies in a receptacle that does not exist");
      object.properties |= kSpread;
      extra_owner_.push_back(static_cast<std::uint8_t>(&object - spec_.objects.data()));
    }
    MF_CHECK(object.type < spec_.object_types.size(), "objects: '", object.name, "' has no known type");
    MF_CHECK(object.receptacle == kNone || object.receptacle < spec_.receptacles.size(), "objects: '", object.name,
             "' lies in a receptacle that does not exist");
    for (const std::uint8_t inner : object.inside) {
      MF_CHECK(inner < spec_.objects.size(), "objects: '", object.name, "' holds an object that does not exist");
    }
  }
  MF_CHECK(extra_owner_.size() <= kMaxExtras, "objects: expected at most ", kMaxExtras,
           " places beyond the first, got ", extra_owner_.size());
  index_names();
  index_goal();
  hash_spec();
}

void World::index_names() {
  objects_by_name_ = sorted_by_name(spec_.objects, "objects");
  receptacles_by_name_ = sorted_by_name(spec_.receptacles, "receptacles");
  rank_.resize(receptacles_by_name_.size(), kNone);
  for (const std::uint8_t r : receptacles_by_name_) {
    if (spec_.receptacles[r].location == kNone) continue;
    rank_[r] = static_cast<std::uint8_t>(go_begin_.size());
    go_begin_.push_back(static_cast<std::uint32_t>(go_text_.size()));
    go_text_ += "go to " + spec_.receptacles[r].name + "\n";
  }
  go_begin_.push_back(static_cast<std::uint32_t>(go_text_.size()));
  for (const ObjectSpec& object : spec_.objects) {
    MF_CHECK(find_receptacle(object.name) < 0, "objects: '", object.name, "' is the name of a receptacle too");
    for (const char* word : {" from ", " to ", " with ", " in/on "}) {
      MF_CHECK(object.name.find(word) == std::string::npos, "objects: the name '", object.name, "' contains '", word,
               "', which the commands use");
    }
  }
}

void World::index_goal() {
  const Goal& goal = spec_.goal;
  MF_CHECK(goal.object_type < spec_.object_types.size(), "goal: expected a known object type");
  const bool look = goal.kind == GoalKind::kLook;
  MF_CHECK(look ? goal.toggle_type < spec_.object_types.size() : goal.receptacle_type < spec_.receptacle_types.size(),
           "goal: expected a known ", look ? "lamp type" : "receptacle type");
  // The goals of ALFRED ask for the ability, too: a goal "clean X" is met only by a cleanable X.
  std::uint16_t needed = 0;
  if (goal.kind == GoalKind::kClean) needed = kCleanable;
  if (goal.kind == GoalKind::kHeat) needed = kHeatable;
  if (goal.kind == GoalKind::kCool) needed = kCoolable;
  for (std::size_t o = 0; o < spec_.objects.size(); ++o) {
    const ObjectSpec& object = spec_.objects[o];
    if (object.type == goal.object_type && (object.properties & needed) == needed) {
      goal_objects_.push_back(static_cast<std::uint8_t>(o));
    }
    if (look && object.type == goal.toggle_type && object.properties & kToggleable) {
      goal_toggles_.push_back(static_cast<std::uint8_t>(o));
    }
  }
  for (std::size_t r = 0; !look && r < spec_.receptacles.size(); ++r) {
    if (spec_.receptacles[r].type == goal.receptacle_type) goal_receptacles_.push_back(static_cast<std::uint8_t>(r));
  }
}

void World::hash_spec() {
  std::uint64_t h = 0;
  const auto add = [&h](std::uint64_t value) { h = mix64(h ^ value); };
  const auto add_text = [&](const std::string& text) {
    add(text.size());
    for (std::size_t i = 0; i < text.size(); i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min<std::size_t>(8, text.size() - i));
      add(word);
    }
  };
  for (const ReceptacleSpec& r : spec_.receptacles) {
    add_text(r.name);
    add(r.type | r.location << 8 | r.openable << 16 | r.opened << 17 | static_cast<int>(r.role) << 18);
    add_text(r.arrival);
  }
  add(~0ull);
  for (const ObjectSpec& o : spec_.objects) {
    add_text(o.name);
    add(o.type | o.receptacle << 8 | o.location << 16 | static_cast<std::uint64_t>(o.properties) << 24 |
        static_cast<std::uint64_t>(o.conditions) << 40);
    for (const std::uint8_t inner : o.inside) add(inner);
    for (const std::uint8_t r : o.also) add(r | 256);
  }
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < contains_.size(); ++i) {
    bits = bits << 1 | contains_[i];
    if (i % 64 == 63) add(bits);
  }
  add(bits);
  const Goal& goal = spec_.goal;
  add(static_cast<int>(goal.kind) | goal.object_type << 8 | goal.receptacle_type << 16 |
      static_cast<std::uint64_t>(goal.toggle_type) << 24 | static_cast<std::uint64_t>(spec_.start) << 32 |
      static_cast<std::uint64_t>(spec_.put_grammar) << 40 | static_cast<std::uint64_t>(spec_.help) << 41);
  add_text(spec_.task);
  fingerprint_ = h;
}

int World::find_object(std::string_view name) const { return find(spec_.objects, objects_by_name_, name); }
int World::find_receptacle(std::string_view name) const { return find(spec_.receptacles, receptacles_by_name_, name); }

}  // namespace manus_fast::household

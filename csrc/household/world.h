// The rules of the household text world, those of ALFWorld (Shridhar et al., "ALFWorld: Aligning Text and Embodied
// Environments for Interactive Learning", ICLR 2021): what its PDDL domain allows and what its grammar says.
// A `World` is the immutable part of one game, built from a `WorldSpec`; a `State` is what play changes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace manus_fast::household {

constexpr int kMaxObjects = 240;
constexpr int kMaxReceptacles = 128;
constexpr int kMaxExtras = 16;  // places of objects beyond their first, in one game
constexpr int kMaxShared = 64;  // receptacles that share their location with another
constexpr std::uint8_t kNone = 255;  // no receptacle, no location, no object

enum class GoalKind : std::uint8_t { kLook, kPlace, kClean, kHeat, kCool, kTwo };
constexpr int kGoalKinds = 6;
// The names of ALFRED's task types, indexed by GoalKind.
extern const std::array<const char*, kGoalKinds> kGoalNames;

enum class Role : std::uint8_t { kPlain, kSink, kMicrowave, kFridge };

// Properties of an object that play does not change.
enum Property : std::uint16_t {
  kPickupable = 1 << 0,
  kCleanable = 1 << 1,
  kHeatable = 1 << 2,
  kCoolable = 1 << 3,
  kSliceable = 1 << 4,
  kToggleable = 1 << 5,
  kHolds = 1 << 6,  // isReceptacleObject: a bowl, a box
  kKnife = 1 << 7,  // of type Knife or ButterKnife
  kSpread = 1 << 8,  // was in several receptacles at the start; set by World
};

// Properties of an object that play changes.
enum Condition : std::uint8_t {
  kClean = 1 << 0,
  kHot = 1 << 1,
  kCool = 1 << 2,
  kSliced = 1 << 3,
  kToggled = 1 << 4,
  kKnown = 1 << 5,  // not a rule: the player has been told where the object is (for the explorer)
  kAtOrigin = 1 << 6,  // objectAtLocation of the spec's own location holds
};

struct ReceptacleSpec {
  std::string name;           // "cabinet 3"
  std::uint8_t type = 0;      // index into WorldSpec::receptacle_types
  std::uint8_t location = 0;  // several receptacles may share one; kNone: out of reach
  bool openable = false;
  bool opened = false;
  Role role = Role::kPlain;
  std::string arrival;  // what "You arrive at" says, where that is not the name (ALFWorld up to 0.3: "loc 3")
};

struct ObjectSpec {
  std::string name;                 // "mug 1"
  std::uint8_t type = 0;            // index into WorldSpec::object_types
  std::uint16_t properties = 0;     // Property bits
  std::uint8_t conditions = 0;      // Condition bits at the start
  std::uint8_t receptacle = kNone;  // where it lies: index into WorldSpec::receptacles
  std::uint8_t location = kNone;    // objectAtLocation, which need not be the receptacle's
  std::vector<std::uint8_t> inside;  // objects listed by "examine" of a receptacle object
  std::vector<std::uint8_t> also;    // further receptacles that it is in, as ALFRED's scenes have it
};

struct Goal {
  GoalKind kind = GoalKind::kPlace;
  std::uint8_t object_type = 0;
  std::uint8_t receptacle_type = kNone;  // unused by kLook
  std::uint8_t toggle_type = kNone;      // kLook only
};

// Everything that makes one game. Receptacles and objects are stored in the order in which lists name them.
struct WorldSpec {
  std::vector<std::string> receptacle_types;  // "cabinet": class names in lower case
  std::vector<std::string> object_types;
  std::vector<std::vector<bool>> can_contain;  // [receptacle type][object type]
  std::vector<ReceptacleSpec> receptacles;
  std::vector<ObjectSpec> objects;
  std::uint8_t start = kNone;  // the player's first location; kNone: one without receptacles
  Goal goal;
  std::string task;           // "put a mug in desk", without the full stop
  bool put_grammar = false;   // "put O in/on R" (ALFWorld up to 0.3) instead of "move O to R"
  bool help = true;           // whether there is a command "help" (ALFWorld from 0.4)
};

struct State {
  std::uint64_t opened[2] = {0, 0};
  std::uint64_t seen[2] = {0, 0};  // receptacles whose contents the player has been told
  std::uint16_t steps = 0;
  std::uint8_t location = kNone;
  std::uint8_t held = kNone;
  std::uint8_t won = 0;
  std::uint8_t over = 0;  // set by the batch: won or out of steps
  std::uint8_t reserved[2] = {0, 0};
  std::uint8_t place[kMaxObjects] = {};  // receptacle of each object, kNone while held
  std::uint8_t spot[kMaxObjects] = {};   // objectAtLocation of each object that was put away from its origin
  std::uint8_t conditions[kMaxObjects] = {};
  std::uint8_t extra[kMaxExtras] = {};   // further receptacles of objects that are in several
  // The receptacles, of those that share a location, that an object was taken from and not put back into. "look"
  // names the object where it lies in the other one: the engine remembers the negated fact.
  std::uint64_t left[kMaxObjects] = {};

  bool is_open(int receptacle) const { return opened[receptacle >> 6] >> (receptacle & 63) & 1; }
  bool has_seen(int receptacle) const { return seen[receptacle >> 6] >> (receptacle & 63) & 1; }
};
static_assert(std::is_trivially_copyable_v<State>);
static_assert(sizeof(State) == 40 + kMaxExtras + 11 * kMaxObjects,
              "State has no padding: it is hashed and saved as bytes");

enum class Verb : std::uint8_t {
  kLookAround, kInventory, kHelp, kGo, kOpen, kClose, kExamineReceptacle, kExamineObject, kTake, kPut, kUse, kCleanWith,
  kHeatWith, kCoolWith, kSlice
};

struct Command {
  Verb verb = Verb::kLookAround;
  std::uint8_t object = kNone;
  std::uint8_t receptacle = kNone;
  std::uint8_t tool = kNone;  // the knife of kSlice

  bool operator==(const Command& other) const {
    return verb == other.verb && object == other.object && receptacle == other.receptacle && tool == other.tool;
  }
};

class World {
 public:
  // Throws std::invalid_argument where the spec contradicts itself or exceeds the limits above.
  explicit World(WorldSpec spec);

  const WorldSpec& spec() const { return spec_; }
  int num_objects() const { return static_cast<int>(spec_.objects.size()); }
  int num_receptacles() const { return static_cast<int>(spec_.receptacles.size()); }
  // Equal for two worlds exactly when they play alike (up to a 64-bit hash).
  std::uint64_t fingerprint() const { return fingerprint_; }
  const std::vector<std::uint8_t>& goal_objects() const { return goal_objects_; }
  const std::vector<std::uint8_t>& goal_receptacles() const { return goal_receptacles_; }
  // The receptacles at a location in list order; empty for kNone.
  const std::vector<std::uint8_t>& at(std::uint8_t location) const { return at_[location]; }

  // Whether an object lies in a receptacle.
  bool lies_in(const State& state, int object, int receptacle) const {
    return state.place[object] == receptacle ||
           (spec_.objects[object].properties & kSpread && extra_slot(state, object, receptacle) >= 0);
  }
  bool can_contain(int receptacle, int object) const {
    return contains_[spec_.receptacles[receptacle].type * spec_.object_types.size() + spec_.objects[object].type];
  }
  // Open or not openable: what lies in it can be seen and taken.
  bool accessible(const State& state, int receptacle) const {
    return !spec_.receptacles[receptacle].openable || state.is_open(receptacle);
  }

  void reset(State& state) const;
  // Whether every index in a state from outside points somewhere (its rules may still be broken).
  bool valid(const State& state) const;
  // Plays one command: writes the feedback into `out` (cleared first) and tells whether the command was admissible.
  // Any bytes are safe; what is not exactly an admissible command gives "Nothing happens.".
  bool step(State& state, std::string_view command, std::string& out) const;

  bool parse(std::string_view text, Command& command) const;
  bool applicable(const State& state, const Command& command) const;
  void apply(State& state, const Command& command) const;
  bool goal_reached(const State& state) const;
  // Share of the goal's subgoals that the state fulfils, in [0, 1], of the objects that are furthest on: in hand, made
  // clean, hot or cool, put where it belongs. 1 exactly where the goal is reached.
  float progress(const State& state) const;
  // A hash of what the rules depend on: neither the step count nor what the player has seen.
  std::uint64_t hash(const State& state) const;

  void intro(const State& state, std::string& out) const;
  void feedback(const State& state, const Command& command, std::string& out) const;
  void command_text(const Command& command, std::string& out) const;
  // Appends the admissible commands, sorted by their bytes, each followed by '\n'; returns their number.
  int admissible(const State& state, std::string& out) const;

 private:
  void index_names();
  void index_goal();
  void hash_spec();
  int find_object(std::string_view name) const;
  int find_receptacle(std::string_view name) const;
  void learn(State& state, int receptacle) const;
  bool lies_here(const State& state, int object) const;
  bool is_at(const State& state, int object, std::uint8_t location) const;
  int extra_slot(const State& state, int object, std::uint8_t receptacle) const;
  void take(State& state, std::uint8_t object, std::uint8_t receptacle) const;
  void put(State& state, std::uint8_t object, std::uint8_t receptacle) const;
  void contents(const State& state, int receptacle, std::string& out) const;
  void describe_receptacle(const State& state, int receptacle, std::string& out) const;
  void describe_object(const State& state, int object, std::string& out) const;
  void look(const State& state, bool everywhere, std::string& out) const;

  WorldSpec spec_;
  std::vector<bool> contains_;
  std::vector<std::uint8_t> objects_by_name_;  // indices in the byte order of their names
  std::vector<std::uint8_t> receptacles_by_name_;
  std::vector<std::uint8_t> rank_;      // of each receptacle that can be reached, in the byte order of their names
  std::string go_text_;                 // "go to R\n" of these in that order: the longest part of every list
  std::vector<std::uint32_t> go_begin_;  // where each starts, and the end
  std::array<std::vector<std::uint8_t>, 256> at_;  // receptacles of a location in list order; at_[kNone] is empty
  std::vector<std::uint8_t> extra_owner_;  // the object of each State::extra
  int num_shared_ = 0;
  std::vector<std::uint8_t> shared_;       // bit in State::left of each receptacle, kNone for those that stand alone
  std::vector<std::uint8_t> goal_objects_;
  std::vector<std::uint8_t> goal_receptacles_;
  std::vector<std::uint8_t> goal_toggles_;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace manus_fast::household

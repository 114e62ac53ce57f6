// Players that know the rules: `planner` sees the whole state, `explorer` only what the game has told it so far.
#pragma once

#include <string>
#include <vector>

#include "household/world.h"

namespace manus_fast::household {

enum class ExpertKind : std::uint8_t {
  kPlanner,   // a shortest plan from the full state
  kExplorer,  // searches unseen receptacles in the order of how likely they hold what is wanted
  kSweep      // searches them in list order
};

enum class Reason : std::uint8_t { kSearch, kTake, kProcess, kPlace, kLamp, kPutAside, kStuck };

struct Move {
  Command command;
  Reason reason = Reason::kStuck;
  std::uint8_t object = kNone;       // the object that the move is about
  std::uint8_t object_type = kNone;  // what is searched for
};

// The moves of a shortest plan to the goal, or an empty list where none exists or the goal is reached. With
// `known_only` it uses only objects whose place the player has been told. Length counts commands.
std::vector<Move> plan(const World& world, const State& state, bool known_only = false);

// The next move of an expert in any state. Without a way to the goal: "look", reason kStuck.
Move next_move(const World& world, const State& state, ExpertKind kind);

// One line of at most twelve words: why the move is made.
std::string thought(const World& world, const Move& move);

// The same in two or three words: the subgoal that the move serves.
std::string subgoal(const World& world, const Move& move);

}  // namespace manus_fast::household

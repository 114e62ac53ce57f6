// Seeded layouts and tasks: the same game on every machine for the same recipe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "household/vocabulary.h"
#include "household/world.h"

namespace manus_fast::household {

enum class Split : std::uint8_t { kTrain, kValidSeen, kValidUnseen };

// Ranges are inclusive.
struct Difficulty {
  std::uint8_t min_receptacles = 6;
  std::uint8_t max_receptacles = 8;
  std::uint8_t min_objects = 6;
  std::uint8_t max_objects = 6;
  std::uint8_t copies = 2;  // at most so many objects of one class (two-object tasks always have two)
};

// Level 1 … 3.
Difficulty difficulty(int level);

// All that makes a game. Trivially copyable, so that a saved state can carry it.
struct Recipe {
  std::uint64_t seed = 0;    // objects, placement, goal
  std::uint32_t layout = 0;  // number within its (room, split, difficulty)
  Split split = Split::kTrain;
  GoalKind kind = GoalKind::kPlace;
  Room room = Room::kKitchen;
  std::uint8_t put_grammar = 0;
  Difficulty difficulty;
  std::uint8_t reserved[3] = {0, 0, 0};
};
static_assert(sizeof(Recipe) == 24);

// The recipe of one task of a split. Types take turns (index modulo their number), rooms follow from the type, layouts
// are drawn from the `layouts` first of the room. A task of valid_seen has the layout of one of the `num_train` tasks
// of train with its type; valid_unseen has layouts of its own.
Recipe recipe(Split split, std::uint64_t index, std::uint64_t base_seed, const std::vector<GoalKind>& kinds,
              std::uint32_t layouts, std::uint32_t num_train, const Difficulty& difficulty);

// How many of each receptacle class a layout has, by class index of the vocabulary. Which receptacles there are is all
// that the text of an empty world shows, so two layouts are the same exactly when these counts and the room are.
std::vector<std::uint8_t> layout_counts(const Recipe& recipe);
std::uint64_t layout_signature(Room room, const std::vector<std::uint8_t>& counts);
// Layouts are parted by a hash of their signature: none is in both train and valid_unseen.
bool is_unseen_layout(std::uint64_t signature);
// Games in the layouts of train are parted by a hash of all that makes them (objects, places, open doors, goal,
// wording): none is in both train and valid_seen.
bool is_valid_game(std::uint64_t signature);

// Throws std::invalid_argument where a recipe from outside names no split, type, room or difficulty that exists.
void check(const Recipe& recipe);

// Builds the game. It is not won at the start and the planner wins it. Throws std::invalid_argument where a thousand
// attempts give no such game (a difficulty whose ranges leave no room for one).
std::shared_ptr<const World> generate(const Recipe& recipe);

}  // namespace manus_fast::household

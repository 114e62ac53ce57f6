// Many worlds behind one call: the C++ side of an environment batch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "household/expert.h"
#include "household/generator.h"
#include "household/world.h"

namespace manus_fast::household {

// Calls check all slots before they touch any of them, so a refused call changes nothing. Work is spread over threads
// by slot; results do not depend on their number.
class Batch {
 public:
  // `max_steps`: after so many steps an episode is truncated.
  Batch(int slots, int max_steps);

  int slots() const { return static_cast<int>(slots_.size()); }

  // Generates one game per slot and resets it; the introduction becomes the slot's text.
  void reset(const std::vector<int>& slots, const std::vector<Recipe>& recipes);
  // Puts a given game into each slot and resets it. Such a slot is restored into only where it holds the same game.
  void load(const std::vector<int>& slots, const std::vector<std::shared_ptr<const World>>& worlds);
  // Plays one command per slot and makes its text and admissible commands. reward: 1 where the goal was reached now.
  void step(const std::vector<int>& slots, const std::vector<std::string_view>& actions, float* reward,
            std::uint8_t* terminated, std::uint8_t* truncated);
  void expert(const std::vector<int>& slots, ExpertKind kind, std::vector<std::string>& actions,
              std::vector<std::string>& thoughts, bool brief = false) const;

  void clone(int source, int destination);
  // Bytes that restore() takes back in any slot of any batch in any process of the same build.
  std::string save(int slot) const;
  void restore(int slot, std::string_view bytes);

  const std::string& text(int slot) const { return at(slot).text; }
  // The admissible commands, each followed by '\n'.
  const std::string& commands(int slot) const { return at(slot).commands; }
  float progress(int slot) const { return at(slot).world->progress(at(slot).state); }
  int num_commands(int slot) const { return at(slot).num_commands; }
  const State& state(int slot) const { return at(slot).state; }
  const World& world(int slot) const { return *at(slot).world; }
  std::shared_ptr<const World> shared_world(int slot) const { return at(slot).world; }
  int max_steps() const { return max_steps_; }
  std::uint64_t hash(int slot) const { return at(slot).world->hash(at(slot).state); }

 private:
  struct Slot {
    std::shared_ptr<const World> world;
    Recipe recipe;
    State state;
    std::string text;
    std::string commands;
    int num_commands = 0;
  };

  const Slot& at(int slot) const;  // throws unless the slot exists and has a game
  void check_slots(const std::vector<int>& slots, bool need_world) const;
  static void list_commands(Slot& slot);

  std::vector<Slot> slots_;
  const int max_steps_;
};

}  // namespace manus_fast::household

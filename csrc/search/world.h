// What the closed loop searches over. A native environment derives from World; the loop keeps one world per
// node, made by clone() of the parent's and one step.
#pragma once

#include <cstdint>
#include <memory>

#include "common/rng.h"

namespace manus_fast::search {

struct WorldStep {
  float reward = 0.0f;
  bool terminal = false;
};

class World {
 public:
  virtual ~World() = default;
  virtual std::unique_ptr<World> clone() const = 0;
  // Actions in this state; 0 closes the node with the value of evaluate().
  virtual std::int32_t num_actions() const = 0;
  virtual WorldStep step(std::int32_t action) = 0;
  // Writes num_actions() priors (finite, >= 0, sum > 0) and returns the state's value. `rng` belongs to this
  // evaluation alone. Called on every state that is not terminal; it must leave the state as it is.
  virtual double evaluate(float* priors, Rng& rng) const = 0;
};

// Value of a state by playing uniformly random actions for at most `depth` turns, with discount per turn.
double random_rollout(const World& world, std::int32_t depth, double discount, Rng& rng);

}  // namespace manus_fast::search

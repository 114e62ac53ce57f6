// The household world as a `World` of the closed loop: actions are its admissible commands in their sorted order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "household/world.h"
#include "search/world.h"

namespace manus_fast::search {

class HouseholdWorld final : public World {
 public:
  // `max_steps`: commands after which an episode is cut: such a state has no actions and is worth 0. A state's priors
  // are equal; its value is one random rollout of at most `rollout_depth` commands, 0 where that is 0.
  HouseholdWorld(std::shared_ptr<const household::World> game, const household::State& state, std::int32_t max_steps,
                 std::int32_t rollout_depth, double discount)
      : game_(std::move(game)), state_(state), max_steps_(max_steps), rollout_depth_(rollout_depth),
        discount_(discount) {}

  std::unique_ptr<World> clone() const override {
    return std::make_unique<HouseholdWorld>(game_, state_, max_steps_, rollout_depth_, discount_);
  }
  std::int32_t num_actions() const override;
  WorldStep step(std::int32_t action) override;
  double evaluate(float* priors, Rng& rng) const override;
  const household::State& state() const { return state_; }

 private:
  void list() const;

  std::shared_ptr<const household::World> game_;
  household::State state_;
  std::int32_t max_steps_;
  std::int32_t rollout_depth_;
  double discount_;
  // Made when first asked for: most clones step at once and never list their own.
  mutable bool listed_ = false;
  mutable std::string commands_;
  mutable std::vector<std::uint32_t> begins_;  // of each command in commands_, and the end
};

}  // namespace manus_fast::search

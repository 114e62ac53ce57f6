#include "search/household_world.h"

#include <algorithm>
#include <string_view>

#include "common/check.h"

namespace manus_fast::search {

void HouseholdWorld::list() const {
  if (listed_) return;
  listed_ = true;
  commands_.clear();
  begins_.assign(1, 0);
  if (state_.won || state_.steps >= max_steps_) return;
  game_->admissible(state_, commands_);
  for (std::size_t end = 0; (end = commands_.find('\n', end)) != std::string::npos;) {
    begins_.push_back(static_cast<std::uint32_t>(++end));
  }
}

std::int32_t HouseholdWorld::num_actions() const {
  list();
  return static_cast<std::int32_t>(begins_.size()) - 1;
}

WorldStep HouseholdWorld::step(std::int32_t action) {
  list();
  MF_CHECK(action >= 0 && action < num_actions(), "action: expected one of ", num_actions(), " commands, got ", action);
  const std::string_view command =
      std::string_view(commands_).substr(begins_[action], begins_[action + 1] - begins_[action] - 1);
  household::Command parsed;
  MF_CHECK(game_->parse(command, parsed), "step: the game does not know its own command '", std::string(command), "'");
  game_->apply(state_, parsed);
  ++state_.steps;
  const bool won = game_->goal_reached(state_);
  state_.won = won;
  listed_ = false;
  return WorldStep{won ? 1.0f : 0.0f, won};
}

double HouseholdWorld::evaluate(float* priors, Rng& rng) const {
  std::fill_n(priors, num_actions(), 1.0f);
  return rollout_depth_ > 0 ? random_rollout(*this, rollout_depth_, discount_, rng) : 0.0;
}

}  // namespace manus_fast::search

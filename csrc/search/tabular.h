// A finite Markov decision process given as tables: the smallest World, for tests, examples and known answers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "search/world.h"

namespace manus_fast::search {

struct Tables {
  std::int64_t width = 0;              // most actions of a state
  std::vector<std::int32_t> actions;   // [states] how many each state has
  std::vector<std::int32_t> next;      // [states, width]
  std::vector<float> rewards;          // [states, width]
  std::vector<std::uint8_t> terminal;  // [states, width]
  std::vector<float> priors;           // [states, width]
  std::vector<double> values;          // [states]
};

class TabularWorld final : public World {
 public:
  // rollout_depth > 0: the value of a state is one random rollout of that depth instead of the table's.
  TabularWorld(std::shared_ptr<const Tables> tables, std::int32_t state, std::int32_t rollout_depth, double discount)
      : tables_(std::move(tables)), state_(state), rollout_depth_(rollout_depth), discount_(discount) {}

  std::unique_ptr<World> clone() const override { return std::make_unique<TabularWorld>(*this); }
  std::int32_t num_actions() const override { return tables_->actions[state_]; }
  std::int32_t state() const { return state_; }

  WorldStep step(std::int32_t action) override {
    const std::int64_t at = state_ * tables_->width + action;
    state_ = tables_->next[at];
    return WorldStep{tables_->rewards[at], tables_->terminal[at] != 0};
  }

  double evaluate(float* priors, Rng& rng) const override {
    std::copy_n(tables_->priors.data() + state_ * tables_->width, num_actions(), priors);
    return rollout_depth_ > 0 ? random_rollout(*this, rollout_depth_, discount_, rng) : tables_->values[state_];
  }

 private:
  std::shared_ptr<const Tables> tables_;
  std::int32_t state_;
  std::int32_t rollout_depth_;
  double discount_;
};

}  // namespace manus_fast::search

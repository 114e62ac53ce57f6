#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "common/parallel.h"
#include "ops/ops.h"

using namespace manus_fast;

namespace {

struct Tokens {
  explicit Tokens(std::size_t n)
      : log_prob(n), old_log_prob(n), advantages(n), values(n), old_values(n), returns(n), ref(n), entropy(n), mask(n),
        grad_log_prob(n, NAN), grad_values(n, NAN), grad_entropy(n, NAN) {
    std::uint32_t state = 777;
    const auto uniform = [&] {
      state = state * 1664525u + 1013904223u;
      return float(state >> 8) / float(1 << 24) - 0.5f;
    };
    for (std::size_t i = 0; i < n; ++i) {
      mask[i] = uniform() < 0.2f;
      log_prob[i] = mask[i] ? uniform() - 1 : NAN;
      old_log_prob[i] = log_prob[i] + 1.5f * uniform();
      advantages[i] = 4 * uniform();
      values[i] = uniform();
      old_values[i] = values[i] + 2 * uniform();
      returns[i] = 3 * uniform();
      ref[i] = log_prob[i] + uniform();
      entropy[i] = uniform() + 1;
    }
    args.log_prob = log_prob.data();
    args.old_log_prob = old_log_prob.data();
    args.advantages = advantages.data();
    args.mask = mask.data();
    args.values = values.data();
    args.old_values = old_values.data();
    args.returns = returns.data();
    args.ref_log_prob = ref.data();
    args.entropy = entropy.data();
    args.n = std::int64_t(n);
    args.rstd.value = 1;
    args.denominator.value = 100;
    args.clip_low = 0.8f;
    args.clip_high = 1.2f;
    args.dual_clip = 3;
    args.value_clip = 0.5f;
    args.vf_coef = 0.5f;
    args.kl_coef = 0.1f;
    args.ent_coef = 0.01f;
    args.kl = Kl::k3;
    args.grad_log_prob = grad_log_prob.data();
    args.grad_values = grad_values.data();
    args.grad_entropy = grad_entropy.data();
    args.loss = &loss;
    args.stats = stats;
  }

  std::vector<float> log_prob, old_log_prob, advantages, values, old_values, returns, ref, entropy;
  std::vector<std::uint8_t> mask;
  std::vector<float> grad_log_prob, grad_values, grad_entropy;
  float loss = NAN;
  double stats[kLossStats];
  PpoLossArgs args{};
};

double loss_of_token(const Tokens& t, std::size_t i, double log_prob, double value) {
  const double ratio = std::exp(log_prob - t.old_log_prob[i]);
  const double a = t.advantages[i];
  double policy = std::max(-a * ratio, -a * std::min(std::max(ratio, 0.8), 1.2));
  if (a < 0) policy = std::min(policy, -3 * a);
  const double near = std::min(std::max(value, t.old_values[i] - 0.5), t.old_values[i] + 0.5);
  const double d = t.ref[i] - log_prob;
  return policy + 0.25 * std::max(std::pow(value - t.returns[i], 2), std::pow(near - t.returns[i], 2)) +
         0.1 * (std::exp(d) - d - 1) - 0.01 * t.entropy[i];
}

}  // namespace

TEST_CASE("ppo_loss: value and gradient against the formula and its central difference") {
  Tokens tokens(1003);  // not a multiple of the vector width
  cpu::ppo_loss(tokens.args);
  double want = 0;
  for (std::size_t i = 0; i < tokens.mask.size(); ++i) {
    if (!tokens.mask[i]) {
      CHECK(tokens.grad_log_prob[i] == 0.0f);
      CHECK(tokens.grad_values[i] == 0.0f);
      continue;
    }
    const double lp = tokens.log_prob[i], v = tokens.values[i], h = 1e-6;
    want += loss_of_token(tokens, i, lp, v) / 100;
    const double by_log_prob = (loss_of_token(tokens, i, lp + h, v) - loss_of_token(tokens, i, lp - h, v)) / (200 * h);
    const double by_value = (loss_of_token(tokens, i, lp, v + h) - loss_of_token(tokens, i, lp, v - h)) / (200 * h);
    CHECK(tokens.grad_log_prob[i] == doctest::Approx(by_log_prob).epsilon(1e-3));
    CHECK(tokens.grad_values[i] == doctest::Approx(by_value).epsilon(1e-3));
    CHECK(tokens.grad_entropy[i] == doctest::Approx(-0.0001));
  }
  CHECK(tokens.loss == doctest::Approx(want).epsilon(1e-5));
}

TEST_CASE("ppo_loss: the same bits on every thread count") {
  Tokens tokens(100001);
  set_num_threads(1);
  cpu::ppo_loss(tokens.args);
  const float loss = tokens.loss;
  const std::vector<double> stats(tokens.stats, tokens.stats + kLossStats);
  set_num_threads(4);
  cpu::ppo_loss(tokens.args);
  CHECK(tokens.loss == loss);
  for (int k = 0; k < kLossStats; ++k) CHECK(tokens.stats[k] == stats[std::size_t(k)]);
}

TEST_CASE("ppo_loss: no tokens, and a denominator of zero") {
  Tokens tokens(0);
  cpu::ppo_loss(tokens.args);
  CHECK(tokens.loss == 0.0f);
  Tokens some(40);
  some.args.denominator.value = 0;
  cpu::ppo_loss(some.args);
  CHECK(some.loss == 0.0f);
  for (const float g : some.grad_log_prob) CHECK(g == 0.0f);
}

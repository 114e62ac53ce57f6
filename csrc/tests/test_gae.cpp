#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "common/parallel.h"
#include "ops/ops.h"

using namespace manus_fast;

namespace {

struct Batch {
  explicit Batch(std::int64_t rows, std::int64_t length)
      : rewards(rows * length), values(rows * length), advantages(rows * length), returns(rows * length),
        mask(rows * length), turn(rows * length) {
    std::uint32_t state = 12345;
    const auto uniform = [&] {
      state = state * 1664525u + 1013904223u;
      return float(state >> 8) / float(1 << 24);
    };
    for (std::size_t i = 0; i < mask.size(); ++i) {
      mask[i] = uniform() < 0.7f;
      rewards[i] = uniform() - 0.5f;
      values[i] = mask[i] ? uniform() - 0.5f : NAN;  // never read
      turn[i] = std::int32_t(i / 7);
    }
    args.rewards = rewards.data();
    args.values = values.data();
    args.mask = mask.data();
    args.rows = rows;
    args.row_length = length;
    args.tokens = rows * length;
    args.gamma = 0.9;
    args.lam = 0.8;
    args.token_gamma = args.token_lam = 1;
    args.advantages = advantages.data();
    args.returns = returns.data();
    args.stats = stats;
  }

  std::vector<float> rewards, values, advantages, returns;
  std::vector<std::uint8_t> mask;
  std::vector<std::int32_t> turn;
  double stats[3];
  GaeArgs args{};
};

}  // namespace

TEST_CASE("gae: the recurrence of the paper over the tokens in the mask") {
  Batch batch(9, 333);
  cpu::gae(batch.args);
  double count = 0, sum = 0;
  for (std::int64_t row = 0; row < 9; ++row) {
    double next_value = 0, next_advantage = 0;
    for (std::int64_t t = 332; t >= 0; --t) {
      const std::size_t i = std::size_t(row * 333 + t);
      if (!batch.mask[i]) {
        CHECK(batch.advantages[i] == 0.0f);
        continue;
      }
      const double delta = batch.rewards[i] + 0.9 * next_value - batch.values[i];
      next_advantage = delta + 0.9 * 0.8 * next_advantage;
      next_value = batch.values[i];
      CHECK(batch.advantages[i] == doctest::Approx(next_advantage).epsilon(1e-5));
      CHECK(batch.returns[i] == doctest::Approx(next_advantage + next_value).epsilon(1e-5));
      count += 1;
      sum += next_advantage;
    }
  }
  CHECK(batch.stats[0] == count);
  CHECK(batch.stats[1] == doctest::Approx(sum / count).epsilon(1e-5));
}

TEST_CASE("gae: packed rows, some empty, and turns, the same on every thread count") {
  Batch batch(4, 500);
  const std::vector<std::int32_t> boundaries = {0, 0, 700, 701, 2000, 2000};
  const std::vector<float> bootstrap = {5, 1, 2, 3, 4};
  batch.args.cu_seqlens = boundaries.data();
  batch.args.bootstrap = bootstrap.data();
  batch.args.turn_id = batch.turn.data();
  batch.args.rows = 5;
  set_num_threads(1);
  cpu::gae(batch.args);
  const std::vector<float> once = batch.advantages;
  set_num_threads(3);
  cpu::gae(batch.args);
  CHECK(batch.advantages == once);
  CHECK(batch.mask[700] == 1);
  // Row 2 is the single token 700: its turn ends there and is followed by the bootstrap.
  CHECK(once[700] == doctest::Approx(batch.rewards[700] + 0.9 * 2 - batch.values[700]));
}

TEST_CASE("gae: nothing at all") {
  Batch batch(0, 5);
  cpu::gae(batch.args);
  CHECK(batch.stats[0] == 0);
  CHECK(batch.stats[2] == 0);
}

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "ops/ops.h"

using namespace manus_fast;

TEST_CASE("group_advantages: interleaved groups, a failed member, a group of one, equal rewards") {
  const std::vector<float> rewards = {0, 4, 1, 8, 2, NAN, 9, 0.1f, 0.1f, 0.1f};
  const std::vector<std::int64_t> group = {7, -3, 7, -3, 7, 7, 100, 50, 50, 50};
  const std::vector<std::int64_t> order = {1, 3, 0, 2, 4, 5, 7, 8, 9, 6};
  std::vector<float> advantages(rewards.size(), NAN);
  GroupArgs args{};
  args.rewards = rewards.data();
  args.group = group.data();
  args.order = order.data();
  args.n = std::int64_t(rewards.size());
  args.kind = 0;
  args.advantages = advantages.data();
  cpu::group_advantages(args);
  const double half = std::sqrt(0.5);
  const std::vector<double> want = {-1, -half, 0, half, 1, 0, 0, 0, 0, 0};
  for (std::size_t i = 0; i < want.size(); ++i) CHECK(advantages[i] == doctest::Approx(want[i]));
  args.raw_singleton = true;
  cpu::group_advantages(args);
  CHECK(advantages[6] == 9.0f);
  args.kind = 2;
  cpu::group_advantages(args);
  CHECK(advantages[4] == doctest::Approx(1.5));
}

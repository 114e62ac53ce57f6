// Group-relative advantages on the CPU: the entries arrive in the order of their groups, each group is one run.
#include <cmath>

#include "ops/ops.h"

namespace manus_fast::cpu {

void group_advantages(const GroupArgs& args) {
  for (std::int64_t begin = 0; begin < args.n;) {
    const std::int64_t name = args.group[args.order[begin]];
    std::int64_t end = begin;
    double count = 0, mean = 0, m2 = 0;  // Welford 1962
    float low = INFINITY, high = -INFINITY;
    for (; end < args.n && args.group[args.order[end]] == name; ++end) {
      const std::int64_t e = args.order[end];
      const float reward = args.rewards[e];
      if (std::isnan(reward) || (args.counted && !args.counted[e])) continue;
      count += 1;
      const double delta = reward - mean;
      mean += delta / count;
      m2 += delta * (reward - mean);
      low = std::fmin(low, reward);
      high = std::fmax(high, reward);
    }
    double factor = 1;
    if (args.kind == 0 && count > 1) factor = 1 / (std::sqrt(m2 / (count - 1)) + args.eps);
    if (args.kind == 2 && count > 1) factor = count / (count - 1);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t e = args.order[i];
      const float reward = args.rewards[e];
      float advantage = 0;
      if (count == 1) {
        advantage = args.raw_singleton ? reward : 0.0f;
      } else if (count > 1 && !(low == high && reward == low)) {  // equal rewards: no signal, whatever the rounding
        advantage = float((reward - mean) * factor);
      }
      args.advantages[e] = std::isnan(reward) ? 0.0f : advantage;
    }
    begin = end;
  }
}

}  // namespace manus_fast::cpu

// Generalised advantage estimation on the CPU, one row at a time.
//
// With x = gamma·V(next) + gamma·lam·A(next), what a token adds to its own reward, the advantage is r - v + x and
// the previous token's x is gamma·lam·x + (gamma·v + gamma·lam·(r - v)): one affine recurrence, whose coefficients are
// computed a block of tokens at a time. Only the recurrence itself is serial. Masked tokens leave x alone.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/parallel.h"
#include "ops/ops.h"

namespace manus_fast::cpu {
namespace {

constexpr int kBlock = 256;

struct Moments {
  double count = 0, mean = 0, m2 = 0;
};

// Chan et al. 1983, the pairwise update.
void merge(Moments& into, const Moments& other) {
  if (other.count == 0) return;
  const double count = into.count + other.count;
  const double delta = other.mean - into.mean;
  into.m2 += other.m2 + delta * delta * into.count * other.count / count;
  into.mean += delta * other.count / count;
  into.count = count;
}

void token_level(const GaeArgs& args, std::int64_t begin, std::int64_t end, double bootstrap) {
  const double gamma = args.gamma, decay = args.gamma * args.lam;
  double slope[kBlock], offset[kBlock], carried[kBlock];
  double x = gamma * bootstrap;
  for (std::int64_t high = end; high > begin; high -= kBlock) {
    const std::int64_t low = std::max(begin, high - kBlock);
    const int n = static_cast<int>(high - low);
    const float* r = args.rewards + low;
    const float* v = args.values + low;
    const std::uint8_t* m = args.mask + low;
    for (int i = 0; i < n; ++i) {
      slope[i] = m[i] ? decay : 1.0;
      offset[i] = m[i] ? gamma * v[i] + decay * (double(r[i]) - v[i]) : 0.0;
    }
    for (int i = n - 1; i >= 0; --i) {
      carried[i] = x;
      x = slope[i] * x + offset[i];
    }
    float* a = args.advantages + low;
    float* g = args.returns + low;
    for (int i = 0; i < n; ++i) {
      a[i] = m[i] ? float(double(r[i]) - v[i] + carried[i]) : 0.0f;
      g[i] = m[i] ? float(r[i] + carried[i]) : 0.0f;
    }
  }
}

// Two carries: `turn` is what the current turn adds to the one before it, `token` what the turn's next token adds.
void turn_level(const GaeArgs& args, std::int64_t begin, std::int64_t end, double bootstrap) {
  const double decay = args.gamma * args.lam, token_decay = args.token_gamma * args.token_lam;
  double turn = args.gamma * bootstrap, token = 0.0;
  bool seen = false;
  std::int32_t next_turn = 0;
  for (std::int64_t t = end - 1; t >= begin; --t) {
    if (!args.mask[t]) {
      args.advantages[t] = args.returns[t] = 0.0f;
      continue;
    }
    const double r = args.rewards[t], v = args.values[t];
    const bool last = !seen || args.turn_id[t] != next_turn;
    const double x = last ? turn : token;
    const double advantage = r - v + x;
    turn = last ? args.gamma * v + decay * advantage : turn + decay * r;
    token = args.token_gamma * v + token_decay * advantage;
    seen = true;
    next_turn = args.turn_id[t];
    args.advantages[t] = float(advantage);
    args.returns[t] = float(r + x);
  }
}

// Two passes over a row that is still in the cache: exact to rounding whatever the mean. Eight lanes let both
// loops run in vector registers with a fixed order of summation.
Moments row_moments(const float* a, const std::uint8_t* mask, std::int64_t n) {
  constexpr int kLanes = 8;
  double sum[kLanes] = {}, count[kLanes] = {}, square[kLanes] = {};
  const std::int64_t whole = n - n % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      sum[l] += a[i + l];
      count[l] += mask[i + l] ? 1.0 : 0.0;
    }
  }
  for (std::int64_t i = whole; i < n; ++i) {
    sum[0] += a[i];
    count[0] += mask[i] ? 1.0 : 0.0;
  }
  Moments out;
  for (int l = 0; l < kLanes; ++l) {
    out.count += count[l];
    out.mean += sum[l];
  }
  if (out.count == 0) return Moments{};
  out.mean /= out.count;
  const double mean = out.mean;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const double d = mask[i + l] ? a[i + l] - mean : 0.0;
      square[l] += d * d;
    }
  }
  for (std::int64_t i = whole; i < n; ++i) {
    const double d = mask[i] ? a[i] - mean : 0.0;
    square[0] += d * d;
  }
  for (int l = 0; l < kLanes; ++l) out.m2 += square[l];
  return out;
}

}  // namespace

void gae(const GaeArgs& args) {
  std::vector<Moments> moments(static_cast<std::size_t>(args.rows));
  const std::int64_t mean_length = args.rows ? std::max<std::int64_t>(1, args.tokens / args.rows) : 1;
  parallel_for(args.rows, std::max<std::int64_t>(1, 4096 / mean_length), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      const std::int64_t begin = args.cu_seqlens ? args.cu_seqlens[row] : row * args.row_length;
      const std::int64_t end = args.cu_seqlens ? args.cu_seqlens[row + 1] : begin + args.row_length;
      const double bootstrap = args.bootstrap ? args.bootstrap[row] : 0.0;
      if (args.turn_id) {
        turn_level(args, begin, end, bootstrap);
      } else {
        token_level(args, begin, end, bootstrap);
      }
      moments[static_cast<std::size_t>(row)] = row_moments(args.advantages + begin, args.mask + begin, end - begin);
    }
  });
  // In row order: the same sums whatever the number of threads.
  Moments total;
  for (const Moments& row : moments) merge(total, row);
  args.stats[0] = total.count;
  args.stats[1] = total.mean;
  args.stats[2] = total.m2;
}

}  // namespace manus_fast::cpu

// Policy-gradient loss on the CPU: loss, its gradient and every statistic in one pass over the tokens.
//
// As many tokens at a time as a register holds (ops/vectors.h). Sums are kept in float for a chunk of 512
// tokens, then in double for a slab, and slabs are added in order: the same result for every number of threads.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "ops/ops.h"
#include "ops/vectors.h"

namespace manus_fast::cpu {
namespace {

constexpr int kChunk = 512;
constexpr std::int64_t kSlab = 8192;

double value_of(const Scalar& scalar) { return scalar.pointer ? *scalar.pointer : scalar.value; }

struct Constants {
  float mean, rstd, inverse;
};

struct Sums {
  Floats sum[kRatioAbove];
  Ints count[kLossSums];  // minus the count: a true comparison is -1
  Doubles wide[4];        // return, return_sq, error, error_sq: a variance is their difference
  Floats ratio_max, log_ratio_max;
};

// Tokens [i, i + n), n <= kLanes.
MF_INLINE void tokens(const PpoLossArgs& args, const Constants& constants, std::int64_t i, int n, Sums& sums) {
  const Ints mask = load_mask(args.mask + i, n);
  Floats log_prob = load(args.log_prob + i, n), old_log_prob = load(args.old_log_prob + i, n);
  const Ints counted = mask & finite(log_prob) & finite(old_log_prob);
  const Floats zero{};
  const auto kept = [&](const float* p) { return pick(counted, load(p + i, n), zero); };
  log_prob = pick(counted, log_prob, zero);
  old_log_prob = pick(counted, old_log_prob, zero);
  const Floats advantage = pick(counted, (load(args.advantages + i, n) - constants.mean) * constants.rstd, zero);
  const Floats weight = args.weights ? kept(args.weights) : pick(counted, splat(1.0f), zero);
  const Floats share = (args.scale ? kept(args.scale) : pick(counted, splat(1.0f), zero)) * constants.inverse;

  const Floats token_free = log_prob - old_log_prob;
  const Floats token_log_ratio = clamp(token_free, -20.0f, 20.0f);
  const Exponential token_exp = exponential(token_log_ratio);
  Floats free = token_free, log_ratio = token_log_ratio, ratio = token_exp.exp;
  if (args.sequence_log_ratio) {
    free = kept(args.sequence_log_ratio);
    log_ratio = clamp(free, -20.0f, 20.0f);
    ratio = exponential(log_ratio).exp;
  }
  const Ints inside = (free >= -20.0f) & (free <= 20.0f);  // the clamp passes a gradient only here

  Floats policy, slope;  // the policy term and its derivative by log_prob
  Ints below{}, above{}, dual{};
  const Floats bounded = clamp(ratio, args.clip_low, args.clip_high);
  if (args.clip == Clip::cispo) {
    slope = -advantage * bounded;
    policy = slope * log_prob;
    below = ratio < args.clip_low;
    above = ratio > args.clip_high;
  } else {
    policy = -advantage * ratio;
    slope = pick(inside, policy, zero);
    if (args.clip == Clip::ppo) {
      const Floats clipped = -advantage * bounded;
      const Ints cut = clipped > policy;
      below = cut & (ratio < args.clip_low);
      above = cut & (ratio > args.clip_high);
      policy = pick(cut, clipped, policy);
      slope = pick(cut, zero, slope);
      if (args.dual_clip > 0) {
        const Floats limit = -advantage * args.dual_clip;
        dual = (advantage < 0.0f) & (policy > limit);
        policy = pick(dual, limit, policy);
        slope = pick(dual, zero, slope);
      }
    }
  }
  policy *= weight;
  Floats gradient = slope * weight;

  if (args.values) {
    const Floats values = kept(args.values), returns = kept(args.returns);
    const Floats error = values - returns;
    Floats value_loss = 0.5f * error * error;
    Floats value_slope = error;
    if (args.value_clip > 0) {
      const Floats old_values = kept(args.old_values);
      const Floats near = min(max(values, old_values - args.value_clip), old_values + args.value_clip);
      const Floats clipped = 0.5f * (near - returns) * (near - returns);
      const Ints cut = clipped > value_loss;
      value_loss = pick(cut, clipped, value_loss) + 0.0f * old_values;  // an old value of NaN is no cut
      value_slope = pick(cut, zero, value_slope);
      sums.count[kValueClip] += cut;
    }
    store(args.grad_values + i, share * args.vf_coef * value_slope, n);
    sums.sum[kValue] += share * value_loss;
    const Doubles wide_return = __builtin_convertvector(returns, Doubles);
    const Doubles wide_error = __builtin_convertvector(error, Doubles);
    sums.wide[0] += wide_return;
    sums.wide[1] += wide_return * wide_return;
    sums.wide[2] -= wide_error;
    sums.wide[3] += wide_error * wide_error;
  }
  if (args.ref_log_prob) {
    const Floats d = kept(args.ref_log_prob) - log_prob;
    Floats kl, kl_slope;
    if (args.kl == Kl::k1) {
      kl = -d;
      kl_slope = splat(1.0f);
    } else if (args.kl == Kl::k2) {
      kl = 0.5f * d * d;
      kl_slope = -d;
    } else {
      const Exponential e = exponential(clamp(d, -20.0f, 20.0f));
      kl = min(splat(10.0f), e.remainder);  // NaN stays NaN
      if (args.kl == Kl::k3) {
        const Ints still = (d < -20.0f) | (d > 20.0f) | (e.remainder > 10.0f);
        kl_slope = pick(still, zero, 1.0f - e.exp);
      } else {
        kl_slope = -d;
        kl += 0.0f * d;  // infinite d: its gradient is no number either
      }
    }
    gradient += args.kl_coef * kl_slope;
    sums.sum[kKl] += share * kl;
    sums.sum[kRefKl] += kl;
  }
  if (args.entropy) {
    const Floats entropy = kept(args.entropy);
    store(args.grad_entropy + i, -args.ent_coef * share, n);
    sums.sum[kEntropyLoss] += share * entropy;
    sums.sum[kEntropy] += entropy;
  }
  store(args.grad_log_prob + i, share * gradient, n);

  sums.sum[kPolicy] += share * policy;
  sums.sum[kK1] -= token_log_ratio;
  sums.sum[kK3] += token_exp.remainder;
  ratio = pick(counted, ratio, zero);
  sums.sum[kRatio] += ratio;
  sums.sum[kWeight] += weight;
  sums.sum[kAdvantage] += advantage;
  sums.count[kCount] += counted;
  sums.count[kDropped] += mask & ~counted;
  sums.count[kClipLow] += below & counted;
  sums.count[kClipHigh] += above & counted;
  sums.count[kDualClip] += dual & counted;
  for (int k = 0; k < kRatioBounds; ++k) sums.count[kRatioAbove + k] += ratio > kRatioBound[k];
  sums.ratio_max = max(sums.ratio_max, ratio);
  sums.log_ratio_max = max(sums.log_ratio_max, max(log_ratio, -log_ratio));
}

bool is_count(int k) {
  return k == kCount || k == kDropped || (k >= kClipLow && k <= kValueClip) || k >= kRatioAbove;
}

void chunk(const PpoLossArgs& args, const Constants& constants, std::int64_t begin, std::int64_t end, double* out) {
  Sums sums{};
  for (std::int64_t i = begin; i < end; i += kLanes) {
    if (end - i >= kLanes) {
      tokens(args, constants, i, kLanes, sums);
    } else {
      tokens(args, constants, i, static_cast<int>(end - i), sums);
    }
  }
  for (int k = 0; k < kLossSums; ++k) {
    double total = 0;
    for (int l = 0; l < kLanes; ++l) {
      if (is_count(k)) {
        total -= sums.count[k][l];
      } else if (k >= kReturn && k <= kErrorSq) {
        total += sums.wide[k - kReturn][l];
      } else {
        total += double(sums.sum[k][l]);
      }
    }
    out[k] += total;
  }
  for (int l = 0; l < kLanes; ++l) {
    out[kRatioMax] = std::max(out[kRatioMax], double(sums.ratio_max[l]));
    out[kLogRatioMax] = std::max(out[kLogRatioMax], double(sums.log_ratio_max[l]));
  }
}

}  // namespace

void ppo_loss(const PpoLossArgs& args) {
  const double denominator = value_of(args.denominator);
  const Constants constants{float(value_of(args.mean)), float(value_of(args.rstd)),
                            denominator > 0 ? float(1.0 / denominator) : 0.0f};
  const std::int64_t slabs = (args.n + kSlab - 1) / kSlab;
  std::vector<double> partial(static_cast<std::size_t>(slabs * kLossStats), 0.0);
  parallel_for(slabs, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t slab = first; slab < last; ++slab) {
      const std::int64_t end = std::min(args.n, (slab + 1) * kSlab);
      for (std::int64_t begin = slab * kSlab; begin < end; begin += kChunk) {
        double* const sums = &partial[static_cast<std::size_t>(slab * kLossStats)];
        chunk(args, constants, begin, std::min(end, begin + kChunk), sums);
      }
    }
  });
  std::fill(args.stats, args.stats + kLossStats, 0.0);
  for (std::int64_t slab = 0; slab < slabs; ++slab) {
    const double* from = &partial[static_cast<std::size_t>(slab * kLossStats)];
    for (int k = 0; k < kLossSums; ++k) args.stats[k] += from[k];
    for (int k = kLossSums; k < kLossStats; ++k) args.stats[k] = std::max(args.stats[k], from[k]);
  }
  const double* s = args.stats;
  *args.loss = float(s[kPolicy] + double(args.vf_coef) * s[kValue] + double(args.kl_coef) * s[kKl] -
                     double(args.ent_coef) * s[kEntropyLoss]);
}

}  // namespace manus_fast::cpu

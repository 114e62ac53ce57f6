// The policy-gradient loss of one token: its gradient, and what it adds to the sums. Used by csrc/ops/ppo_loss.cu.
#pragma once

#include <cuda_runtime.h>

#include "ops/ops.h"

namespace manus_fast::cuda {
namespace {

// Relative error 6e-8 |x|: two instructions instead of ten.
__device__ float fast_exp(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x * 1.44269504f));
  return out;
}

// e^x - x - 1 for |x| <= 20, given e^x; the series near 0, where the difference would cancel.
__device__ float remainder_of(float x, float exp_x) {
  const float series = x * x * fmaf(x, fmaf(x, fmaf(x, 1.0f / 120, 1.0f / 24), 1.0f / 6), 0.5f);
  return fabsf(x) < 0.125f ? series : exp_x - x - 1.0f;
}

// The order of LossStat: what a thread keeps. Losses, k1, ... as floats, counts as integers, value sums as doubles.
struct Sums {
  float policy = 0, value = 0, kl = 0, entropy_loss = 0;
  float k1 = 0, k3 = 0, ref_kl = 0, entropy = 0, ratio = 0, weight = 0, advantage = 0;
  double returned = 0, returned_sq = 0, error = 0, error_sq = 0;
  int count = 0, dropped = 0, clip_low = 0, clip_high = 0, dual = 0, value_clip = 0;
  int above[kRatioBounds] = {};
  float ratio_max = 0, log_ratio_max = 0;
};

struct Constants {
  float mean, rstd, inverse;
};

struct Bounds {
  float ratio[kRatioBounds];
};

struct Token {
  float log_prob, old_log_prob, advantage, weight, scale, sequence, value, old_value, returned, ref, entropy;
};

struct Gradient {
  float log_prob, value, entropy;
};

// kUsual: every term is there and clip and KL are the defaults, so nothing is left to ask for each token.
template <bool kSequence, bool kUsual>
__device__ Gradient token(const PpoLossArgs& args, const Constants& c, const Bounds& bounds, bool mask,
                          Token t, Sums& sums) {
  Gradient gradient{0.0f, 0.0f, 0.0f};
  if (!mask) return gradient;
  if (!(isfinite(t.log_prob) && isfinite(t.old_log_prob))) {
    ++sums.dropped;
    return gradient;
  }
  const float advantage = (t.advantage - c.mean) * c.rstd;
  const float share = t.scale * c.inverse;
  const float free_token = t.log_prob - t.old_log_prob;
  const float token_log_ratio = fminf(fmaxf(free_token, -20.0f), 20.0f);
  const float token_ratio = fast_exp(token_log_ratio);
  const float free = kSequence ? t.sequence : free_token;
  const float log_ratio = kSequence ? fminf(fmaxf(free, -20.0f), 20.0f) : token_log_ratio;
  const float ratio = kSequence ? fast_exp(log_ratio) : token_ratio;
  const float bounded = fminf(fmaxf(ratio, args.clip_low), args.clip_high);

  float policy, slope;
  const Clip clip = kUsual ? Clip::ppo : args.clip;
  if (clip == Clip::cispo) {
    slope = -advantage * bounded;
    policy = slope * t.log_prob;
    sums.clip_low += ratio < args.clip_low;
    sums.clip_high += ratio > args.clip_high;
  } else {
    policy = -advantage * ratio;
    slope = fabsf(free) <= 20.0f ? policy : 0.0f;  // the clamp passes a gradient only inside
    if (clip == Clip::ppo) {
      const float clipped = -advantage * bounded;
      const bool cut = clipped > policy;
      sums.clip_low += cut && ratio < args.clip_low;
      sums.clip_high += cut && ratio > args.clip_high;
      if (cut) policy = clipped, slope = 0.0f;
      const float limit = -advantage * args.dual_clip;
      if ((kUsual || args.dual_clip > 0.0f) && advantage < 0.0f && policy > limit) {
        policy = limit, slope = 0.0f;
        ++sums.dual;
      }
    }
  }
  policy *= t.weight;
  gradient.log_prob = slope * t.weight;

  if (kUsual || args.values) {
    const float error = t.value - t.returned;
    float loss = 0.5f * error * error;
    gradient.value = share * args.vf_coef * error;
    if (kUsual || args.value_clip > 0.0f) {
      const float near = fminf(fmaxf(t.value, t.old_value - args.value_clip), t.old_value + args.value_clip);
      const float clipped = 0.5f * (near - t.returned) * (near - t.returned);
      if (clipped > loss) {
        loss = clipped, gradient.value = 0.0f;
        ++sums.value_clip;
      }
      loss = fmaf(0.0f, t.old_value, loss);  // fminf and fmaxf lose an old value of NaN
    }
    sums.value += share * loss;
    const double returned = t.returned, wide_error = error;
    sums.returned += returned;
    sums.returned_sq += returned * returned;
    sums.error -= wide_error;
    sums.error_sq += wide_error * wide_error;
  }
  if (kUsual || args.ref_log_prob) {
    const float d = t.ref - t.log_prob;
    float kl, kl_slope;
    const Kl kind = kUsual ? Kl::k3 : args.kl;
    if (kind == Kl::k1) {
      kl = -d, kl_slope = 1.0f;
    } else if (kind == Kl::k2) {
      kl = 0.5f * d * d, kl_slope = -d;
    } else {
      const bool far = fabsf(d) > 20.0f;
      const float clamped = far ? copysignf(20.0f, d) : d;  // NaN stays NaN, here and below
      const float k3 = remainder_of(clamped, fast_exp(clamped));
      const bool large = k3 > 10.0f;
      kl = large ? 10.0f : k3;
      if (kind == Kl::k3) {
        kl_slope = far || large ? 0.0f : 1.0f - fast_exp(clamped);
      } else {
        kl_slope = -d;
        kl = fmaf(0.0f, d, kl);  // infinite d: its gradient is no number either
      }
    }
    gradient.log_prob += args.kl_coef * kl_slope;
    sums.kl += share * kl;
    sums.ref_kl += kl;
  }
  gradient.log_prob *= share;
  gradient.entropy = -args.ent_coef * share;
  sums.entropy_loss += share * t.entropy;
  sums.entropy += t.entropy;

  ++sums.count;
  sums.policy += share * policy;
  sums.k1 -= token_log_ratio;
  sums.k3 += token_ratio - 1.0f - token_log_ratio;
  sums.ratio += ratio;
  sums.weight += t.weight;
  sums.advantage += advantage;
#pragma unroll
  for (int k = 0; k < kRatioBounds; ++k) sums.above[k] += ratio > bounds.ratio[k];
  sums.ratio_max = fmaxf(sums.ratio_max, ratio);
  sums.log_ratio_max = fmaxf(sums.log_ratio_max, fabsf(log_ratio));
  return gradient;
}

}  // namespace
}  // namespace manus_fast::cuda

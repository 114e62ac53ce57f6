// Policy-gradient loss on the GPU: loss, gradient and every statistic in one kernel that reads each input once.
//
// A fixed number of blocks walks the tokens, four neighbours a thread and step, all loads of a step in flight before
// the first use. Sums stay in registers until a thread has seen all its tokens; then they meet in shared memory, and
// the block that finishes last adds the blocks' partials in order. No atomics on floats: the same bits every time.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/check.h"
#include "ops/ops.h"

namespace manus_fast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPack = 4;
constexpr int kBlocksPerSm = 2;
constexpr int kMaxBlocks = 1024;
constexpr unsigned kAll = 0xffffffffu;

// The tokens that a thread reads at once.
struct alignas(4 * kPack) Pack {
  float x[kPack];
};

using Vector = std::conditional_t<kPack == 4, float4, float2>;
using MaskVector = std::conditional_t<kPack == 4, std::uint32_t, std::uint16_t>;

__device__ Pack load(const float* p, std::int64_t i, std::int64_t n, bool whole) {
  Pack out;
  if (whole) {
    *reinterpret_cast<Vector*>(&out) = __ldcs(reinterpret_cast<const Vector*>(p + i));
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k) out.x[k] = i + k < n ? p[i + k] : 0.0f;
  }
  return out;
}

__device__ void store(float* p, std::int64_t i, std::int64_t n, bool whole, const Pack& pack) {
  if (whole) {
    __stcs(reinterpret_cast<Vector*>(p + i), *reinterpret_cast<const Vector*>(&pack));
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (i + k < n) p[i + k] = pack.x[k];
    }
  }
}

__device__ double value_of(const Scalar& scalar) { return scalar.pointer ? *scalar.pointer : scalar.value; }

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
      const float clamped = fminf(fmaxf(d, -20.0f), 20.0f);
      const float exp_d = fast_exp(clamped);
      const float k3 = remainder_of(clamped, exp_d);
      kl = fminf(k3, 10.0f);
      kl_slope = -d;
      if (kind == Kl::k3) kl_slope = fabsf(d) <= 20.0f && k3 <= 10.0f ? 1.0f - exp_d : 0.0f;
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

__device__ double warp_sum(double x) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(kAll, x, distance);
  return x;
}

__device__ double warp_max(double x) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) x = fmax(x, __shfl_xor_sync(kAll, x, distance));
  return x;
}

struct Work {
  unsigned* done;
  double* partials;  // [kLossStats][blocks]
};

// Statistics that a thread hands over as a float; the rest are doubles.
__device__ constexpr bool is_wide(int k) { return k >= kReturn && k <= kErrorSq; }

template <bool kSequence, bool kUsual>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) ppo_loss_kernel(PpoLossArgs args, Work work, Bounds bounds,
                                                                         bool aligned) {
  const double denominator = value_of(args.denominator);
  const Constants c{static_cast<float>(value_of(args.mean)), static_cast<float>(value_of(args.rstd)),
                    denominator > 0 ? static_cast<float>(1.0 / denominator) : 0.0f};
  Sums sums;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads * kPack;
  std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  for (; i < args.n; i += stride) {
    const bool whole = aligned && i + kPack <= args.n;
    const auto read = [&](const float* p, float absent) {
      if (p) return load(p, i, args.n, whole);  // absent or not is the same for every thread
      Pack same;
#pragma unroll
      for (int k = 0; k < kPack; ++k) same.x[k] = absent;
      return same;
    };
    const Pack log_prob = read(args.log_prob, 0.0f), old_log_prob = read(args.old_log_prob, 0.0f);
    const Pack advantage = read(args.advantages, 0.0f);
    const Pack value = read(args.values, 0.0f), old_value = read(args.old_values, 0.0f);
    const Pack returned = read(args.returns, 0.0f), ref = read(args.ref_log_prob, 0.0f);
    const Pack entropy = read(args.entropy, 0.0f);
    const Pack weight = read(args.weights, 1.0f), scale = read(args.scale, 1.0f);
    const Pack sequence = read(kSequence ? args.sequence_log_ratio : nullptr, 0.0f);
    unsigned mask = 0;  // a byte a token
    if (whole) {
      mask = __ldcs(reinterpret_cast<const MaskVector*>(args.mask + i));
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) mask |= unsigned(i + k < args.n && args.mask[i + k]) << (8 * k);
    }
    Pack grad_log_prob, grad_value, grad_entropy;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const Token t{log_prob.x[k], old_log_prob.x[k], advantage.x[k], weight.x[k], scale.x[k], sequence.x[k],
                    value.x[k],    old_value.x[k],    returned.x[k],  ref.x[k],    entropy.x[k]};
      const Gradient gradient = token<kSequence, kUsual>(args, c, bounds, mask >> (8 * k) & 255u, t, sums);
      grad_log_prob.x[k] = gradient.log_prob;
      grad_value.x[k] = gradient.value;
      grad_entropy.x[k] = gradient.entropy;
    }
    store(args.grad_log_prob, i, args.n, whole, grad_log_prob);
    if (args.values) store(args.grad_values, i, args.n, whole, grad_value);
    if (args.entropy) store(args.grad_entropy, i, args.n, whole, grad_entropy);
  }

  // The block's sums: thread-major in shared memory, then a warp a statistic.
  __shared__ float narrow[kLossStats - 4][kThreads];
  __shared__ double wide[4][kThreads];
  __shared__ unsigned ticket;
  const int me = threadIdx.x, lane = me % 32, warp = me / 32;
  const auto put = [&](int k, float x) { narrow[k < kReturn ? k : k - 4][me] = x; };
  const auto put_count = [&](int k, int x) { narrow[k < kReturn ? k : k - 4][me] = __int_as_float(x); };
  put_count(kCount, sums.count), put_count(kDropped, sums.dropped);
  put(kPolicy, sums.policy), put(kValue, sums.value), put(kKl, sums.kl), put(kEntropyLoss, sums.entropy_loss);
  put_count(kClipLow, sums.clip_low), put_count(kClipHigh, sums.clip_high), put_count(kDualClip, sums.dual);
  put_count(kValueClip, sums.value_clip);
  put(kK1, sums.k1), put(kK3, sums.k3), put(kRefKl, sums.ref_kl), put(kEntropy, sums.entropy);
  put(kRatio, sums.ratio), put(kWeight, sums.weight), put(kAdvantage, sums.advantage);
  wide[0][me] = sums.returned, wide[1][me] = sums.returned_sq, wide[2][me] = sums.error, wide[3][me] = sums.error_sq;
#pragma unroll
  for (int k = 0; k < kRatioBounds; ++k) put_count(kRatioAbove + k, sums.above[k]);
  put(kRatioMax, sums.ratio_max), put(kLogRatioMax, sums.log_ratio_max);
  __syncthreads();
  for (int k = warp; k < kLossStats; k += kWarps) {
    const bool counts = k <= kDropped || (k >= kClipLow && k <= kValueClip) || (k >= kRatioAbove && k < kLossSums);
    double total = 0;
    for (int t = lane; t < kThreads; t += 32) {
      const float x = narrow[k < kReturn ? k : (is_wide(k) ? 0 : k - 4)][t];
      const double y = is_wide(k) ? wide[k - kReturn][t] : counts ? __float_as_int(x) : static_cast<double>(x);
      total = k >= kLossSums ? fmax(total, y) : total + y;
    }
    total = k >= kLossSums ? warp_max(total) : warp_sum(total);
    if (lane == 0) work.partials[static_cast<std::int64_t>(k) * gridDim.x + blockIdx.x] = total;
  }
  __threadfence();
  __syncthreads();
  if (me == 0) ticket = atomicAdd(work.done, 1u);
  __syncthreads();
  if (ticket != gridDim.x - 1) return;

  __threadfence();
  __shared__ double all[kLossStats];
  for (int k = warp; k < kLossStats; k += kWarps) {
    double total = 0;
    for (unsigned b = lane; b < gridDim.x; b += 32) {
      const double y = __ldcg(&work.partials[static_cast<std::int64_t>(k) * gridDim.x + b]);
      total = k >= kLossSums ? fmax(total, y) : total + y;
    }
    total = k >= kLossSums ? warp_max(total) : warp_sum(total);
    if (lane == 0) args.stats[k] = all[k] = total;
  }
  __syncthreads();
  if (me == 0) {
    *args.loss = static_cast<float>(all[kPolicy] + double(args.vf_coef) * all[kValue] +
                                    double(args.kl_coef) * all[kKl] - double(args.ent_coef) * all[kEntropyLoss]);
  }
}

// Gradients times a scalar on the device; nothing is touched when it is 1, the usual case.
struct Arrays {
  float* x[3];
};

__global__ void __launch_bounds__(kThreads) scale_kernel(Arrays arrays, std::int64_t n, const float* factor) {
  const float f = *factor;
  if (f == 1.0f) return;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += stride) {
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (arrays.x[k]) arrays.x[k][i] *= f;
    }
  }
}

int multiprocessors() {
  int device = 0, count = 0;
  MF_CUDA_CHECK("ppo_loss", cudaGetDevice(&device));
  MF_CUDA_CHECK("ppo_loss", cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

constexpr std::size_t kHeader = 16;

}  // namespace

std::size_t ppo_loss_workspace() { return kHeader + sizeof(double) * kLossStats * kMaxBlocks; }

void ppo_loss(const PpoLossArgs& args, void* workspace, Stream on) {
  const auto stream = static_cast<cudaStream_t>(on.handle);
  const std::int64_t wanted = (args.n + kThreads * kPack - 1) / (kThreads * kPack);
  const std::int64_t full = std::int64_t(kBlocksPerSm) * multiprocessors();
  const std::int64_t most = full < kMaxBlocks ? full : kMaxBlocks;
  const auto blocks = static_cast<unsigned>(wanted < 1 ? 1 : wanted < most ? wanted : most);
  char* memory = static_cast<char*>(workspace);
  const Work work{reinterpret_cast<unsigned*>(memory), reinterpret_cast<double*>(memory + kHeader)};
  MF_CUDA_CHECK("ppo_loss", cudaMemsetAsync(memory, 0, kHeader, stream));
  std::uintptr_t bits = 0;
  for (const void* p : {static_cast<const void*>(args.log_prob), static_cast<const void*>(args.old_log_prob),
                        static_cast<const void*>(args.advantages), static_cast<const void*>(args.weights),
                        static_cast<const void*>(args.scale), static_cast<const void*>(args.sequence_log_ratio),
                        static_cast<const void*>(args.values), static_cast<const void*>(args.old_values),
                        static_cast<const void*>(args.returns), static_cast<const void*>(args.ref_log_prob),
                        static_cast<const void*>(args.entropy), static_cast<const void*>(args.grad_log_prob),
                        static_cast<const void*>(args.grad_values), static_cast<const void*>(args.grad_entropy)}) {
    bits |= reinterpret_cast<std::uintptr_t>(p);
  }
  const bool aligned = bits % 16 == 0 && reinterpret_cast<std::uintptr_t>(args.mask) % 4 == 0;
  Bounds bounds;
  for (int k = 0; k < kRatioBounds; ++k) bounds.ratio[k] = kRatioBound[k];
  const bool usual = !args.sequence_log_ratio && args.clip == Clip::ppo && args.dual_clip > 0 && args.values &&
                     args.value_clip > 0 && args.ref_log_prob && args.kl == Kl::k3 && args.entropy;
  if (usual) {
    ppo_loss_kernel<false, true><<<blocks, kThreads, 0, stream>>>(args, work, bounds, aligned);
  } else if (args.sequence_log_ratio) {
    ppo_loss_kernel<true, false><<<blocks, kThreads, 0, stream>>>(args, work, bounds, aligned);
  } else {
    ppo_loss_kernel<false, false><<<blocks, kThreads, 0, stream>>>(args, work, bounds, aligned);
  }
  MF_CUDA_CHECK("ppo_loss", cudaGetLastError());
}

void scale_gradients(float* const (&gradients)[3], std::int64_t n, const float* factor, Stream on) {
  const std::int64_t wanted = (n + kThreads - 1) / kThreads, most = 8 * multiprocessors();
  if (wanted == 0) return;
  scale_kernel<<<static_cast<unsigned>(wanted < most ? wanted : most), kThreads, 0,
                 static_cast<cudaStream_t>(on.handle)>>>({gradients[0], gradients[1], gradients[2]}, n, factor);
  MF_CUDA_CHECK("scale_gradients", cudaGetLastError());
}

}  // namespace manus_fast::cuda

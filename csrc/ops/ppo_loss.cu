// Policy-gradient loss on the GPU: loss, gradient and every statistic in one pass that reads each input once.
//
// A fixed number of blocks walks the tokens, four neighbours a thread and step. Sums stay in registers until a thread
// has seen all its tokens; then they meet in shared memory, and a last kernel of one block, launched early, adds the
// blocks' sums in order. No atomics on floats: the same bits every time. That last kernel is 3.8 us faster than the block
// that finishes last was, which loaded its sums in a chain, behind a fence, with a counter cleared beforehand.
//
// The usual configuration, on Hopper, has its operands brought into shared memory by bulk copies, two steps ahead: they
// stay in flight while a step is worked on, which registers cannot hold (2 us less than plain loads at 4M tokens, 13 us
// at 16M). Every other configuration loads a step into registers, all of it in flight before the first use.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "ops/launch.cuh"
#include "ops/ops.h"
#include "ops/ppo_loss_token.cuh"
#include "ops/sm90.cuh"

namespace manus_fast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPack = 4;
constexpr int kStep = kThreads * kPack;  // tokens of a block and step
constexpr int kBlocksPerSm = 2;
constexpr int kMaxBlocks = 1024;
constexpr unsigned kAll = 0xffffffffu;

// The tokens that a thread reads at once.
struct alignas(4 * kPack) Pack {
  float x[kPack];
};

__device__ Pack all_of(float x) { return {{x, x, x, x}}; }

__device__ Pack load(const float* p, std::int64_t i, std::int64_t n, bool whole) {
  Pack out;
  if (whole) {
    *reinterpret_cast<float4*>(&out) = __ldcs(reinterpret_cast<const float4*>(p + i));
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k) out.x[k] = i + k < n ? p[i + k] : 0.0f;
  }
  return out;
}

// A byte a token.
__device__ unsigned load_mask(const std::uint8_t* p, std::int64_t i, std::int64_t n, bool whole) {
  if (whole) return __ldcs(reinterpret_cast<const unsigned*>(p + i));
  unsigned mask = 0;
#pragma unroll
  for (int k = 0; k < kPack; ++k) mask |= unsigned(i + k < n && p[i + k]) << (8 * k);
  return mask;
}

__device__ void store(float* p, std::int64_t i, std::int64_t n, bool whole, const Pack& pack) {
  if (whole) {
    __stcs(reinterpret_cast<float4*>(p + i), *reinterpret_cast<const float4*>(&pack));
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (i + k < n) p[i + k] = pack.x[k];
    }
  }
}

__device__ double value_of(const Scalar& scalar) { return scalar.pointer ? *scalar.pointer : scalar.value; }

__device__ Constants constants_of(const PpoLossArgs& args) {
  const double denominator = value_of(args.denominator);
  return {static_cast<float>(value_of(args.mean)), static_cast<float>(value_of(args.rstd)),
          denominator > 0 ? static_cast<float>(1.0 / denominator) : 0.0f};
}

// The operands of a thread's step. An array that is absent is so for every thread.
struct Operands {
  Pack log_prob, old_log_prob, advantage, value, old_value, returned, ref, entropy, weight, scale, sequence;
  unsigned mask;
};

// Gradients of the tokens at i and after.
template <bool kSequence, bool kUsual>
__device__ __forceinline__ void step(const PpoLossArgs& args, const Constants& c, const Bounds& bounds,
                                     const Operands& in, std::int64_t i, bool whole, Sums& sums) {
  Pack grad_log_prob, grad_value, grad_entropy;
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    const Token t{in.log_prob.x[k], in.old_log_prob.x[k], in.advantage.x[k], in.weight.x[k],
                  in.scale.x[k],    in.sequence.x[k],     in.value.x[k],     in.old_value.x[k],
                  in.returned.x[k], in.ref.x[k],          in.entropy.x[k]};
    const Gradient gradient = token<kSequence, kUsual>(args, c, bounds, in.mask >> (8 * k) & 255u, t, sums);
    grad_log_prob.x[k] = gradient.log_prob;
    grad_value.x[k] = gradient.value;
    grad_entropy.x[k] = gradient.entropy;
  }
  store(args.grad_log_prob, i, args.n, whole, grad_log_prob);
  if (kUsual || args.values) store(args.grad_values, i, args.n, whole, grad_value);
  if (kUsual || args.entropy) store(args.grad_entropy, i, args.n, whole, grad_entropy);
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

// Statistics that a thread hands over as a double; the rest are floats, or integers in their place.
constexpr int kWide = kErrorSq - kReturn + 1;
__device__ constexpr bool is_wide(int k) { return k >= kReturn && k <= kErrorSq; }
__device__ constexpr int narrow_place(int k) { return k < kReturn ? k : k - kWide; }

struct SharedSums {
  float narrow[kLossStats - kWide][kThreads];
  double wide[kWide][kThreads];
};

// The block's sums into partials [kLossStats][blocks]: thread-major in shared memory, then a warp a statistic.
__device__ void add_block(const Sums& sums, SharedSums& shared, double* partials) {
  const int me = threadIdx.x, lane = me % 32, warp = me / 32;
  const auto put = [&](int k, float x) { shared.narrow[narrow_place(k)][me] = x; };
  const auto put_count = [&](int k, int x) { shared.narrow[narrow_place(k)][me] = __int_as_float(x); };
  const auto put_wide = [&](int k, double x) { shared.wide[k - kReturn][me] = x; };
  put_count(kCount, sums.count), put_count(kDropped, sums.dropped);
  put(kPolicy, sums.policy), put(kValue, sums.value), put(kKl, sums.kl), put(kEntropyLoss, sums.entropy_loss);
  put_count(kClipLow, sums.clip_low), put_count(kClipHigh, sums.clip_high), put_count(kDualClip, sums.dual);
  put_count(kValueClip, sums.value_clip);
  put(kK1, sums.k1), put(kK3, sums.k3), put(kRefKl, sums.ref_kl), put(kEntropy, sums.entropy);
  put(kRatio, sums.ratio), put(kWeight, sums.weight), put(kAdvantage, sums.advantage);
  put_wide(kReturn, sums.returned), put_wide(kReturnSq, sums.returned_sq);
  put_wide(kError, sums.error), put_wide(kErrorSq, sums.error_sq);
#pragma unroll
  for (int k = 0; k < kRatioBounds; ++k) put_count(kRatioAbove + k, sums.above[k]);
  put(kRatioMax, sums.ratio_max), put(kLogRatioMax, sums.log_ratio_max);
  __syncthreads();
  for (int k = warp; k < kLossStats; k += kWarps) {
    const bool counts = k <= kDropped || (k >= kClipLow && k <= kValueClip) || (k >= kRatioAbove && k < kLossSums);
    double total = 0;
    for (int t = lane; t < kThreads; t += 32) {
      const float x = shared.narrow[is_wide(k) ? 0 : narrow_place(k)][t];
      const double y = is_wide(k) ? shared.wide[k - kReturn][t] : counts ? __float_as_int(x) : static_cast<double>(x);
      total = k >= kLossSums ? fmax(total, y) : total + y;
    }
    total = k >= kLossSums ? warp_max(total) : warp_sum(total);
    if (lane == 0) partials[static_cast<std::int64_t>(k) * gridDim.x + blockIdx.x] = total;
  }
}

// kUsual: see token(). `aligned`: every array allows 16-byte loads.
template <bool kSequence, bool kUsual>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) ppo_loss_kernel(PpoLossArgs args, double* partials,
                                                                         Bounds bounds, bool aligned) {
  __shared__ SharedSums shared;
  let_next_kernel_start();
  const Constants c = constants_of(args);
  Sums sums;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kStep;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kStep + threadIdx.x * kPack;
  for (; i < args.n; i += stride) {
    const bool whole = aligned && i + kPack <= args.n;
    const auto read = [&](const float* p, float absent) { return p ? load(p, i, args.n, whole) : all_of(absent); };
    Operands in;
    in.log_prob = read(args.log_prob, 0.0f), in.old_log_prob = read(args.old_log_prob, 0.0f);
    in.advantage = read(args.advantages, 0.0f);
    in.value = read(args.values, 0.0f), in.old_value = read(args.old_values, 0.0f);
    in.returned = read(args.returns, 0.0f), in.ref = read(args.ref_log_prob, 0.0f);
    in.entropy = read(args.entropy, 0.0f);
    in.weight = read(args.weights, 1.0f), in.scale = read(args.scale, 1.0f);
    in.sequence = read(kSequence ? args.sequence_log_ratio : nullptr, 0.0f);
    in.mask = load_mask(args.mask, i, args.n, whole);
    step<kSequence, kUsual>(args, c, bounds, in, i, whole, sums);
  }
  add_block(sums, shared, partials);
}

// The usual configuration by bulk copies. A stage holds the operands of a block's step.
constexpr int kStages = 2, kAlways = 8, kOperands = 10;

struct alignas(128) Stage {
  float x[kOperands][kStep];
  std::uint8_t mask[kStep];
};

struct Staging {
  Stage stage[kStages];
  std::uint64_t full[kStages];
};
static_assert(sizeof(SharedSums) <= sizeof(Stage) * kStages, "the sums take the place of the stages");

// One thread: asks for the step at `first`, which is whole. The last two operands may be absent.
[[maybe_unused]] __device__ __forceinline__ void request(const PpoLossArgs& args, std::int64_t first, Stage& stage,
                                                         std::uint64_t* full) {
  const float* const from[kOperands] = {args.log_prob,   args.old_log_prob, args.advantages,   args.values,
                                        args.old_values, args.returns,      args.ref_log_prob, args.entropy,
                                        args.weights,    args.scale};
  const int present = kAlways + (args.weights != nullptr) + (args.scale != nullptr);
  sm90::barrier_expect(full, present * sizeof(stage.x[0]) + sizeof(stage.mask));
#pragma unroll
  for (int k = 0; k < kOperands; ++k) {
    if (k < kAlways || from[k]) sm90::copy_line(stage.x[k], from[k] + first, sizeof(stage.x[k]), full);
  }
  sm90::copy_line(stage.mask, args.mask + first, sizeof(stage.mask), full);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm) ppo_loss_staged_kernel(PpoLossArgs args, double* partials,
                                                                                Bounds bounds) {
#if __CUDA_ARCH__ >= 900  // for other targets the kernel is empty, and is never launched there
  extern __shared__ __align__(128) unsigned char raw[];
  Staging& staging = *reinterpret_cast<Staging*>(raw);
  let_next_kernel_start();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kStep;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kStep;
  const auto request_step = [&](std::int64_t first, int s) {
    if (first + kStep <= args.n) request(args, first, staging.stage[s], &staging.full[s]);
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) sm90::barrier_init(&staging.full[s], 1);
    sm90::barrier_init_fence();
    for (int s = 0; s < kStages; ++s) request_step(begin + s * stride, s);
  }
  __syncthreads();
  const Constants c = constants_of(args);
  Sums sums;
  int s = 0;
  unsigned parity = 0;
  for (std::int64_t first = begin; first < args.n; first += stride) {
    const bool staged = first + kStep <= args.n;  // the last step of all may be short
    const std::int64_t i = first + threadIdx.x * kPack;
    Stage& stage = staging.stage[s];
    if (staged) sm90::barrier_wait(&staging.full[s], parity);
    const auto read = [&](int k, const float* p, float absent) {
      if (!p) return all_of(absent);
      return staged ? *reinterpret_cast<const Pack*>(&stage.x[k][threadIdx.x * kPack]) : load(p, i, args.n, false);
    };
    Operands in;
    in.log_prob = read(0, args.log_prob, 0.0f), in.old_log_prob = read(1, args.old_log_prob, 0.0f);
    in.advantage = read(2, args.advantages, 0.0f);
    in.value = read(3, args.values, 0.0f), in.old_value = read(4, args.old_values, 0.0f);
    in.returned = read(5, args.returns, 0.0f), in.ref = read(6, args.ref_log_prob, 0.0f);
    in.entropy = read(7, args.entropy, 0.0f);
    in.weight = read(8, args.weights, 1.0f), in.scale = read(9, args.scale, 1.0f);
    in.sequence = all_of(0.0f);
    in.mask = staged ? *reinterpret_cast<const unsigned*>(&stage.mask[threadIdx.x * kPack])
                     : load_mask(args.mask, i, args.n, false);
    __syncthreads();  // every thread has its operands in registers: the stage is free
    if (threadIdx.x == 0) request_step(first + kStages * stride, s);
    if (++s == kStages) s = 0, parity ^= 1;
    step<false, true>(args, c, bounds, in, i, staged, sums);
  }
  __syncthreads();
  add_block(sums, *reinterpret_cast<SharedSums*>(raw), partials);
#endif
}

// One block: the statistics and the loss from the blocks' sums.
constexpr int kTotalThreads = 1024;

__global__ void __launch_bounds__(kTotalThreads) total_kernel(PpoLossArgs args, const double* partials, int blocks) {
  constexpr int kAhead = 9;  // loads in flight: 288 blocks at once, more than an H200 has
  __shared__ double all[kLossStats];
  const int lane = threadIdx.x % 32;
  await_previous_kernel();
  for (int k = threadIdx.x / 32; k < kLossStats; k += kTotalThreads / 32) {
    const double* const row = partials + static_cast<std::int64_t>(k) * blocks;
    double total = 0;  // none of the maxima is below
    for (int first = lane; first < blocks; first += 32 * kAhead) {
      double y[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) y[j] = first + 32 * j < blocks ? __ldcg(&row[first + 32 * j]) : 0.0;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) total = k >= kLossSums ? fmax(total, y[j]) : total + y[j];
    }
    total = k >= kLossSums ? warp_max(total) : warp_sum(total);
    if (lane == 0) args.stats[k] = all[k] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *args.loss = static_cast<float>(all[kPolicy] + double(args.vf_coef) * all[kValue] +
                                    double(args.kl_coef) * all[kKl] - double(args.ent_coef) * all[kEntropyLoss]);
  }
}

// Gradients times a scalar on the device; nothing is touched when it is 1, the usual case. For that case the kernel is
// launched early and in few blocks, which then have nothing but a look at the factor to do.
struct Arrays {
  float* x[3];
};

__global__ void __launch_bounds__(kThreads) scale_kernel(Arrays arrays, std::int64_t n, const float* factor,
                                                         bool aligned) {
  await_previous_kernel();
  const float f = *factor;
  if (f == 1.0f) return;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kStep;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kStep + threadIdx.x * kPack; i < n; i += stride) {
    const bool whole = aligned && i + kPack <= n;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (!arrays.x[k]) continue;
      Pack pack = load(arrays.x[k], i, n, whole);
#pragma unroll
      for (int j = 0; j < kPack; ++j) pack.x[j] *= f;
      store(arrays.x[k], i, n, whole, pack);
    }
  }
}

template <typename... Pointers>
bool aligned_to_16(const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) | ...) & 15) == 0;
}

std::int64_t blocks_of(std::int64_t n) {
  const std::int64_t wanted = (n + kStep - 1) / kStep, full = std::int64_t(kBlocksPerSm) * multiprocessors("ppo_loss");
  const std::int64_t most = full < kMaxBlocks ? full : kMaxBlocks;
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

}  // namespace

std::size_t ppo_loss_workspace() { return sizeof(double) * kLossStats * kMaxBlocks; }

void ppo_loss(const PpoLossArgs& args, void* workspace, Stream on) {
  const auto stream = static_cast<cudaStream_t>(on.handle);
  double* const partials = static_cast<double*>(workspace);
  const std::int64_t blocks = blocks_of(args.n);
  const bool aligned = aligned_to_16(
      args.log_prob, args.old_log_prob, args.advantages, args.mask, args.weights, args.scale, args.sequence_log_ratio,
      args.values, args.old_values, args.returns, args.ref_log_prob, args.entropy, args.grad_log_prob, args.grad_values,
      args.grad_entropy);
  Bounds bounds;
  for (int k = 0; k < kRatioBounds; ++k) bounds.ratio[k] = kRatioBound[k];
  const bool usual = !args.sequence_log_ratio && args.clip == Clip::ppo && args.dual_clip > 0 && args.values &&
                     args.value_clip > 0 && args.ref_log_prob && args.kl == Kl::k3 && args.entropy;
  const bool hopper = for_hopper("ppo_loss", reinterpret_cast<const void*>(&ppo_loss_staged_kernel));
  if (usual && aligned && hopper) {
    MF_CUDA_CHECK("ppo_loss", cudaFuncSetAttribute(ppo_loss_staged_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(sizeof(Staging))));
    launch("ppo_loss", ppo_loss_staged_kernel, blocks, kThreads, sizeof(Staging), stream, false, args, partials,
           bounds);
  } else {
    const auto kernel = usual                     ? ppo_loss_kernel<false, true>
                        : args.sequence_log_ratio ? ppo_loss_kernel<true, false>
                                                  : ppo_loss_kernel<false, false>;
    launch("ppo_loss", kernel, blocks, kThreads, 0, stream, false, args, partials, bounds, aligned);
  }
  launch("ppo_loss", total_kernel, 1, kTotalThreads, 0, stream, hopper, args, partials, blocks);
}

void scale_gradients(float* const (&gradients)[3], std::int64_t n, const float* factor, Stream on) {
  if (n == 0) return;
  const bool hopper = for_hopper("scale_gradients", reinterpret_cast<const void*>(&scale_kernel));
  const bool aligned = aligned_to_16(gradients[0], gradients[1], gradients[2]);
  launch("scale_gradients", scale_kernel, blocks_of(n), kThreads, 0, static_cast<cudaStream_t>(on.handle), hopper,
         Arrays{{gradients[0], gradients[1], gradients[2]}}, n, factor, aligned);
}

}  // namespace manus_fast::cuda

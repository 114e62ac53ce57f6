// Fused product and softmax statistics, and fused product and softmax gradient, for Hopper (sm_90a).
//
// A block makes 128 × 256 tiles of logits (tokens × vocabulary): one warp keeps four stages of operands coming by bulk
// tensor copies, two warpgroups multiply 64 rows each. Two blocks form a cluster that shares a vocabulary tile: each
// fetches half of it and multicasts it to both, which halves that traffic from the L2. The grid is persistent. The second
// warpgroup starts each tile kLag products behind the first, so that while one reduces its logits in registers the
// other has the tensor cores.
//
// A row's numbers are spread over the four threads of a quad, so its statistics need two shuffles each. All exponentials
// are in base 2: with k = log2(e)/T and top = max z·k over the tile,  Σ 2^(z·k - top)  and  Σ 2^(z·k - top)·(z·k - top).
#include <cuda_bf16.h>

#include <algorithm>

#include "common/check.h"
#include "ops/linear_logprob.h"
#include "ops/sm90.cuh"

namespace manus_fast::cuda {
namespace {

constexpr int kTokens = 128;  // rows of a block's tile
constexpr int kVocabulary = kTileVocabulary;
constexpr int kDepth = 64;  // elements of K a stage: 128 bytes, the swizzle's width
constexpr int kStages = 4;
constexpr int kBlocks = 2;  // in a cluster, one above the other along the tokens
constexpr int kThreads = 384;
[[maybe_unused]] constexpr int kLag = 2;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
[[maybe_unused]] constexpr float kLowest = -1e30f;

constexpr int kHiddenBytes = kTokens * kDepth * 2;
constexpr int kWeightBytes = kVocabulary * kDepth * 2;
constexpr int kStageBytes = kHiddenBytes + kWeightBytes;
constexpr int kBoxBytes = 64 * 128;              // 64 rows × 64 bf16 of output
constexpr int kStagingBytes = 2 * 2 * kBoxBytes;  // two boxes for each of two warpgroups
constexpr int kAlignment = 1024;  // of stages and boxes, for the swizzle
constexpr int kSharedBytes = kStages * kStageBytes + kStagingBytes + 2 * kStages * 8 + kAlignment;

enum class Mode { statistics, statistics_and_logits, gradient };

struct TileArgs {
  const std::int64_t* target;
  const float* temperature;
  float inverse_temperature;
  int tokens, depth_steps, vocabulary;
  std::int64_t first;
  float* partials;
  float* target_logit;
  const float* log_total;
  const float* grad_log_prob;
  const float* grad_entropy;
  const float* entropy;
  int token_pairs, vocabulary_tiles, group;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Tile pair number → (pair of token tiles, vocabulary tile): `group` token pairs sweep the whole vocabulary together,
// so that their hidden states stay in the L2 and each weight tile is fetched once for all of them.
__device__ __forceinline__ void locate(const TileArgs& args, int index, int& token_pair, int& vocabulary_tile) {
  const int per_group = args.group * args.vocabulary_tiles;
  const int group = index / per_group;
  const int rows = min(args.group, args.token_pairs - group * args.group);
  const int inside = index - group * per_group;
  token_pair = group * args.group + inside % rows;
  vocabulary_tile = inside / rows;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The statistics of one row (`Half` 0: the thread's first row, 1: the row 8 below) over the tile.
template <int Half>
__device__ __forceinline__ void row_statistics(const float (&z)[128], float scale, float& top, float& total,
                                               float& weighted) {
  float peak = z[Half * 2];
#pragma unroll
  for (int i = 0; i < 32; ++i) peak = fmaxf(peak, fmaxf(z[i * 4 + Half * 2], z[i * 4 + Half * 2 + 1]));
  top = quad_max(peak) * scale;
  float totals[2] = {0.f, 0.f}, weights[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float y = fmaf(z[i * 4 + Half * 2 + b], scale, -top);
      const float e = exp2_fast(y);
      totals[b] += e;
      weights[b] = fmaf(e, y, weights[b]);
    }
  }
  total = quad_sum(totals[0] + totals[1]);
  weighted = quad_sum(weights[0] + weights[1]);
}

__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&two);
}

// Writes a warpgroup's 64 × 256 numbers as bf16 through `staging`: two halves of 128 columns, each as two boxes of 64
// rows × 128 bytes in the copy engine's 128-byte swizzle. `warpgroup` names the barrier.
__device__ __forceinline__ void store_tile(const float (&z)[128], std::uint8_t* staging, const CUtensorMap* map, int x,
                                           int y, int warpgroup, int thread) {
  const int lane = thread & 31;
  // Matrices of one store_matrices: 0, 1 rows 0-7 and 8-15 of block i; 2, 3 the same of block i + 1.
  const int row = (thread >> 5) * 16 + ((lane >> 3) & 1) * 8 + (lane & 7);
  const std::uint32_t line = sm90::shared_address(staging) + row * 128;
  const int next = lane >> 4;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    if (thread == 0) sm90::store_wait();
    sm90::named_sync(2 + warpgroup, 128);
#pragma unroll
    for (int block = 0; block < 16; block += 2) {
      const int i = (side * 16 + block) * 4;
      const std::uint32_t address =
          line + (block / 8) * kBoxBytes + ((((block & 7) + next) ^ (row & 7)) << 4);
      sm90::store_matrices(address, pack(z[i], z[i + 1]), pack(z[i + 2], z[i + 3]), pack(z[i + 4], z[i + 5]),
                           pack(z[i + 6], z[i + 7]));
    }
    sm90::copy_fence();
    sm90::named_sync(2 + warpgroup, 128);
    if (thread == 0) {
      sm90::store_box(map, x + side * 128, y, staging);
      sm90::store_box(map, x + side * 128 + 64, y, staging + kBoxBytes);
      sm90::store_commit();
    }
  }
}

// Turns one row's logits into their gradient.
template <int Half>
__device__ __forceinline__ void row_gradient(float (&z)[128], const TileArgs& args, int row, int column0, int lane) {
  const bool inside = row < args.tokens;
  const std::int64_t target = inside ? args.target[row] : -1;
  if (target < 0) {  // zeros whatever the row holds: NaN times an upstream gradient of 0 would be NaN
#pragma unroll
    for (int i = 0; i < 32; ++i) z[i * 4 + Half * 2] = z[i * 4 + Half * 2 + 1] = 0.f;
    return;
  }
  const float inverse = args.temperature ? 1.f / args.temperature[row] : args.inverse_temperature;
  const float g = args.grad_log_prob[row] * inverse;
  const float h = args.grad_entropy ? args.grad_entropy[row] * inverse : 0.f;
  // -p·(g + h·(ln p + H)) / T = p·(a·y + b), y = log2 p
  const float a = -h * kLn2;
  const float b = -(g + h * args.entropy[row]);
  const float log_total = args.log_total[row];
  const float scale = inverse * kLog2e;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& value = z[i * 4 + Half * 2 + c];
      const float y = fmaf(value, scale, -log_total);
      value = exp2_fast(y) * fmaf(y, a, b);
    }
  }
  // The target's place among this thread's columns: 8·i + 2·(lane % 4) + c of the tile.
  const std::int64_t place = target - args.first - column0 - (lane & 3) * 2;
  if (place >= 0 && place < kVocabulary) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (place == i * 8 + c) z[i * 4 + Half * 2 + c] += g;
      }
    }
  }
}

// One row's statistics, and its target's logit where this tile holds it.
template <int Half>
__device__ __forceinline__ void row_forward(const float (&z)[128], const TileArgs& args, int row, int vocabulary_tile,
                                            int lane) {
  const bool inside = row < args.tokens;
  const int r = inside ? row : 0;
  const std::int64_t place = args.target[r] - args.first - vocabulary_tile * kVocabulary - (lane & 3) * 2;
  if (inside && place >= 0 && place < kVocabulary) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (place == i * 8 + c) args.target_logit[r] = z[i * 4 + Half * 2 + c];
      }
    }
  }
  const float inverse = args.temperature ? 1.f / args.temperature[r] : args.inverse_temperature;
  float top, total, weighted;
  row_statistics<Half>(z, inverse * kLog2e, top, total, weighted);
  if (inside && (lane & 3) == 0) {
    float* partial = args.partials + static_cast<std::int64_t>(vocabulary_tile) * 3 * args.tokens + r;
    partial[0] = top;
    partial[args.tokens] = total;
    partial[2 * args.tokens] = weighted;
  }
}

template <Mode M>
__device__ __forceinline__ void finish_tile(float (&z)[128], const TileArgs& args, const CUtensorMap* out_map,
                                            std::uint8_t* staging, int row0, int vocabulary_tile, int warpgroup,
                                            int thread) {
  const int lane = thread & 31;
  const int row = row0 + (thread >> 5) * 16 + (lane >> 2);
  const int column0 = vocabulary_tile * kVocabulary;
  if constexpr (M == Mode::gradient) {
    row_gradient<0>(z, args, row, column0, lane);
    row_gradient<1>(z, args, row + 8, column0, lane);
  }
  if constexpr (M != Mode::statistics) store_tile(z, staging, out_map, column0, row0, warpgroup, thread);
  if constexpr (M != Mode::gradient) {
    if (column0 + kVocabulary > args.vocabulary) {
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        if (column0 + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1) >= args.vocabulary) z[i] = kLowest;
      }
    }
    row_forward<0>(z, args, row, vocabulary_tile, lane);
    row_forward<1>(z, args, row + 8, vocabulary_tile, lane);
  }
}

#endif  // sm_90a; for other targets the kernel is empty, and Python never launches it there

template <Mode M>
__global__ void __launch_bounds__(kThreads, 1)
    logit_tiles_kernel(const __grid_constant__ CUtensorMap hidden_map, const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap out_map, const TileArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::uint8_t raw[];
  std::uint8_t* stages = reinterpret_cast<std::uint8_t*>((reinterpret_cast<std::uintptr_t>(raw) + kAlignment - 1) & ~std::uintptr_t{kAlignment - 1});
  std::uint64_t* filled = reinterpret_cast<std::uint64_t*>(stages + kStages * kStageBytes + kStagingBytes);
  std::uint64_t* emptied = filled + kStages;
  const int group = threadIdx.x / 128;
  const std::uint32_t rank = sm90::cluster_rank();

  if (threadIdx.x == 0) {
    sm90::prefetch_map(&hidden_map);
    sm90::prefetch_map(&weight_map);
    for (int s = 0; s < kStages; ++s) {
      sm90::barrier_init(&filled[s], 1);
      sm90::barrier_init(&emptied[s], 2 * kBlocks);  // both warpgroups of both blocks read what a block multicasts
    }
    sm90::barrier_init_fence();
  }
  sm90::cluster_sync();

  const int pairs = args.token_pairs * args.vocabulary_tiles;
  const int cluster = blockIdx.x / kBlocks;
  const int clusters = gridDim.x / kBlocks;
  int stage = 0;
  std::uint32_t phase = 0;

  if (group == 0) {
    sm90::fewer_registers<40>();
    if (threadIdx.x == 0) {
      for (int index = cluster; index < pairs; index += clusters) {
        int token_pair, vocabulary_tile;
        locate(args, index, token_pair, vocabulary_tile);
        const int token0 = (token_pair * kBlocks + rank) * kTokens;
        const int word0 = vocabulary_tile * kVocabulary + rank * (kVocabulary / kBlocks);
        for (int step = 0; step < args.depth_steps; ++step) {
          sm90::barrier_wait(&emptied[stage], phase ^ 1);
          sm90::barrier_expect(&filled[stage], kStageBytes);
          std::uint8_t* hidden = stages + stage * kStageBytes;
          std::uint8_t* weight = hidden + kHiddenBytes + rank * (kWeightBytes / kBlocks);
          sm90::copy_box(hidden, &hidden_map, step * kDepth, token0, &filled[stage]);
          sm90::copy_box_to(weight, &weight_map, step * kDepth, word0, &filled[stage], (1 << kBlocks) - 1);
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    sm90::more_registers<232>();
    const int half = group - 1;
    const int thread = threadIdx.x - group * 128;
    std::uint8_t* staging = stages + kStages * kStageBytes + half * 2 * kBoxBytes;
    // With few steps a tile the first warpgroup could be two tiles ahead, which the named barrier cannot count.
    const bool staggered = args.depth_steps > kStages + kLag;
    float z[128];
    for (int index = cluster; index < pairs; index += clusters) {
      int token_pair, vocabulary_tile;
      locate(args, index, token_pair, vocabulary_tile);
      if (staggered && half == 1) sm90::named_sync(1, 256);
      int previous = 0;
      for (int step = 0; step < args.depth_steps; ++step) {
        sm90::barrier_wait(&filled[stage], phase);
        const std::uint8_t* base = stages + stage * kStageBytes;
        const std::uint64_t a = sm90::descriptor(base + half * (kHiddenBytes / 2));
        const std::uint64_t b = sm90::descriptor(base + kHiddenBytes);
        sm90::product_begin();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          sm90::product_64x256x16(z, a + 2 * k, b + 2 * k, step > 0 || k > 0);  // 16 bf16 on: 32 bytes
        }
        sm90::product_commit();
        if (staggered && half == 0 && step == kLag) sm90::named_arrive(1, 256);
        if (step > 0) {
          sm90::product_wait<1>();
          if (thread < kBlocks) sm90::barrier_arrive_at(&emptied[previous], thread);
        }
        previous = stage;
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
      sm90::product_wait<0>();
      if (thread < kBlocks) sm90::barrier_arrive_at(&emptied[previous], thread);
      finish_tile<M>(z, args, &out_map, staging, (token_pair * kBlocks + rank) * kTokens + half * 64, vocabulary_tile,
                     half, thread);
    }
    if (M != Mode::statistics && thread == 0) sm90::store_wait();
  }
  sm90::cluster_sync();  // a block must not leave while the other may still signal it
#endif
}

// Rows of 32 a block, 8 threads of the same row each taking every eighth tile.
constexpr int kMergeRows = 32;
constexpr int kMergeSlices = 8;

__global__ void merge_statistics_kernel(MergeArgs args, std::int64_t tiles) {
  __shared__ float shared[3][kMergeSlices][kMergeRows];
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(kMergeRows) + threadIdx.x;
  const bool inside = row < args.tokens;
  float top = kLowest, total = 0.f, weighted = 0.f;
  const auto add = [&](float tile_top, float tile_total, float tile_weighted) {
    const float peak = fmaxf(top, tile_top);
    const float old_decay = exp2f(top - peak), tile_decay = exp2f(tile_top - peak);
    // Σ e·(y - peak) = decay·(Σ e·(y - top) + (top - peak)·Σ e); an empty side adds 0, not 0·∞.
    weighted = (total > 0.f ? old_decay * fmaf(total, top - peak, weighted) : 0.f) +
               (tile_total > 0.f ? tile_decay * fmaf(tile_total, tile_top - peak, tile_weighted) : 0.f);
    total = total * old_decay + tile_total * tile_decay;
    top = peak;
  };
  if (inside) {
#pragma unroll 4
    for (std::int64_t tile = threadIdx.y; tile < tiles; tile += kMergeSlices) {
      const float* partial = args.partials + tile * 3 * args.tokens + row;
      add(partial[0], partial[args.tokens], partial[2 * args.tokens]);
    }
  }
  shared[0][threadIdx.y][threadIdx.x] = top;
  shared[1][threadIdx.y][threadIdx.x] = total;
  shared[2][threadIdx.y][threadIdx.x] = weighted;
  __syncthreads();
  if (threadIdx.y != 0 || !inside) return;
  for (int slice = 1; slice < kMergeSlices; ++slice) {
    add(shared[0][slice][threadIdx.x], shared[1][slice][threadIdx.x], shared[2][slice][threadIdx.x]);
  }
  const std::int64_t target = args.target[row];
  const float log_sum = log2f(total);
  const bool known = target < args.vocabulary;
  args.log_total[row] = known ? top + log_sum : nanf("");
  if (target < 0) {
    args.log_prob[row] = 0.f;
    args.entropy[row] = 0.f;
    return;
  }
  const float scale = (args.temperature ? 1.f / args.temperature[row] : args.inverse_temperature) * kLog2e;
  const float value = known ? (fmaf(args.target_logit[row], scale, -top) - log_sum) * kLn2 : nanf("");
  args.log_prob[row] = value > 0.f ? 0.f : value;  // rounding must not make a probability above 1
  args.entropy[row] = known ? (log_sum - weighted / total) * kLn2 : nanf("");
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult result;
    MF_CUDA_CHECK("logit_tiles", cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000,
                                                                  cudaEnableDefault, &result));
    if (pointer == nullptr) throw std::runtime_error("CUDA kernel logit_tiles: no cuTensorMapEncodeTiled in the driver");
    return reinterpret_cast<EncodeTiled>(pointer);
  }();
  return function;
}

// A map over a bf16 matrix [rows, columns] in boxes of `box_rows` × 64 columns; what lies outside reads as 0.
CUtensorMap matrix_map(const void* data, std::int64_t rows, std::int64_t columns, std::int64_t stride, int box_rows) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult status = encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes,
                                         strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                         CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(concat("CUDA kernel logit_tiles: cuTensorMapEncodeTiled returned ", int(status)));
  }
  return map;
}

template <Mode M>
void launch(const LogitTileArgs& args) {
  if (args.tokens == 0 || args.vocabulary == 0) return;
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return static_cast<int>((a + b - 1) / b); };
  TileArgs tile{};
  tile.target = args.target;
  tile.temperature = args.temperature;
  tile.inverse_temperature = args.inverse_temperature;
  tile.tokens = static_cast<int>(args.tokens);
  tile.depth_steps = ceil_div(args.width, kDepth);
  tile.vocabulary = static_cast<int>(args.vocabulary);
  tile.first = args.first;
  tile.partials = args.partials + (args.partials ? args.first / kVocabulary * 3 * args.tokens : 0);
  tile.target_logit = args.target_logit;
  tile.log_total = args.log_total;
  tile.grad_log_prob = args.grad_log_prob;
  tile.grad_entropy = args.grad_entropy;
  tile.entropy = args.entropy;
  tile.token_pairs = ceil_div(args.tokens, kTokens * kBlocks);
  tile.vocabulary_tiles = ceil_div(args.vocabulary, kVocabulary);
  // Hidden states of one group: about 12 MB, a share of the L2 that the weight tiles streaming past leave alone.
  tile.group = std::max(1, static_cast<int>((12ll << 20) / (args.width * 2 * kTokens * kBlocks)));
  int device = 0, multiprocessors = 0;
  MF_CUDA_CHECK("logit_tiles", cudaGetDevice(&device));
  MF_CUDA_CHECK("logit_tiles", cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  MF_CUDA_CHECK("logit_tiles", cudaFuncSetAttribute(logit_tiles_kernel<M>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    kSharedBytes));
  const CUtensorMap hidden = matrix_map(args.hidden, args.tokens, args.width, args.hidden_stride, kTokens);
  const CUtensorMap weight =
      matrix_map(args.weight, args.vocabulary, args.width, args.weight_stride, kVocabulary / kBlocks);
  // Without an output the map is not used, only passed.
  const CUtensorMap out = args.out ? matrix_map(args.out, args.tokens, args.vocabulary, args.out_stride, 64) : weight;
  const std::int64_t pairs = static_cast<std::int64_t>(tile.token_pairs) * tile.vocabulary_tiles;
  const int clusters = static_cast<int>(std::min<std::int64_t>(multiprocessors / kBlocks, pairs));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kBlocks;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * kBlocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(args.stream);
  config.attrs = &cluster;
  config.numAttrs = 1;
  MF_CUDA_CHECK("logit_tiles", cudaLaunchKernelEx(&config, logit_tiles_kernel<M>, hidden, weight, out, tile));
}

}  // namespace

void logit_statistics(const LogitTileArgs& args) {
  if (args.out) {
    launch<Mode::statistics_and_logits>(args);
  } else {
    launch<Mode::statistics>(args);
  }
}

void logit_gradient(const LogitTileArgs& args) { launch<Mode::gradient>(args); }

void merge_statistics(const MergeArgs& args) {
  if (args.tokens == 0) return;
  const std::int64_t tiles = (args.vocabulary + kVocabulary - 1) / kVocabulary;
  const unsigned blocks = static_cast<unsigned>((args.tokens + kMergeRows - 1) / kMergeRows);
  merge_statistics_kernel<<<blocks, dim3(kMergeRows, kMergeSlices), 0, static_cast<cudaStream_t>(args.stream)>>>(args,
                                                                                                                tiles);
  MF_CUDA_CHECK("merge_statistics", cudaGetLastError());
}

}  // namespace manus_fast::cuda

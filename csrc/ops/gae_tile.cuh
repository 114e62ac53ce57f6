// What the kernels of csrc/ops/gae.cu do with a tile of tokens in registers: maps, advantages, statistics.
//
// Chunk: the 128 tokens that a warp reads with one load, four neighbours a lane. Segment: a warp's chunk in the tile.
// Bit 4 chunk + i of a lane's `mask`, `ends` and `last` is its i-th neighbour there: it is in the mask, the last of its
// row, the last of its turn.
#pragma once

#include "ops/gae_scan.cuh"
#include "ops/ops.h"

namespace manus_fast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Coefficients {
  float gamma, decay, rest;       // gamma, gamma lam, gamma (1 - lam)
  float token_decay, token_rest;  // the same inside a turn
};

__device__ void token_map(TokenMap& map, float r, float v, bool, const Coefficients& c) {
  map = {c.decay, fmaf(c.decay, r, c.rest * v)};
}

// `last`: this token is the last of its turn.
__device__ void token_map(TurnMap& map, float r, float v, bool last, const Coefficients& c) {
  const float inside = fmaf(c.token_decay, r, c.token_rest * v);
  if (last) {
    map = {0.0f, c.token_decay, inside, c.decay, fmaf(c.decay, r, c.rest * v)};
  } else {
    map = {c.token_decay, 0.0f, inside, 1.0f, c.decay * r};
  }
}

__device__ float seen_by(float state, bool) { return state; }
__device__ float seen_by(float2 state, bool last) { return last ? state.y : state.x; }

// Four neighbours: where a row ends the map of what is further right is cut off.
template <typename Map>
__device__ Map map_of(const float (&r)[4], const float (&v)[4], unsigned mask, unsigned ends, unsigned last,
                      const float* row_start_x, const Coefficients& c) {
  Map map;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const unsigned bit = 1u << i;
    if (ends & bit) map = Map::always(Map::start(row_start_x[i]));
    if (mask & bit) {
      Map own;
      token_map(own, r[i], v[i], last & bit, c);
      map = compose(own, map);
    }
  }
  return map;
}

// The same neighbours once `x`, what reaches them from the right, is known: r becomes the advantages, v the returns.
template <typename Map>
__device__ void finish(float (&r)[4], float (&v)[4], typename Map::State x, unsigned mask, unsigned ends, unsigned last,
                       const float* row_start_x, const Coefficients& c) {
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const unsigned bit = 1u << i;
    if (ends & bit) x = Map::start(row_start_x[i]);
    const float added = seen_by(x, last & bit);
    if (mask & bit) {
      Map own;
      token_map(own, r[i], v[i], last & bit, c);
      x = own.apply(x);
    }
    const float advantage = r[i] - v[i] + added;
    v[i] = mask & bit ? r[i] + added : 0.0f;
    r[i] = mask & bit ? advantage : 0.0f;
  }
}

// What the threads of a block share while they scan a tile.
template <typename Map, int kChunks>
struct TileScan {
  static constexpr int kTile = kThreads * 4 * kChunks, kSegments = kWarps * kChunks;
  static_assert(kSegments <= 32, "one warp scans the segments");
  float row_start_x[kTile];  // where a row ends: gamma * bootstrap, what its last token adds
  float segment_map[kSegments][Map::kWords];
  typename Map::State segment_state[kSegments];  // what reaches a segment from the right

  // This thread's place in row_start_x.
  __device__ const float* start_x() const {
    return row_start_x + threadIdx.x / 32 * (kChunks * 128) + threadIdx.x % 32 * 4;
  }
};

// First step, every thread: the maps of its neighbours, and `right_lanes`, of the lanes right of it in the segment.
// Chunks without an end of a row, most of them, take the shorter code.
template <typename Map, int kChunks>
__device__ __forceinline__ void scan_lanes(TileScan<Map, kChunks>& shared, const float (&r)[kChunks][4],
                                           const float (&v)[kChunks][4], unsigned mask, unsigned ends, unsigned last,
                                           const Coefficients& c, Map (&right_lanes)[kChunks]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const unsigned some = ends >> (4 * k) & 15u;
    const float* const start_x = shared.start_x() + k * 128;
    Map map;
    if (some) {
      map = map_of<Map>(r[k], v[k], mask >> (4 * k), some, last >> (4 * k), start_x, c);
    } else {
      map = map_of<Map>(r[k], v[k], mask >> (4 * k), 0u, last >> (4 * k), start_x, c);
    }
    map = suffix_scan(map, lane);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < Map::kWords; ++i) shared.segment_map[warp * kChunks + k][i] = map.words()[i];
    }
    right_lanes[k] = shuffle_down(map, 1);
    if (lane == 31) right_lanes[k] = Map{};
  }
}

// Second step, one warp after a barrier: lane l gets the map of segments l and after; lane 0 that of the whole tile.
template <typename Map, int kChunks>
__device__ __forceinline__ Map scan_segments(const TileScan<Map, kChunks>& shared, int lane) {
  Map map;
  if (lane < TileScan<Map, kChunks>::kSegments) {
#pragma unroll
    for (int i = 0; i < Map::kWords; ++i) map.words()[i] = shared.segment_map[lane][i];
  }
  return suffix_scan(map, lane);
}

// Then the same warp: what reaches each segment when `outer` reaches the tile.
template <typename Map, int kChunks>
__device__ __forceinline__ void hand_out(TileScan<Map, kChunks>& shared, const Map& map, typename Map::State outer,
                                         int lane) {
  const Map right = shuffle_down(map, 1);
  if (lane < TileScan<Map, kChunks>::kSegments) {
    shared.segment_state[lane] = lane == 31 ? outer : right.apply(outer);
  }
}

// Third step, every thread after a barrier: r and v of chunk k become advantages and returns.
template <typename Map, int kChunks>
__device__ __forceinline__ void finish_chunk(const TileScan<Map, kChunks>& shared, int k, float (&r)[4], float (&v)[4],
                                             unsigned mask, unsigned ends, unsigned last, const Coefficients& c,
                                             const Map& right_lanes) {
  const auto x = right_lanes.apply(shared.segment_state[threadIdx.x / 32 * kChunks + k]);
  const unsigned some = ends >> (4 * k) & 15u;
  const float* const start_x = shared.start_x() + k * 128;
  if (some) {
    finish<Map>(r, v, x, mask >> (4 * k), some, last >> (4 * k), start_x, c);
  } else {
    finish<Map>(r, v, x, mask >> (4 * k), 0u, last >> (4 * k), start_x, c);
  }
}

__device__ __forceinline__ void load(float (&to)[4], const float* from) {
  const float4 x = __ldcs(reinterpret_cast<const float4*>(from));
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

__device__ __forceinline__ void store(float* to, const float (&from)[4]) {
  __stcs(reinterpret_cast<float4*>(to), make_float4(from[0], from[1], from[2], from[3]));
}

// Four bools, each 0 or 1, as one word: bits 0, 8, 16, 24 gathered into the lowest nibble by a product.
__device__ __forceinline__ unsigned load_mask(const std::uint8_t* from) {
  return __ldcs(reinterpret_cast<const unsigned*>(from)) * 0x10204080u >> 28;
}

// Sums over a tile's advantages in the mask.
struct Partial {
  double count, sum, square;
};

__device__ double warp_sum(double x) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) x += __shfl_down_sync(kAll, x, distance);
  return x;
}

// One thread: the sum over the warps, in order.
__device__ Partial block_sum(const Partial* warps) {
  Partial total{0, 0, 0};
  for (int w = 0; w < kWarps; ++w) {
    total.count += warps[w].count;
    total.sum += warps[w].sum;
    total.square += warps[w].square;
  }
  return total;
}

// Every thread; warps: [kWarps] shared. Squares about the thread's own mean in float, everything beyond in double.
template <int kChunks>
__device__ __forceinline__ void add_tile(const float (&advantages)[kChunks][4], unsigned mask, Partial* warps,
                                         Partial* to) {
  float sum = 0.0f, square = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    sum += (advantages[k][0] + advantages[k][1]) + (advantages[k][2] + advantages[k][3]);
  }
  const int count = __popc(mask);
  const float centre = count ? __fdividef(sum, static_cast<float>(count)) : 0.0f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float d = mask >> (4 * k + i) & 1u ? advantages[k][i] - centre : 0.0f;
      square = fmaf(d, d, square);
    }
  }
  const double wide = centre;
  const Partial part{static_cast<double>(__reduce_add_sync(kAll, count)), warp_sum(sum),
                     warp_sum(square + wide * (2.0 * sum - wide * count))};
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = part;
  __syncthreads();
  if (threadIdx.x == 0) *to = block_sum(warps);
}

}  // namespace
}  // namespace manus_fast::cuda

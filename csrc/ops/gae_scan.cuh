// The scan under csrc/ops/gae.cu: affine maps and their composition, what tiles tell each other, where rows end.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace manus_fast::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;

// factor * x + own; x is not read where factor is 0: there a row or turn ends, and NaN or infinity stays beyond.
__device__ float reached_by(float factor, float x, float own) { return factor == 0.0f ? own : fmaf(factor, x, own); }

// x -> m x + b
struct TokenMap {
  static constexpr int kWords = 2;
  using State = float;
  float m = 1.0f, b = 0.0f;

  __device__ float apply(float x) const { return reached_by(m, x, b); }
  __device__ bool constant() const { return m == 0.0f; }
  __device__ static TokenMap always(float x) { return {0.0f, x}; }
  __device__ static float start(float x) { return x; }
  __device__ float* words() { return &m; }
  __device__ const float* words() const { return &m; }
};

// Of (x, y): x what the next token of the same turn adds, y what the turn to the right adds to a turn that ends here.
// x -> p x + q y + s,  y -> u y + w
struct TurnMap {
  static constexpr int kWords = 5;
  using State = float2;
  float p = 1.0f, q = 0.0f, s = 0.0f, u = 1.0f, w = 0.0f;

  __device__ float2 apply(float2 z) const { return {reached_by(p, z.x, reached_by(q, z.y, s)), reached_by(u, z.y, w)}; }
  __device__ bool constant() const { return p == 0.0f && q == 0.0f && u == 0.0f; }
  __device__ static TurnMap always(float2 z) { return {0.0f, 0.0f, z.x, 0.0f, z.y}; }
  __device__ static float2 start(float x) { return {0.0f, x}; }
  __device__ float* words() { return &p; }
  __device__ const float* words() const { return &p; }
};

// left after right
__device__ TokenMap compose(const TokenMap& left, const TokenMap& right) {
  return {left.m * right.m, reached_by(left.m, right.b, left.b)};
}
__device__ TurnMap compose(const TurnMap& left, const TurnMap& right) {
  return {left.p * right.p, fmaf(left.p, right.q, left.q * right.u),
          reached_by(left.p, right.s, reached_by(left.q, right.w, left.s)), left.u * right.u,
          reached_by(left.u, right.w, left.w)};
}

template <typename Map>
__device__ Map shuffle_down(const Map& map, int distance) {
  Map out;
#pragma unroll
  for (int k = 0; k < Map::kWords; ++k) out.words()[k] = __shfl_down_sync(kAll, map.words()[k], distance);
  return out;
}

template <typename Map>
__device__ Map shuffle(const Map& map, int lane) {
  Map out;
#pragma unroll
  for (int k = 0; k < Map::kWords; ++k) out.words()[k] = __shfl_sync(kAll, map.words()[k], lane);
  return out;
}

// Lane l gets map_l after map_{l+1} after ... after map_31.
template <typename Map>
__device__ Map suffix_scan(Map map, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Map right = shuffle_down(map, distance);
    if (lane + distance < 32) map = compose(map, right);
  }
  return map;
}

// What a tile has told the tiles on its left. Each word carries its own flag, so a reader needs no fence: it takes the
// words once all are there. Only a tile's own map is ever published, never what it learned from its right: results
// would depend on who came first, and this way the same inputs give the same bits.
template <typename Map>
struct TileWord {
  unsigned long long word[Map::kWords];
};

template <typename Map>
__device__ void publish(TileWord<Map>* tile, const Map& map) {
#pragma unroll
  for (int k = 0; k < Map::kWords; ++k) {
    const unsigned long long value = (1ull << 32) | __float_as_uint(map.words()[k]);
    *const_cast<volatile unsigned long long*>(&tile->word[k]) = value;
  }
}

template <typename Map>
__device__ Map await(const TileWord<Map>* tile) {
  Map map;
  bool there;
  do {
    there = true;
#pragma unroll
    for (int k = 0; k < Map::kWords; ++k) {
      const unsigned long long word = *const_cast<const volatile unsigned long long*>(&tile->word[k]);
      there = there && (word >> 32) != 0;
      map.words()[k] = __uint_as_float(static_cast<unsigned>(word));
    }
  } while (!there);
  return map;
}

// One warp: what the tiles right of `tile` hand to it, read 32 at a time up to the first in which a row ends.
template <typename Map>
__device__ Map look_back(const TileWord<Map>* states, std::int64_t tile, std::int64_t tiles, int lane) {
  Map total;
  for (std::int64_t first = tile + 1; first < tiles; first += 32) {
    Map map;
    if (first + lane < tiles) map = await(&states[first + lane]);
    const unsigned known = __ballot_sync(kAll, map.constant());
    const int nearest = known ? __ffs(known) - 1 : 32;
    if (lane > nearest) map = Map{};
    total = compose(total, shuffle(suffix_scan(map, lane), 0));
    if (known) break;
  }
  return total;
}

struct Rows {
  const std::int32_t* cu_seqlens;
  std::int64_t rows, row_length;

  __device__ std::int64_t end(std::int64_t row) const {
    return cu_seqlens ? static_cast<std::int64_t>(cu_seqlens[row + 1]) : (row + 1) * row_length;
  }
  __device__ std::int64_t start(std::int64_t row) const {
    return cu_seqlens ? static_cast<std::int64_t>(cu_seqlens[row]) : row * row_length;
  }
  // One warp: the first row that ends after `position`, `rows` if none does. 32 probes a step.
  __device__ std::int64_t find(std::int64_t position, int lane) const {
    if (!cu_seqlens) {
      const bool narrow = (position | row_length) >> 32 == 0;  // a 64-bit division costs five times as much
      return narrow ? static_cast<unsigned>(position) / static_cast<unsigned>(row_length) : position / row_length;
    }
    std::int64_t low = 0, high = rows;
    while (low < high) {
      const std::int64_t step = (high - low + 31) / 32;
      const std::int64_t probe = low + lane * step;
      const bool after = probe >= high || end(probe) > position;
      const unsigned mask = __ballot_sync(kAll, after);
      const int first = mask ? __ffs(mask) - 1 : 32;  // probe `first` ends after, the one before does not
      if (first == 0) return low;
      const std::int64_t next = low + first * step;
      low = low + (first - 1) * step + 1;
      high = next < high ? next : high;
    }
    return low;
  }
};

}  // namespace
}  // namespace manus_fast::cuda

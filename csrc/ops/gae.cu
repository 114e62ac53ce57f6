// Generalised advantage estimation on the GPU in one pass: every input is read once, every output written once.
//
// With x = gamma V(next) + gamma lam A(next), what a token adds to its own reward, the advantage is r - v + x and the
// token before it sees the affine map x -> gamma lam x + (gamma lam r + gamma (1 - lam) v); a masked token is the
// identity, and the last token of a row replaces x by gamma * bootstrap. Composition of such maps is associative, so
// the whole array is one scan from the right, whatever the rows. A tile of tokens is scanned in registers (four
// neighbours a thread), over warps, then over the warps' segments by one warp; between tiles a decoupled look-back
// (Merrill and Garland 2016) reads the maps of the tiles on the right, up to the first in which a row ends. At turn
// level the state is two numbers (TurnMap in gae_scan.cuh) and the scan the same.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "ops/gae_scan.cuh"
#include "ops/ops.h"

namespace manus_fast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Partial {
  double count, sum, square;
};

struct Work {
  unsigned* tickets;  // [2]: tiles handed out, blocks done
  void* states;       // [tiles] TileWord
  Partial* partials;  // [tiles]
};

struct Coefficients {
  float gamma, decay, rest;       // gamma, gamma lam, gamma (1 - lam)
  float token_decay, token_rest;  // the same inside a turn
};

__device__ TokenMap token_map(float r, float v, const Coefficients& c) {
  return {c.decay, fmaf(c.decay, r, c.rest * v)};
}

// `last`: this token is the last of its turn.
__device__ TurnMap turn_map(float r, float v, bool last, const Coefficients& c) {
  const float inside = fmaf(c.token_decay, r, c.token_rest * v);
  if (last) return {0.0f, c.token_decay, inside, c.decay, fmaf(c.decay, r, c.rest * v)};
  return {c.token_decay, 0.0f, inside, 1.0f, c.decay * r};
}

__device__ float seen_by(float state, bool) { return state; }
__device__ float seen_by(float2 state, bool last) { return last ? state.y : state.x; }

__device__ void token_map(TokenMap& map, float r, float v, bool, const Coefficients& c) { map = token_map(r, v, c); }
__device__ void token_map(TurnMap& map, float r, float v, bool last, const Coefficients& c) {
  map = turn_map(r, v, last, c);
}

// Turn of the next token in the mask, as a scan: transparent outside the mask, no turn where a row ends.
constexpr int kTransparent = INT32_MIN, kNoTurn = INT32_MIN + 1;

__device__ int over(int left, int right) { return left != kTransparent ? left : right; }

// One warp: turn of the first token in the mask from `position` on that is before `end`.
__device__ int first_turn(const GaeArgs& args, std::int64_t position, std::int64_t end, int lane) {
  for (; position < end; position += 128) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const std::int64_t at = position + 32 * k + lane;
      const unsigned found = __ballot_sync(kAll, at < end && args.mask[at] != 0);
      if (found) return args.turn_id[position + 32 * k + __ffs(found) - 1];
    }
  }
  return kNoTurn;
}

__device__ double warp_sum(double x) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) x += __shfl_down_sync(kAll, x, distance);
  return x;
}

// Of the statistics: a warp's sum in lane 0.
__device__ Partial warp_sum(int count, double sum, double square) {
  return {static_cast<double>(__reduce_add_sync(kAll, count)), warp_sum(sum), warp_sum(square)};
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

// Four neighbours: where a row ends (bits of `ends`) the map of what is further right is cut off.
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

// Chunk: the 128 tokens that a warp reads with one load, four neighbours a lane. Segment: a warp's chunk in the tile.
template <typename Map, int kChunks, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) gae_kernel(GaeArgs args, Work work, Coefficients c,
                                                                std::int64_t tiles, bool aligned) {
  using State = typename Map::State;
  constexpr bool kTurns = Map::kWords > 2;
  constexpr int kTile = kThreads * 4 * kChunks, kSegments = kWarps * kChunks;
  static_assert(kSegments <= 32, "one warp scans the segments");
  __shared__ unsigned row_end[kTile / 32];  // bit: a row ends at this token
  __shared__ float row_start_x[kTile];      // where one does: gamma * bootstrap
  __shared__ float segment_map[kSegments][Map::kWords];
  __shared__ State segment_state[kSegments];  // what reaches a segment from the right
  __shared__ int segment_turn[kSegments];
  __shared__ Partial warp_partial[kWarps];
  __shared__ unsigned next_ticket;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Rows rows{args.cu_seqlens, args.rows, args.row_length};
  TileWord<Map>* const states = static_cast<TileWord<Map>*>(work.states);
  for (int i = threadIdx.x; i < kTile / 32; i += kThreads) row_end[i] = 0;
  __syncthreads();

  // Tiles are handed out from the right: one only ever waits for tiles that were handed out before it.
  for (std::int64_t order = blockIdx.x; order < tiles;) {
    const std::int64_t tile = tiles - 1 - order, tile_start = tile * kTile, tile_end = tile_start + kTile;
    const bool whole = aligned && tile_end <= args.tokens;
    const std::int64_t mine = tile_start + warp * (kChunks * 128) + lane * 4;
    float r[kChunks][4], v[kChunks][4];
    int turn[kTurns ? kChunks : 1][4];
    unsigned mask = 0;  // bit 4 chunk + i
    unsigned ticket = 0;
    if (whole) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const float4 r4 = __ldcs(reinterpret_cast<const float4*>(args.rewards + mine + k * 128));
        const float4 v4 = __ldcs(reinterpret_cast<const float4*>(args.values + mine + k * 128));
        r[k][0] = r4.x, r[k][1] = r4.y, r[k][2] = r4.z, r[k][3] = r4.w;
        v[k][0] = v4.x, v[k][1] = v4.y, v[k][2] = v4.z, v[k][3] = v4.w;
        if constexpr (kTurns) {
          const int4 t4 = __ldcs(reinterpret_cast<const int4*>(args.turn_id + mine + k * 128));
          turn[k][0] = t4.x, turn[k][1] = t4.y, turn[k][2] = t4.z, turn[k][3] = t4.w;
        }
      }
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        // Four bools, each 0 or 1, as one word: bits 0, 8, 16, 24 gathered into the top nibble by a product.
        const unsigned m4 = __ldcs(reinterpret_cast<const unsigned*>(args.mask + mine + k * 128));
        mask |= (m4 * 0x10204080u >> 28) << (4 * k);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::int64_t at = mine + k * 128 + i;
          const bool here = at < args.tokens;
          r[k][i] = here ? args.rewards[at] : 0.0f;
          v[k][i] = here ? args.values[at] : 0.0f;
          mask |= unsigned(here && args.mask[at] != 0) << (4 * k + i);
          if constexpr (kTurns) turn[k][i] = here ? args.turn_id[at] : 0;
        }
      }
    }
    if (threadIdx.x == 0) ticket = gridDim.x + atomicAdd(&work.tickets[0], 1u);

    // The rows that end in this tile.
    for (std::int64_t row = rows.find(tile_start, lane) + threadIdx.x; row < args.rows; row += kThreads) {
      const std::int64_t end = rows.end(row);
      if (end > tile_end) break;
      if (end == rows.start(row)) continue;
      const int at = static_cast<int>(end - 1 - tile_start);
      atomicOr(&row_end[at / 32], 1u << (at % 32));
      row_start_x[at] = args.bootstrap ? c.gamma * args.bootstrap[row] : 0.0f;
    }
    __syncthreads();
    const std::int64_t last_token = (tile_end < args.tokens ? tile_end : args.tokens) - 1;
    const int last_at = static_cast<int>(last_token - tile_start);
    const bool closed = row_end[last_at / 32] >> (last_at % 32) & 1u;  // nothing comes in from the right
    const float* const start_x = row_start_x + warp * (kChunks * 128) + lane * 4;
    unsigned ends = 0;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int at = (warp * kChunks + k) * 128 + lane * 4;
      ends |= (row_end[at / 32] >> (at % 32) & 15u) << (4 * k);
    }

    // Which tokens are the last of their turn: the next one in the mask of the same row has another turn, or is not.
    unsigned last = 0;
    if constexpr (kTurns) {
      int right_lanes[kChunks];
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        int id = kTransparent;
#pragma unroll
        for (int i = 3; i >= 0; --i) {
          if (ends >> (4 * k + i) & 1u) id = kNoTurn;
          if (mask >> (4 * k + i) & 1u) id = turn[k][i];
        }
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int right = __shfl_down_sync(kAll, id, distance);
          if (lane + distance < 32) id = over(id, right);
        }
        const int right = __shfl_down_sync(kAll, id, 1);
        right_lanes[k] = lane == 31 ? kTransparent : right;
        if (lane == 0) segment_turn[warp * kChunks + k] = id;
      }
      __syncthreads();
      if (warp == 0) {
        int outer = kNoTurn;
        if (!closed) outer = first_turn(args, tile_end, rows.end(rows.find(last_token, lane)), lane);
        int id = lane < kSegments ? segment_turn[lane] : kTransparent;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int right = __shfl_down_sync(kAll, id, distance);
          if (lane + distance < 32) id = over(id, right);
        }
        const int right = __shfl_down_sync(kAll, id, 1);
        if (lane < kSegments) segment_turn[lane] = lane == 31 ? outer : over(right, outer);
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        int next = over(right_lanes[k], segment_turn[warp * kChunks + k]);
#pragma unroll
        for (int i = 3; i >= 0; --i) {
          if (ends >> (4 * k + i) & 1u) next = kNoTurn;
          if (mask >> (4 * k + i) & 1u) {
            last |= unsigned(turn[k][i] != next) << (4 * k + i);
            next = turn[k][i];
          }
        }
      }
    }

    // Scan: this lane's four tokens, the lanes right of it in the segment, then the segments in one warp.
    Map right_lanes[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const unsigned some = ends >> (4 * k) & 15u;
      Map map;
      if (some) {
        map = map_of<Map>(r[k], v[k], mask >> (4 * k), some, last >> (4 * k), start_x + k * 128, c);
      } else {
        map = map_of<Map>(r[k], v[k], mask >> (4 * k), 0u, last >> (4 * k), start_x + k * 128, c);
      }
      map = suffix_scan(map, lane);
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < Map::kWords; ++i) segment_map[warp * kChunks + k][i] = map.words()[i];
      }
      right_lanes[k] = shuffle_down(map, 1);
      if (lane == 31) right_lanes[k] = Map{};
    }
    if (threadIdx.x == 0) next_ticket = ticket;
    __syncthreads();
    if (warp == 0) {
      Map map;
      if (lane < kSegments) {
#pragma unroll
        for (int i = 0; i < Map::kWords; ++i) map.words()[i] = segment_map[lane][i];
      }
      map = suffix_scan(map, lane);
      if (lane == 0) publish(&states[tile], map);
      State outer = Map::start(0.0f);
      if (!closed) outer = look_back(states, tile, tiles, lane).apply(outer);
      const Map right = shuffle_down(map, 1);
      if (lane < kSegments) segment_state[lane] = lane == 31 ? outer : right.apply(outer);
    }
    __syncthreads();

    order = next_ticket;
    for (int i = threadIdx.x; i < kTile / 32; i += kThreads) row_end[i] = 0;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const State x = right_lanes[k].apply(segment_state[warp * kChunks + k]);
      const unsigned some = ends >> (4 * k) & 15u;
      if (some) {
        finish<Map>(r[k], v[k], x, mask >> (4 * k), some, last >> (4 * k), start_x + k * 128, c);
      } else {
        finish<Map>(r[k], v[k], x, mask >> (4 * k), 0u, last >> (4 * k), start_x + k * 128, c);
      }
      if (whole) {
        const float4 a4 = make_float4(r[k][0], r[k][1], r[k][2], r[k][3]);
        const float4 g4 = make_float4(v[k][0], v[k][1], v[k][2], v[k][3]);
        __stcs(reinterpret_cast<float4*>(args.advantages + mine + k * 128), a4);
        __stcs(reinterpret_cast<float4*>(args.returns + mine + k * 128), g4);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::int64_t at = mine + k * 128 + i;
          if (at < args.tokens) args.advantages[at] = r[k][i], args.returns[at] = v[k][i];
        }
      }
      sum += (r[k][0] + r[k][1]) + (r[k][2] + r[k][3]);
    }

    // Statistics: squares about the thread's own mean in float, everything beyond in double.
    const int count = __popc(mask);
    const float centre = count ? __fdividef(sum, static_cast<float>(count)) : 0.0f;
    float square = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float d = mask >> (4 * k + i) & 1u ? r[k][i] - centre : 0.0f;
        square = fmaf(d, d, square);
      }
    }
    const double wide = centre;
    const Partial part = warp_sum(count, sum, square + wide * (2.0 * sum - wide * count));
    if (lane == 0) warp_partial[warp] = part;
    __syncthreads();
    if (threadIdx.x == 0) work.partials[tile] = block_sum(warp_partial);
  }

  // The block that finishes last adds the tiles' partials, in their order.
  if (threadIdx.x == 0) {
    __threadfence();
    next_ticket = atomicAdd(&work.tickets[1], 1u);
  }
  __syncthreads();
  if (next_ticket != gridDim.x - 1) return;
  __threadfence();
  Partial all{0, 0, 0};
  for (std::int64_t t = threadIdx.x; t < tiles; t += kThreads) {
    all.count += __ldcg(&work.partials[t].count);
    all.sum += __ldcg(&work.partials[t].sum);
    all.square += __ldcg(&work.partials[t].square);
  }
  all = {warp_sum(all.count), warp_sum(all.sum), warp_sum(all.square)};
  if (lane == 0) warp_partial[warp] = all;
  __syncthreads();
  if (threadIdx.x == 0) {
    all = block_sum(warp_partial);
    const double mean = all.count > 0 ? all.sum / all.count : 0.0;
    args.stats[0] = all.count;
    args.stats[1] = mean;
    args.stats[2] = fmax(0.0, all.square - all.sum * mean);
  }
}

// How much a tile holds and how many blocks share a multiprocessor.
constexpr int kTokenChunks = 4, kTokenBlocks = 3;
constexpr int kTurnChunks = 2, kTurnBlocks = 3;

std::int64_t tiles_of(std::int64_t tokens, bool turns) {
  const std::int64_t tile = kThreads * 4 * (turns ? kTurnChunks : kTokenChunks);
  return (tokens + tile - 1) / tile;
}

constexpr std::size_t kHeader = 16;  // the two tickets

// What must be zero when the kernel starts: tickets and states.
std::size_t zeroed_bytes(std::int64_t tiles, bool turns) {
  const std::size_t state = turns ? sizeof(TileWord<TurnMap>) : sizeof(TileWord<TokenMap>);
  return kHeader + static_cast<std::size_t>(tiles) * state;
}

int multiprocessors() {
  int device = 0, count = 0;
  MF_CUDA_CHECK("gae", cudaGetDevice(&device));
  MF_CUDA_CHECK("gae", cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

template <typename Map, int kChunks, int kBlocks>
void launch(const GaeArgs& args, const Work& work, const Coefficients& c, std::int64_t tiles, bool aligned,
            cudaStream_t stream) {
  const std::int64_t resident = std::int64_t(kBlocks) * multiprocessors();
  const auto blocks = static_cast<unsigned>(tiles < resident ? tiles : resident);
  gae_kernel<Map, kChunks, kBlocks><<<blocks, kThreads, 0, stream>>>(args, work, c, tiles, aligned);
}

}  // namespace

std::size_t gae_workspace(std::int64_t tokens, bool turns) {
  const std::int64_t tiles = tiles_of(tokens, turns);
  return zeroed_bytes(tiles, turns) + static_cast<std::size_t>(tiles) * sizeof(Partial);
}

void gae(const GaeArgs& args, void* workspace, Stream on) {
  const auto stream = static_cast<cudaStream_t>(on.handle);
  const bool turns = args.turn_id != nullptr;
  if (args.tokens == 0) {
    MF_CUDA_CHECK("gae", cudaMemsetAsync(args.stats, 0, 3 * sizeof(double), stream));
    return;
  }
  const std::int64_t tiles = tiles_of(args.tokens, turns);
  MF_CHECK(tiles < (std::int64_t(1) << 31), "tokens: expected fewer than 2^42, got ", args.tokens);
  char* const memory = static_cast<char*>(workspace);
  const std::size_t zeroed = zeroed_bytes(tiles, turns);
  MF_CUDA_CHECK("gae", cudaMemsetAsync(memory, 0, zeroed, stream));
  const Work work{reinterpret_cast<unsigned*>(memory), memory + kHeader, reinterpret_cast<Partial*>(memory + zeroed)};
  const auto f = [](double x) { return static_cast<float>(x); };
  const Coefficients c{f(args.gamma), f(args.gamma * args.lam), f(args.gamma * (1 - args.lam)),
                       f(args.token_gamma * args.token_lam), f(args.token_gamma * (1 - args.token_lam))};
  const auto address = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  const std::uintptr_t bits = address(args.rewards) | address(args.values) | address(args.advantages) |
                              address(args.returns) | address(args.turn_id);
  const bool aligned = bits % 16 == 0 && address(args.mask) % 4 == 0;
  if (turns) {
    launch<TurnMap, kTurnChunks, kTurnBlocks>(args, work, c, tiles, aligned, stream);
  } else {
    launch<TokenMap, kTokenChunks, kTokenBlocks>(args, work, c, tiles, aligned, stream);
  }
  MF_CUDA_CHECK("gae", cudaGetLastError());
}

}  // namespace manus_fast::cuda

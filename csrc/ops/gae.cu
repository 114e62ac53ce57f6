// Generalised advantage estimation on the GPU in one pass: every input is read once, every output written once.
//
// With x = gamma V(next) + gamma lam A(next), what a token adds to its own reward, the advantage is r - v + x and the
// token before it sees the affine map x -> gamma lam x + (gamma lam r + gamma (1 - lam) v); a masked token is the
// identity, and the last token of a row replaces x by gamma * bootstrap. Composition of such maps is associative, so
// the whole array is one scan from the right, whatever the rows. A tile of tokens is scanned in registers (four
// neighbours a thread), over warps, then over the warps' segments by one warp. At turn level the state is two numbers
// (TurnMap in gae_scan.cuh) and the scan the same.
//
// Two kernels. Where rows are equally long and fit into a tile, a block takes whole rows and no tile needs another:
// gae_rows_kernel. Elsewhere a decoupled look-back between tiles (Merrill and Garland 2016) reads the maps of the tiles
// on the right, up to the first in which a row ends: gae_kernel. Either leaves a partial sum a tile to a last kernel of
// one block, launched early so that it costs nothing but its own work: 1.4 us less than the block that finishes last
// did with a counter, which also had to be cleared beforehand. docs/kernels.md compares the designs.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "ops/gae_scan.cuh"
#include "ops/gae_tile.cuh"
#include "ops/launch.cuh"
#include "ops/ops.h"

namespace manus_fast::cuda {
namespace {

// Turn of the next token in the mask, as a scan: transparent outside the mask, no turn where a row ends.
constexpr int kTransparent = INT32_MIN, kNoTurn = INT32_MIN + 1;

__device__ int over(int left, int right) { return left != kTransparent ? left : right; }

__device__ __forceinline__ int suffix_over(int id, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int right = __shfl_down_sync(kAll, id, distance);
    if (lane + distance < 32) id = over(id, right);
  }
  return id;
}

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

// Which tokens are the last of their turn: the next one in the mask of the same row has another turn, or is not.
// `outer()`, called by the first warp: the turn right of the tile.
template <int kChunks, typename Outer>
__device__ __forceinline__ unsigned last_of_turns(const int (&turn)[kChunks][4], unsigned mask, unsigned ends,
                                                  int* segment_turn, const Outer& outer) {
  constexpr int kSegments = kWarps * kChunks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int right_lanes[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    int id = kTransparent;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      if (ends >> (4 * k + i) & 1u) id = kNoTurn;
      if (mask >> (4 * k + i) & 1u) id = turn[k][i];
    }
    id = suffix_over(id, lane);
    const int right = __shfl_down_sync(kAll, id, 1);
    right_lanes[k] = lane == 31 ? kTransparent : right;
    if (lane == 0) segment_turn[warp * kChunks + k] = id;
  }
  __syncthreads();
  if (warp == 0) {
    const int beyond = outer();
    const int id = suffix_over(lane < kSegments ? segment_turn[lane] : kTransparent, lane);
    const int right = __shfl_down_sync(kAll, id, 1);
    if (lane < kSegments) segment_turn[lane] = lane == 31 ? beyond : over(right, beyond);
  }
  __syncthreads();
  unsigned last = 0;
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
  return last;
}

__device__ __forceinline__ void prefetch_to_l2(const void* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Device memory of a call.
struct Work {
  unsigned* ticket;   // tiles handed out
  void* states;       // [tiles] TileWord
  Partial* partials;  // [tiles]
};

// `aligned`: every array allows 16-byte loads.
template <typename Map, int kChunks, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) gae_kernel(GaeArgs args, Work work, Coefficients c,
                                                                std::int64_t tiles, bool aligned) {
  using State = typename Map::State;
  constexpr bool kTurns = Map::kWords > 2;
  constexpr int kTile = TileScan<Map, kChunks>::kTile;
  __shared__ TileScan<Map, kChunks> shared;
  __shared__ unsigned row_end[kTile / 32];  // bit: a row ends at this token
  __shared__ int segment_turn[kWarps * kChunks];
  __shared__ Partial warp_partial[kWarps];
  __shared__ unsigned next_ticket;
  __shared__ std::int64_t next_row;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Rows rows{args.cu_seqlens, args.rows, args.row_length};
  TileWord<Map>* const states = static_cast<TileWord<Map>*>(work.states);
  let_next_kernel_start();
  for (int i = threadIdx.x; i < kTile / 32; i += kThreads) row_end[i] = 0;
  __syncthreads();

  // Tiles are handed out from the right: one only ever waits for tiles that were handed out before it.
  std::int64_t order = blockIdx.x;
  std::int64_t first_row = order < tiles ? rows.find((tiles - 1 - order) * kTile, lane) : 0;
  while (order < tiles) {
    const std::int64_t tile = tiles - 1 - order, tile_start = tile * kTile, tile_end = tile_start + kTile;
    const bool whole = aligned && tile_end <= args.tokens;
    const std::int64_t mine = tile_start + warp * (kChunks * 128) + lane * 4;
    float r[kChunks][4], v[kChunks][4];
    int turn[kTurns ? kChunks : 1][4];
    unsigned mask = 0;
    if (whole) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        load(r[k], args.rewards + mine + k * 128);
        load(v[k], args.values + mine + k * 128);
        if constexpr (kTurns) {
          const int4 t4 = __ldcs(reinterpret_cast<const int4*>(args.turn_id + mine + k * 128));
          turn[k][0] = t4.x, turn[k][1] = t4.y, turn[k][2] = t4.z, turn[k][3] = t4.w;
        }
      }
#pragma unroll
      for (int k = 0; k < kChunks; ++k) mask |= load_mask(args.mask + mine + k * 128) << (4 * k);
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
    // The kernel before this one clears ticket and states, and runs while the first tile is loaded.
    await_previous_kernel();
    unsigned ticket = 0;
    if (threadIdx.x == 0) ticket = gridDim.x + atomicAdd(work.ticket, 1u);

    // The rows that end in this tile.
    for (std::int64_t row = first_row + threadIdx.x; row < args.rows; row += kThreads) {
      const std::int64_t end = rows.end(row);
      if (end > tile_end) break;
      if (end == rows.start(row)) continue;
      const int at = static_cast<int>(end - 1 - tile_start);
      atomicOr(&row_end[at / 32], 1u << (at % 32));
      shared.row_start_x[at] = args.bootstrap ? c.gamma * args.bootstrap[row] : 0.0f;
    }
    __syncthreads();
    const std::int64_t last_token = (tile_end < args.tokens ? tile_end : args.tokens) - 1;
    const int last_at = static_cast<int>(last_token - tile_start);
    const bool closed = row_end[last_at / 32] >> (last_at % 32) & 1u;  // nothing comes in from the right
    unsigned ends = 0;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int at = (warp * kChunks + k) * 128 + lane * 4;
      ends |= (row_end[at / 32] >> (at % 32) & 15u) << (4 * k);
    }
    unsigned last = 0;
    if constexpr (kTurns) {
      last = last_of_turns(turn, mask, ends, segment_turn, [&] {
        return closed ? kNoTurn : first_turn(args, tile_end, rows.end(rows.find(last_token, lane)), lane);
      });
    }

    Map right_lanes[kChunks];
    scan_lanes(shared, r, v, mask, ends, last, c, right_lanes);
    if (threadIdx.x == 0) {
      next_ticket = ticket;
      // The block's next tile comes into the L2 while this one waits for its right: 6 % on large arrays.
      if (aligned && ticket < tiles && tiles - 1 - ticket < args.tokens / kTile) {
        const std::int64_t next = (tiles - 1 - std::int64_t(ticket)) * kTile;
        prefetch_to_l2(args.rewards + next, kTile * 4);
        prefetch_to_l2(args.values + next, kTile * 4);
        prefetch_to_l2(args.mask + next, kTile);
        if constexpr (kTurns) prefetch_to_l2(args.turn_id + next, kTile * 4);
      }
    }
    __syncthreads();
    if (warp == 0) {
      const Map map = scan_segments(shared, lane);
      if (lane == 0) publish(&states[tile], map);
      State outer = Map::start(0.0f);
      if (!closed) outer = look_back(states, tile, tiles, lane).apply(outer);
      hand_out(shared, map, outer, lane);
    } else if (warp == 1 && next_ticket < tiles) {
      // Meanwhile: the search for the next tile's rows, a chain of dependent loads when they are packed (13 % there).
      const std::int64_t found = rows.find((tiles - 1 - std::int64_t(next_ticket)) * kTile, lane);
      if (lane == 0) next_row = found;
    }
    __syncthreads();

    order = next_ticket;
    first_row = next_row;
    for (int i = threadIdx.x; i < kTile / 32; i += kThreads) row_end[i] = 0;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      finish_chunk(shared, k, r[k], v[k], mask, ends, last, c, right_lanes[k]);
      if (whole) {
        store(args.advantages + mine + k * 128, r[k]);
        store(args.returns + mine + k * 128, v[k]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::int64_t at = mine + k * 128 + i;
          if (at < args.tokens) args.advantages[at] = r[k][i], args.returns[at] = v[k][i];
        }
      }
    }
    add_tile(r, mask, warp_partial, &work.partials[tile]);
  }
}

// Token level, rows of one length: tile t holds rows t * rows_per_tile and after, the first span = rows_per_tile *
// row_length places of its kTile. Span and tokens are multiples of 4, addresses of 16.
template <int kChunks, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) gae_rows_kernel(GaeArgs args, Partial* partials, Coefficients c,
                                                                     int rows_per_tile, int tiles) {
  __shared__ TileScan<TokenMap, kChunks> shared;
  __shared__ unsigned row_end[TileScan<TokenMap, kChunks>::kTile / 32];
  __shared__ Partial warp_partial[kWarps];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_length = static_cast<int>(args.row_length), span = rows_per_tile * row_length;
  let_next_kernel_start();
  // Rows end at the same places of every tile.
  for (int i = threadIdx.x; i < TileScan<TokenMap, kChunks>::kTile / 32; i += kThreads) row_end[i] = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < rows_per_tile; row += kThreads) {
    const int at = (row + 1) * row_length - 1;
    atomicOr(&row_end[at / 32], 1u << (at % 32));
  }
  const int first_at = warp * (kChunks * 128) + lane * 4;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t tile_start = std::int64_t(tile) * span, left = args.tokens - tile_start;
    const std::int64_t mine = tile_start + first_at;
    const int held = left < span ? static_cast<int>(left) : span;
    float r[kChunks][4], v[kChunks][4];
    unsigned mask = 0;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) r[k][i] = v[k][i] = 0.0f;
      if (first_at + k * 128 < held) {
        load(r[k], args.rewards + mine + k * 128);
        load(v[k], args.values + mine + k * 128);
      }
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (first_at + k * 128 < held) mask |= load_mask(args.mask + mine + k * 128) << (4 * k);
    }
    for (int row = threadIdx.x; row < rows_per_tile; row += kThreads) {
      const std::int64_t global_row = std::int64_t(tile) * rows_per_tile + row;
      const bool there = args.bootstrap && global_row < args.rows;
      shared.row_start_x[(row + 1) * row_length - 1] = there ? c.gamma * args.bootstrap[global_row] : 0.0f;
    }
    __syncthreads();
    unsigned ends = 0;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int at = first_at + k * 128;
      ends |= (row_end[at / 32] >> (at % 32) & 15u) << (4 * k);
    }
    TokenMap right_lanes[kChunks];
    scan_lanes(shared, r, v, mask, ends, 0u, c, right_lanes);
    __syncthreads();
    if (warp == 0) hand_out(shared, scan_segments(shared, lane), 0.0f, lane);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      finish_chunk(shared, k, r[k], v[k], mask, ends, 0u, c, right_lanes[k]);
      if (first_at + k * 128 < held) {
        store(args.advantages + mine + k * 128, r[k]);
        store(args.returns + mine + k * 128, v[k]);
      }
    }
    add_tile(r, mask, warp_partial, &partials[tile]);
  }
}

__global__ void __launch_bounds__(kThreads) clear_kernel(unsigned long long* words, std::int64_t count) {
  let_next_kernel_start();
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) words[i] = 0;
}

// One block: the statistics, from the tiles' partials in their order.
__global__ void __launch_bounds__(kThreads) stats_kernel(const Partial* partials, std::int64_t tiles, double* stats) {
  __shared__ Partial warps[kWarps];
  constexpr int kAhead = 4;  // loads in flight
  await_previous_kernel();
  Partial all{0, 0, 0};
  for (std::int64_t t = threadIdx.x; t < tiles; t += kAhead * kThreads) {
    Partial part[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const std::int64_t at = t + k * kThreads;
      part[k] = Partial{0, 0, 0};
      if (at < tiles) part[k] = {__ldcg(&partials[at].count), __ldcg(&partials[at].sum), __ldcg(&partials[at].square)};
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      all.count += part[k].count, all.sum += part[k].sum, all.square += part[k].square;
    }
  }
  all = {warp_sum(all.count), warp_sum(all.sum), warp_sum(all.square)};
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = all;
  __syncthreads();
  if (threadIdx.x == 0) {
    all = block_sum(warps);
    const double mean = all.count > 0 ? all.sum / all.count : 0.0;
    stats[0] = all.count;
    stats[1] = mean;
    const double m2 = all.square - all.sum * mean;
    stats[2] = m2 < 0 ? 0 : m2;  // NaN stays NaN
  }
}

// How much a tile holds and how many blocks share a multiprocessor.
constexpr int kTokenChunks = 4, kTokenBlocks = 3, kRowsBlocks = 3;
constexpr int kTurnChunks = 2, kTurnBlocks = 3;
constexpr std::int64_t kTokenTile = kThreads * 4 * kTokenChunks, kTurnTile = kThreads * 4 * kTurnChunks;

// On an H200 gae_rows_kernel takes 6.8 us and 20.2 ns a tile of its own, gae_kernel 11.4 us and 17.8 ns a tile, for it
// loads ahead and leaves no part of a tile empty: the first is ahead by what 228 of its tiles take.
constexpr std::int64_t kHeadStart = 228;
constexpr double kTileRatio = 17.8 / 20.2;

std::int64_t tiles_of(std::int64_t tokens, bool turns) {
  const std::int64_t tile = turns ? kTurnTile : kTokenTile;
  return (tokens + tile - 1) / tile;
}

constexpr std::size_t kHeader = 16;  // the ticket

// What must be zero when gae_kernel starts: ticket and states.
std::size_t zeroed_bytes(std::int64_t tiles, bool turns) {
  const std::size_t state = turns ? sizeof(TileWord<TurnMap>) : sizeof(TileWord<TokenMap>);
  return kHeader + static_cast<std::size_t>(tiles) * state;
}

// Rows a tile of gae_rows_kernel, 0 where gae_kernel is the one to take. `aligned` as there.
std::int64_t rows_per_tile(const GaeArgs& args, bool aligned) {
  if (args.turn_id || args.cu_seqlens || !aligned || args.tokens % 4 != 0 || args.row_length > kTokenTile) return 0;
  const std::int64_t unit = args.row_length % 4 == 0 ? 1 : args.row_length % 2 == 0 ? 2 : 4;
  const std::int64_t rows = kTokenTile / args.row_length / unit * unit;
  if (rows == 0) return 0;
  const std::int64_t tiles = (args.rows + rows - 1) / rows;
  return tiles <= kHeadStart + kTileRatio * tiles_of(args.tokens, false) ? rows : 0;
}

template <typename Map, int kChunks, int kBlocks>
void launch_scan(const GaeArgs& args, const Work& work, const Coefficients& c, std::int64_t tiles, bool aligned,
                 std::size_t zeroed, cudaStream_t stream) {
  const auto kernel = gae_kernel<Map, kChunks, kBlocks>;
  const bool early = for_hopper("gae", reinterpret_cast<const void*>(kernel));
  const std::int64_t resident = std::int64_t(kBlocks) * multiprocessors("gae"), words = zeroed / 8;
  auto* const first = reinterpret_cast<unsigned long long*>(work.ticket);
  launch("gae", clear_kernel, (words + kThreads - 1) / kThreads, kThreads, 0, stream, false, first, words);
  launch("gae", kernel, tiles < resident ? tiles : resident, kThreads, 0, stream, early, args, work, c, tiles, aligned);
  launch("gae", stats_kernel, 1, kThreads, 0, stream, early, work.partials, tiles, args.stats);
}

void launch_rows(const GaeArgs& args, std::int64_t rows, Partial* partials, const Coefficients& c,
                 cudaStream_t stream) {
  const auto kernel = gae_rows_kernel<kTokenChunks, kRowsBlocks>;
  const bool early = for_hopper("gae", reinterpret_cast<const void*>(kernel));
  const std::int64_t tiles = (args.rows + rows - 1) / rows;
  const std::int64_t resident = std::int64_t(kRowsBlocks) * multiprocessors("gae");
  const std::int64_t blocks = tiles < resident ? tiles : resident;
  launch("gae", kernel, blocks, kThreads, 0, stream, false, args, partials, c, rows, tiles);
  launch("gae", stats_kernel, 1, kThreads, 0, stream, early, partials, tiles, args.stats);
}

}  // namespace

std::size_t gae_workspace(std::int64_t tokens, bool turns) {
  const std::int64_t tiles = tiles_of(tokens, turns);
  return zeroed_bytes(tiles, turns) + static_cast<std::size_t>(tiles + kHeadStart) * sizeof(Partial);
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
  const auto f = [](double x) { return static_cast<float>(x); };
  const Coefficients c{f(args.gamma), f(args.gamma * args.lam), f(args.gamma * (1 - args.lam)),
                       f(args.token_gamma * args.token_lam), f(args.token_gamma * (1 - args.token_lam))};
  std::uintptr_t bits = 0;
  for (const void* p : {static_cast<const void*>(args.rewards), static_cast<const void*>(args.values),
                        static_cast<const void*>(args.mask), static_cast<const void*>(args.turn_id),
                        static_cast<const void*>(args.advantages), static_cast<const void*>(args.returns)}) {
    bits |= reinterpret_cast<std::uintptr_t>(p);
  }
  const bool aligned = bits % 16 == 0;
  char* const memory = static_cast<char*>(workspace);
  const std::size_t zeroed = zeroed_bytes(tiles, turns);
  const Work work{reinterpret_cast<unsigned*>(memory), memory + kHeader, reinterpret_cast<Partial*>(memory + zeroed)};
  if (const std::int64_t rows = rows_per_tile(args, aligned)) {
    launch_rows(args, rows, work.partials, c, stream);
  } else if (turns) {
    launch_scan<TurnMap, kTurnChunks, kTurnBlocks>(args, work, c, tiles, aligned, zeroed, stream);
  } else {
    launch_scan<TokenMap, kTokenChunks, kTokenBlocks>(args, work, c, tiles, aligned, zeroed, stream);
  }
}

}  // namespace manus_fast::cuda

// Generalised advantage estimation on the GPU in one pass: every input is read once, every output written once.
//
// With x = gamma V(next) + gamma lam A(next), what a token adds to its own reward, the advantage is r - v + x and the
// token before it sees the affine map x -> gamma lam x + (gamma lam r + gamma (1 - lam) v); a masked token is the
// identity, and the last token of a row replaces x by gamma * bootstrap. Composition of such maps is associative, so the
// whole array is one scan from the right, whatever the rows: a tile of tokens a block, four neighbours a thread and
// load, suffix scans in registers and over warps, and between tiles the decoupled look-back of Merrill and Garland
// (2016). A tile in which a row ends needs nothing from the right to say what leaves it on the left, so short rows never
// wait. At turn level the state is two numbers (see TurnMap) and the scan the same.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "ops/ops.h"

namespace manus_fast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffffu;

// x -> m x + b
struct TokenMap {
  static constexpr int kWords = 2;
  using State = float;
  float m = 1.0f, b = 0.0f;

  __device__ float apply(float x) const { return fmaf(m, x, b); }
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

  __device__ float2 apply(float2 z) const { return {fmaf(p, z.x, fmaf(q, z.y, s)), fmaf(u, z.y, w)}; }
  __device__ bool constant() const { return p == 0.0f && q == 0.0f && u == 0.0f; }
  __device__ static TurnMap always(float2 z) { return {0.0f, 0.0f, z.x, 0.0f, z.y}; }
  __device__ static float2 start(float x) { return {0.0f, x}; }
  __device__ float* words() { return &p; }
  __device__ const float* words() const { return &p; }
};

// left after right
__device__ TokenMap compose(const TokenMap& left, const TokenMap& right) {
  return {left.m * right.m, fmaf(left.m, right.b, left.b)};
}
__device__ TurnMap compose(const TurnMap& left, const TurnMap& right) {
  return {left.p * right.p, fmaf(left.p, right.q, left.q * right.u),
          fmaf(left.p, right.s, fmaf(left.q, right.w, left.s)), left.u * right.u, fmaf(left.u, right.w, left.w)};
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
    if (!cu_seqlens) return position / row_length;
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

struct Partial {
  double count, sum, square;
};

struct Work {
  unsigned* tickets;      // [2]: tiles handed out, tiles done
  void* states;           // [tiles] TileWord
  Partial* partials;      // [tiles]
};

struct Coefficients {
  float gamma, decay, rest;                    // gamma, gamma lam, gamma (1 - lam)
  float token_gamma, token_decay, token_rest;  // inside a turn
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

// Turn of the next token in the mask, as a scan: transparent where a token is not in the mask, no turn where a row ends.
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

// The block's sum in thread 0, in a fixed order.
__device__ Partial block_sum(Partial mine, Partial* scratch, int lane, int warp) {
  mine = {warp_sum(mine.count), warp_sum(mine.sum), warp_sum(mine.square)};
  if (lane == 0) scratch[warp] = mine;
  __syncthreads();
  Partial total{0, 0, 0};
  if (threadIdx.x == 0) {
    for (int w = 0; w < kWarps; ++w) {
      total.count += scratch[w].count;
      total.sum += scratch[w].sum;
      total.square += scratch[w].square;
    }
  }
  return total;
}

// Chunk: the 128 tokens that a warp reads with one load, four neighbours a lane.
template <typename Map, int kChunks, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) gae_kernel(GaeArgs args, Work work, Coefficients c, std::int64_t tiles,
                                                       bool aligned) {
  using State = typename Map::State;
  constexpr bool kTurns = Map::kWords > 2;
  constexpr int kTile = kThreads * 4 * kChunks;
  __shared__ unsigned row_end[kTile / 32];  // bit: a row ends at this token
  __shared__ float row_start_x[kTile];      // where one does: gamma * bootstrap
  __shared__ float warp_map[kWarps][Map::kWords];
  __shared__ int warp_turn[kWarps];
  __shared__ int outer_turn;
  __shared__ float outer_state[2];
  __shared__ Partial warp_partial[kWarps];
  __shared__ unsigned ticket;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // In order of arrival, from the right: a tile only ever waits for tiles that already run.
  if (threadIdx.x == 0) ticket = atomicAdd(&work.tickets[0], 1u);
  for (int i = threadIdx.x; i < kTile / 32; i += kThreads) row_end[i] = 0;
  __syncthreads();
  const std::int64_t tile = tiles - 1 - static_cast<std::int64_t>(ticket);
  const std::int64_t tile_start = tile * kTile, tile_end = tile_start + kTile;
  TileWord<Map>* states = static_cast<TileWord<Map>*>(work.states);

  float r[kChunks][4], v[kChunks][4];
  int turn[kTurns ? kChunks : 1][4];
  unsigned mask = 0;  // bit 4 chunk + i
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const std::int64_t at = tile_start + (warp * kChunks + k) * 128 + lane * 4;
    if (aligned && at + 4 <= args.tokens) {
      const float4 r4 = __ldcs(reinterpret_cast<const float4*>(args.rewards + at));
      const float4 v4 = __ldcs(reinterpret_cast<const float4*>(args.values + at));
      const uchar4 m4 = __ldcs(reinterpret_cast<const uchar4*>(args.mask + at));
      r[k][0] = r4.x, r[k][1] = r4.y, r[k][2] = r4.z, r[k][3] = r4.w;
      v[k][0] = v4.x, v[k][1] = v4.y, v[k][2] = v4.z, v[k][3] = v4.w;
      mask |= (unsigned(m4.x != 0) | unsigned(m4.y != 0) << 1 | unsigned(m4.z != 0) << 2 | unsigned(m4.w != 0) << 3)
              << (4 * k);
      if constexpr (kTurns) {
        const int4 t4 = __ldcs(reinterpret_cast<const int4*>(args.turn_id + at));
        turn[k][0] = t4.x, turn[k][1] = t4.y, turn[k][2] = t4.z, turn[k][3] = t4.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool here = at + i < args.tokens;
        r[k][i] = here ? args.rewards[at + i] : 0.0f;
        v[k][i] = here ? args.values[at + i] : 0.0f;
        mask |= unsigned(here && args.mask[at + i] != 0) << (4 * k + i);
        if constexpr (kTurns) turn[k][i] = here ? args.turn_id[at + i] : 0;
      }
    }
  }

  // The rows that end in this tile.
  const Rows rows{args.cu_seqlens, args.rows, args.row_length};
  const std::int64_t first_row = rows.find(tile_start, lane);
  for (std::int64_t row = first_row + threadIdx.x; row < args.rows; row += kThreads) {
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
  unsigned ends = 0;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int at = (warp * kChunks + k) * 128 + lane * 4;
    ends |= (row_end[at / 32] >> (at % 32) & 15u) << (4 * k);
  }

  // Which tokens are the last of their turn: the next one in the mask of the same row has another turn, or is not.
  unsigned last = 0;
  if constexpr (kTurns) {
    if (warp == 0) {
      int next = kNoTurn;
      if (!closed) next = first_turn(args, tile_end, rows.end(rows.find(last_token, lane)), lane);
      if (lane == 0) outer_turn = next;
    }
    int right_lanes[kChunks], total[kChunks], whole = kTransparent;
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
      total[k] = __shfl_sync(kAll, id, 0);
      whole = over(whole, total[k]);
    }
    if (lane == 0) warp_turn[warp] = whole;
    __syncthreads();
    int next = outer_turn;
    for (int w = kWarps - 1; w > warp; --w) next = over(warp_turn[w], next);
#pragma unroll
    for (int k = kChunks - 1; k >= 0; --k) {
      int of_token = over(right_lanes[k], next);
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        if (ends >> (4 * k + i) & 1u) of_token = kNoTurn;
        if (mask >> (4 * k + i) & 1u) {
          last |= unsigned(turn[k][i] != of_token) << (4 * k + i);
          of_token = turn[k][i];
        }
      }
      next = over(total[k], next);
    }
  }

  // Scan: this lane's four tokens, what is right of the lane in its chunk, the chunks, the warps.
  Map right_lanes[kChunks], total[kChunks], whole;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    Map map;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const unsigned bit = 1u << (4 * k + i);
      if (ends & bit) map = Map::always(Map::start(row_start_x[(warp * kChunks + k) * 128 + lane * 4 + i]));
      if (mask & bit) {
        Map own;
        token_map(own, r[k][i], v[k][i], last & bit, c);
        map = compose(own, map);
      }
    }
    map = suffix_scan(map, lane);
    right_lanes[k] = shuffle_down(map, 1);
    if (lane == 31) right_lanes[k] = Map{};
    total[k] = shuffle(map, 0);
  }
#pragma unroll
  for (int k = kChunks - 1; k >= 0; --k) whole = compose(total[k], whole);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < Map::kWords; ++i) warp_map[warp][i] = whole.words()[i];
  }
  __syncthreads();
  const auto map_of_warp = [&](int w) {
    Map map;
#pragma unroll
    for (int i = 0; i < Map::kWords; ++i) map.words()[i] = warp_map[w][i];
    return map;
  };
  if (warp == 0) {
    Map block;
    for (int w = kWarps - 1; w >= 0; --w) block = compose(map_of_warp(w), block);
    if (lane == 0) publish(&states[tile], block);
    State outer = Map::start(0.0f);
    if (!closed) outer = look_back(states, tile, tiles, lane).apply(outer);
    if (lane == 0) *reinterpret_cast<State*>(outer_state) = outer;
  }
  __syncthreads();

  State state = *reinterpret_cast<const State*>(outer_state);
  for (int w = kWarps - 1; w > warp; --w) state = map_of_warp(w).apply(state);
  Partial mine{double(__popc(mask)), 0, 0};
#pragma unroll
  for (int k = kChunks - 1; k >= 0; --k) {
    State x = right_lanes[k].apply(state);
    state = total[k].apply(state);
    float a[4], g[4];
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const unsigned bit = 1u << (4 * k + i);
      if (ends & bit) x = Map::start(row_start_x[(warp * kChunks + k) * 128 + lane * 4 + i]);
      a[i] = g[i] = 0.0f;
      if (mask & bit) {
        const float added = seen_by(x, last & bit);
        a[i] = r[k][i] - v[k][i] + added;
        g[i] = r[k][i] + added;
        Map own;
        token_map(own, r[k][i], v[k][i], last & bit, c);
        x = own.apply(x);
      }
      mine.sum += a[i];
      mine.square += double(a[i]) * a[i];
    }
    const std::int64_t at = tile_start + (warp * kChunks + k) * 128 + lane * 4;
    if (aligned && at + 4 <= args.tokens) {
      __stcs(reinterpret_cast<float4*>(args.advantages + at), make_float4(a[0], a[1], a[2], a[3]));
      __stcs(reinterpret_cast<float4*>(args.returns + at), make_float4(g[0], g[1], g[2], g[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at + i < args.tokens) args.advantages[at + i] = a[i], args.returns[at + i] = g[i];
      }
    }
  }

  // Statistics: a partial a tile, added in the order of the tiles by the block that finishes last.
  const Partial block = block_sum(mine, warp_partial, lane, warp);
  if (threadIdx.x == 0) {
    work.partials[tile] = block;
    __threadfence();
    ticket = atomicAdd(&work.tickets[1], 1u);
  }
  __syncthreads();
  if (ticket != static_cast<unsigned>(tiles - 1)) return;
  __threadfence();
  Partial sum{0, 0, 0};
  for (std::int64_t t = threadIdx.x; t < tiles; t += kThreads) {
    const Partial part{__ldcg(&work.partials[t].count), __ldcg(&work.partials[t].sum), __ldcg(&work.partials[t].square)};
    sum.count += part.count;
    sum.sum += part.sum;
    sum.square += part.square;
  }
  const Partial all = block_sum(sum, warp_partial, lane, warp);
  if (threadIdx.x == 0) {
    const double mean = all.count > 0 ? all.sum / all.count : 0.0;
    args.stats[0] = all.count;
    args.stats[1] = mean;
    args.stats[2] = fmax(0.0, all.square - all.sum * mean);
  }
}

constexpr int kTokenChunks = 2, kTurnChunks = 2;

std::int64_t tiles_of(std::int64_t tokens, int chunks) { return (tokens + kThreads * 4 * chunks - 1) / (kThreads * 4 * chunks); }

std::size_t state_bytes(std::int64_t tiles, bool turns) {
  return static_cast<std::size_t>(tiles) * (turns ? sizeof(TileWord<TurnMap>) : sizeof(TileWord<TokenMap>));
}

constexpr std::size_t kHeader = 16;  // the two tickets

}  // namespace

std::size_t gae_workspace(std::int64_t tokens, bool turns) {
  const std::int64_t tiles = tiles_of(tokens, turns ? kTurnChunks : kTokenChunks);
  return kHeader + state_bytes(tiles, turns) + static_cast<std::size_t>(tiles) * sizeof(Partial);
}

void gae(const GaeArgs& args, void* workspace, Stream on) {
  const auto stream = static_cast<cudaStream_t>(on.handle);
  const bool turns = args.turn_id != nullptr;
  if (args.tokens == 0) {
    MF_CUDA_CHECK("gae", cudaMemsetAsync(args.stats, 0, 3 * sizeof(double), stream));
    return;
  }
  const std::int64_t tiles = tiles_of(args.tokens, turns ? kTurnChunks : kTokenChunks);
  MF_CHECK(tiles < (std::int64_t(1) << 31), "tokens: expected fewer than 2^43, got ", args.tokens);
  char* memory = static_cast<char*>(workspace);
  const std::size_t zeroed = kHeader + state_bytes(tiles, turns);
  MF_CUDA_CHECK("gae", cudaMemsetAsync(memory, 0, zeroed, stream));
  const Work work{reinterpret_cast<unsigned*>(memory), memory + kHeader, reinterpret_cast<Partial*>(memory + zeroed)};
  const auto f = [](double x) { return static_cast<float>(x); };
  const Coefficients c{f(args.gamma),       f(args.gamma * args.lam),
                       f(args.gamma * (1 - args.lam)), f(args.token_gamma),
                       f(args.token_gamma * args.token_lam), f(args.token_gamma * (1 - args.token_lam))};
  const auto address = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  const bool aligned = (address(args.rewards) | address(args.values) | address(args.advantages) |
                        address(args.returns) | address(args.turn_id)) % 16 == 0 && address(args.mask) % 4 == 0;
  if (turns) {
    gae_kernel<TurnMap, kTurnChunks, 3><<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(args, work, c, tiles, aligned);
  } else {
    gae_kernel<TokenMap, kTokenChunks, 5><<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(args, work, c, tiles, aligned);
  }
  MF_CUDA_CHECK("gae", cudaGetLastError());
}

}  // namespace manus_fast::cuda

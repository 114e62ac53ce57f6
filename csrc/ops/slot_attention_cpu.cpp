// Attention of one new token per slot over the slot's cached keys and values, on the CPU: memory-bound, so keys and
// values are read once each, only as far as the slot is filled, and shared by the query heads of a group.
//
// Scores of as many tokens as a vector has lanes come out of one vector: their partial products are folded pairwise, which
// costs three operations a token where a horizontal sum each costs twelve.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "ops/ops.h"
#include "ops/vectors.h"

namespace manus_fast::cpu {
namespace {

// Adds lanes W apart within a and within b; blocks of W of the two results alternate.
template <int W>
MF_INLINE Floats fold(Floats a, Floats b) {
  Ints left{}, right{};
  for (int i = 0; i < kLanes; ++i) {
    const int block = i / W;
    left[i] = (block % 2) * kLanes + (block / 2) * 2 * W + i % W;
    right[i] = left[i] + W;
  }
  return __builtin_shuffle(a, b, left) + __builtin_shuffle(a, b, right);
}

// Lane t of the result is the sum over the lanes of v[t]; v, of 2 W vectors, is overwritten.
template <int W = kLanes / 2>
MF_INLINE Floats sums(Floats* v) {
  for (int i = 0; i < W; ++i) v[i] = fold<W>(v[i], v[i + W]);
  if constexpr (W > 1) return sums<W / 2>(v);
  return v[0];
}

inline float total(Floats v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// G query heads that share one key head. C: vectors in a head (dim / 16), 0 when it is only known at run time.
template <int C, int G>
void attend(const float* query, const float* keys, const float* values, std::int64_t tokens, std::int64_t dim,
            float scale, float* scores, float* output) {
  const int chunks = C ? C : int(dim / kLanes);
  constexpr int kMost = C ? C : kMaxHeadDim / kLanes;
  const std::int64_t stride = (tokens + kLanes - 1) / kLanes * kLanes;
  Floats q[G][kMost];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < chunks; ++c) q[g][c] = load(query + g * dim + c * kLanes, kLanes) * scale;

  float most[G];
  std::fill(most, most + G, -INFINITY);
  for (std::int64_t t = 0; t < stride; t += kLanes) {
    Floats part[G][kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const float* key = keys + std::min(t + j, tokens - 1) * dim;
      for (int g = 0; g < G; ++g) part[g][j] = q[g][0] * load(key, kLanes);
      for (int c = 1; c < chunks; ++c) {
        const Floats k = load(key + c * kLanes, kLanes);
        for (int g = 0; g < G; ++g) part[g][j] += q[g][c] * k;
      }
    }
    for (int g = 0; g < G; ++g) store(scores + g * stride + t, sums(part[g]), kLanes);
  }
  float inverse[G];
  for (int g = 0; g < G; ++g) {
    float* s = scores + g * stride;
    for (std::int64_t t = 0; t < tokens; ++t) most[g] = std::max(most[g], s[t]);
    for (std::int64_t t = tokens; t < stride; ++t) s[t] = -INFINITY;
    Floats sum{};
    for (std::int64_t t = 0; t < stride; t += kLanes) {
      const Floats e = exp_below_zero(load(s + t, kLanes) - most[g]);
      store(s + t, e, kLanes);
      sum += e;
    }
    inverse[g] = 1.0f / total(sum);
  }
  Floats sum[G][kMost];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < chunks; ++c) sum[g][c] = Floats{};
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* value = values + t * dim;
    for (int c = 0; c < chunks; ++c) {
      const Floats v = load(value + c * kLanes, kLanes);
      for (int g = 0; g < G; ++g) sum[g][c] += v * scores[g * stride + t];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < chunks; ++c) store(output + g * dim + c * kLanes, sum[g][c] * inverse[g], kLanes);
}

template <int C>
void attend_group(const SlotAttentionArgs& args, const float* query, const float* keys, const float* values,
                  std::int64_t tokens, float* scores, float* output) {
  for (std::int64_t g = 0; g < args.group;) {
    const float* q = query + g * args.dim;
    float* o = output + g * args.dim;
    const std::int64_t left = args.group - g;
    if (left >= 4) {
      attend<C, 4>(q, keys, values, tokens, args.dim, args.scale, scores, o);
      g += 4;
    } else if (left >= 2) {
      attend<C, 2>(q, keys, values, tokens, args.dim, args.scale, scores, o);
      g += 2;
    } else {
      attend<C, 1>(q, keys, values, tokens, args.dim, args.scale, scores, o);
      g += 1;
    }
  }
}

}  // namespace

void slot_attention(const SlotAttentionArgs& args) {
  const std::int64_t stride = args.length * args.dim;
  // A chunk of at least 8 heads: less is not worth another thread.
  parallel_for(args.n * args.heads, 8, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scores(4 * (args.length + kLanes));
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = (args.slots[i / args.heads] * args.heads + i % args.heads) * stride;
      const std::int64_t tokens = args.lengths[i / args.heads];
      const float* query = args.query + i * args.group * args.dim;
      float* output = args.output + i * args.group * args.dim;
      const auto attend_heads = [&](auto attend_group_of) {
        attend_group_of(args, query, args.keys + at, args.values + at, tokens, scores.data(), output);
      };
      switch (args.dim) {
        case 32: attend_heads(attend_group<32 / kLanes>); break;
        case 64: attend_heads(attend_group<64 / kLanes>); break;
        default: attend_heads(attend_group<0>);
      }
    }
  });
}

}  // namespace manus_fast::cpu

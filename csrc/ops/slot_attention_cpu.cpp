// Attention of one new token per slot over the slot's cached keys and values, on the CPU: memory-bound, so keys and
// values are read once each, only as far as the slot is filled, and shared by the query heads of a group.
//
// Scores of 16 tokens come out of one vector: the 16 partial products are folded pairwise, which costs three
// operations a token where a horizontal sum each costs twelve.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "ops/ops.h"

namespace manus_fast::cpu {
namespace {

constexpr int kLanes = 16;
// Vector extensions of GCC and Clang: lowered to whatever the machine has.
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t IntLanes __attribute__((vector_size(4 * kLanes)));

inline Lanes load(const float* from) {
  Lanes v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

inline void store(float* to, Lanes v) { std::memcpy(to, &v, sizeof(v)); }

// exp for x <= 0, relative error below 2e-7: x = n ln 2 + f, a polynomial for e^f (Cephes' coefficients), 2^n by bits.
inline Lanes exp_lanes(Lanes x) {
  const Lanes low = Lanes{} - 87.0f;
  x = x < low ? low : x;
  const Lanes shift = Lanes{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Lanes n = (x * 1.44269504f + shift) - shift;
  const Lanes f = x - n * 0.693359375f - n * -2.12194440e-4f;
  Lanes p = Lanes{} + 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  const IntLanes bits = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  Lanes power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

// Adds lanes W apart within a and within b; blocks of W of the two results alternate.
template <int W>
inline Lanes fold(Lanes a, Lanes b) {
  IntLanes left{}, right{};
  for (int i = 0; i < kLanes; ++i) {
    const int block = i / W;
    left[i] = (block % 2) * kLanes + (block / 2) * 2 * W + i % W;
    right[i] = left[i] + W;
  }
  return __builtin_shuffle(a, b, left) + __builtin_shuffle(a, b, right);
}

// Lane t of the result is the sum over the lanes of v[t].
inline Lanes sums(const Lanes* v) {
  Lanes a[8], b[4];
  for (int i = 0; i < 8; ++i) a[i] = fold<8>(v[i], v[i + 8]);
  for (int i = 0; i < 4; ++i) b[i] = fold<4>(a[i], a[i + 4]);
  return fold<1>(fold<2>(b[0], b[2]), fold<2>(b[1], b[3]));
}

inline float total(Lanes v) {
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
  Lanes q[G][kMost];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < chunks; ++c) q[g][c] = load(query + g * dim + c * kLanes) * scale;

  float most[G];
  std::fill(most, most + G, -INFINITY);
  for (std::int64_t t = 0; t < stride; t += kLanes) {
    Lanes part[G][kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const float* key = keys + std::min(t + j, tokens - 1) * dim;
      for (int g = 0; g < G; ++g) part[g][j] = q[g][0] * load(key);
      for (int c = 1; c < chunks; ++c) {
        const Lanes k = load(key + c * kLanes);
        for (int g = 0; g < G; ++g) part[g][j] += q[g][c] * k;
      }
    }
    for (int g = 0; g < G; ++g) store(scores + g * stride + t, sums(part[g]));
  }
  float inverse[G];
  for (int g = 0; g < G; ++g) {
    float* s = scores + g * stride;
    for (std::int64_t t = 0; t < tokens; ++t) most[g] = std::max(most[g], s[t]);
    for (std::int64_t t = tokens; t < stride; ++t) s[t] = -INFINITY;
    Lanes sum{};
    for (std::int64_t t = 0; t < stride; t += kLanes) {
      const Lanes e = exp_lanes(load(s + t) - most[g]);
      store(s + t, e);
      sum += e;
    }
    float extra = 0;  // what the padded lanes added: e^-87 each
    for (std::int64_t t = tokens; t < stride; ++t) extra += s[t];
    inverse[g] = 1.0f / (total(sum) - extra);
  }
  Lanes sum[G][kMost];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < chunks; ++c) sum[g][c] = Lanes{};
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* value = values + t * dim;
    for (int c = 0; c < chunks; ++c) {
      const Lanes v = load(value + c * kLanes);
      for (int g = 0; g < G; ++g) sum[g][c] += v * scores[g * stride + t];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < chunks; ++c) store(output + g * dim + c * kLanes, sum[g][c] * inverse[g]);
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
      switch (args.dim) {
        case 32: attend_group<2>(args, query, args.keys + at, args.values + at, tokens, scores.data(), output); break;
        case 64: attend_group<4>(args, query, args.keys + at, args.values + at, tokens, scores.data(), output); break;
        default: attend_group<0>(args, query, args.keys + at, args.values + at, tokens, scores.data(), output);
      }
    }
  });
}

}  // namespace manus_fast::cpu

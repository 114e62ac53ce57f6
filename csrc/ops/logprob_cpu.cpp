// Log-probability of a target and entropy of rows of logits, and their gradient, on the CPU.
//
// For y = (z - top) / T and L = log sum e^y:  log-prob = y_t - L,  entropy = L - sum e^y y / sum e^y,  and with upstream
// gradients g and h:  d/dz_j = [g (1{j = t} - p_j) - h p_j (log p_j + entropy)] / T. A row is read once forward, a chunk at
// a time, with the sums so far scaled to a new largest logit when a chunk brings one, and once backward; sums are kept in
// the number's own type for a chunk, then in double.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "common/parallel.h"
#include "ops/ops.h"
#include "ops/vectors.h"

namespace manus_fast::cpu {
namespace {

constexpr std::int64_t kChunk = 512;
constexpr std::int64_t kGrain = 16384;  // logits that are worth a thread
constexpr float kImpossible = -1e4f;    // stands for a log-probability of -inf: times a probability of 0 it is 0

struct Totals {
  double total = 0, weighted = 0;  // of e^y, and where the entropy is asked for of e^y y
};

double number(double x) { return x; }
float number(float x) { return x; }

float number(BFloat16 x) {
  const std::uint32_t bits = std::uint32_t{x.bits} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

// NaN counts as nothing: it is met again in the sums.
template <typename Logit>
float largest(const Logit* z, std::int64_t n) {
  const Floats lowest = splat(-std::numeric_limits<float>::infinity());
  Floats even = lowest, odd = lowest;
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even = max(load(z + i, kLanes), even);
    odd = max(load(z + i + kLanes, kLanes), odd);
  }
  even = max(even, odd);
  float out = even[0];
  for (int k = 1; k < kLanes; ++k) out = std::max(out, static_cast<float>(even[k]));
  for (; i < n; ++i) out = std::max(out, number(z[i]));
  return out;
}

double largest(const double* z, std::int64_t n) {
  double out = -std::numeric_limits<double>::infinity();
  for (std::int64_t i = 0; i < n; ++i) out = std::max(out, z[i]);
  return out;
}

// Up to kChunk logits.
template <bool kWeighted, typename Logit>
Totals totals(const Logit* z, std::int64_t n, float shift, float scale) {
  struct Sums {
    Floats total{}, weighted{};
    MF_INLINE void add(Floats y) {
      const Floats e = exp_below_zero(y);
      total += e;
      if (kWeighted) weighted += e * max(y, splat(kImpossible));
    }
  };
  Sums even, odd;
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even.add((load(z + i, kLanes) - shift) * scale);
    odd.add((load(z + i + kLanes, kLanes) - shift) * scale);
  }
  for (; i < n; i += kLanes) {
    const int m = static_cast<int>(std::min<std::int64_t>(kLanes, n - i));
    Floats y = (load(z + i, m) - shift) * scale;
    for (int k = m; k < kLanes; ++k) y[k] = -std::numeric_limits<float>::infinity();
    even.add(y);
  }
  even.total += odd.total, even.weighted += odd.weighted;
  Totals out;
  for (int k = 0; k < kLanes; ++k) out.total += even.total[k], out.weighted += even.weighted[k];
  return out;
}

template <bool kWeighted>
Totals totals(const double* z, std::int64_t n, double shift, double scale) {
  Totals out;
  for (std::int64_t i = 0; i < n; ++i) {
    const double y = (z[i] - shift) * scale, e = std::exp(y);
    out.total += e;
    if (kWeighted) out.weighted += e * std::max<double>(y, kImpossible);
  }
  return out;
}

// Sums over a row and its largest logit; all logits -inf: the largest is that, and y is taken from 0.
template <bool kWeighted, typename Number, typename Logit>
Totals row_totals(const Logit* z, std::int64_t vocabulary, Number scale, Number* top) {
  constexpr Number kLowest = -std::numeric_limits<Number>::infinity();
  Totals sum;
  *top = kLowest;
  for (std::int64_t i = 0; i < vocabulary; i += kChunk) {
    const std::int64_t n = std::min(kChunk, vocabulary - i);
    const Number before = *top;
    *top = std::max(before, Number(largest(z + i, n)));
    if (before < *top && before != kLowest) {
      const double y = (double(before) - double(*top)) * double(scale), e = std::exp(y);
      sum.weighted = e * (sum.weighted + sum.total * std::max<double>(y, kImpossible));
      sum.total *= e;
    }
    const Totals part = totals<kWeighted>(z + i, n, *top == kLowest ? Number(0) : *top, scale);
    sum.total += part.total, sum.weighted += part.weighted;
  }
  return sum;
}

// The gradient but for the target's own part: factor and slope of -p (factor + slope (log p + entropy)).
template <bool kSloped, typename Logit, typename Out>
void row_gradient(const Logit* z, std::int64_t n, float top, float log_total, float scale, float factor, float slope,
                  float entropy, Out* to) {
  const auto some = [&](std::int64_t i, int m) __attribute__((always_inline)) {
    const Floats log_p = (load(z + i, m) - top) * scale - log_total;
    // Rounding may leave a log-probability just above 0.
    const Floats p = exp_below_zero(min(Floats{}, log_p));
    const Floats inner = kSloped ? factor + slope * (max(log_p, splat(kImpossible)) + entropy) : splat(factor);
    store(to + i, -p * inner, m);
  };
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) some(i, kLanes);
  if (i < n) some(i, static_cast<int>(n - i));
}

template <bool kSloped>
void row_gradient(const double* z, std::int64_t n, double top, double log_total, double scale, double factor,
                  double slope, double entropy, double* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double log_p = (z[i] - top) * scale - log_total;
    const double inner = kSloped ? factor + slope * (std::max<double>(log_p, kImpossible) + entropy) : factor;
    to[i] = -std::exp(log_p) * inner;
  }
}

void put(double* to, double x) { *to = x; }
void put(float* to, float x) { *to = x; }
void put(BFloat16* to, float x) { store(to, splat(x), 1); }

template <typename Logit, typename Number>
Number scale_of(const LogitRows<Logit, Number>& args, std::int64_t row) {
  return 1 / (args.temperature ? args.temperature[row] : args.one_temperature);
}

template <typename Logit, typename Number>
void over_rows(const LogitRows<Logit, Number>& args, const std::function<void(std::int64_t)>& of_row) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, args.vocabulary));
  parallel_for(args.rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) of_row(row);
  });
}

template <bool kSloped, typename Logit, typename Number>
void gradient_of_row(const LogitRows<Logit, Number>& args, std::int64_t row) {
  Logit* const to = args.gradient + row * args.gradient_stride;
  if (args.target[row] < 0) {
    std::fill(to, to + args.vocabulary, Logit{});
    return;
  }
  const Logit* const z = args.logits + row * args.stride;
  const Number scale = scale_of(args, row), g = args.grad_log_prob[row] * scale;
  const Number h = kSloped ? args.grad_entropy[row] * scale : 0, entropy = kSloped ? args.entropy[row] : 0;
  const auto write = [&](const Logit* from, std::int64_t n, auto* into) {
    row_gradient<kSloped>(from, n, args.top[row], args.log_total[row], scale, g, h, entropy, into);
  };
  // The target's own, rounded once; before the others, for they may lie where the logits do.
  Number own;
  write(z + args.target[row], 1, &own);
  write(z, args.vocabulary, to);
  put(to + args.target[row], own + g);
}

}  // namespace

template <typename Logit, typename Number>
void logprob_statistics(const LogitRows<Logit, Number>& args) {
  over_rows(args, [&](std::int64_t row) {
    const Logit* const z = args.logits + row * args.stride;
    if (args.target[row] < 0) {
      args.log_prob[row] = args.top[row] = args.log_total[row] = 0;
      if (args.entropy) args.entropy[row] = 0;
      return;
    }
    const Number scale = scale_of(args, row);
    Number* const top = args.top + row;
    const Totals sum = args.entropy ? row_totals<true>(z, args.vocabulary, scale, top)
                                    : row_totals<false>(z, args.vocabulary, scale, top);
    const double log_total = std::log(sum.total);
    const Number shift = *top == -std::numeric_limits<Number>::infinity() ? 0 : *top;
    args.log_total[row] = static_cast<Number>(log_total);
    args.log_prob[row] = static_cast<Number>((number(z[args.target[row]]) - shift) * scale - log_total);
    if (args.entropy) args.entropy[row] = static_cast<Number>(log_total - sum.weighted / sum.total);
  });
}

template <typename Logit, typename Number>
void logprob_gradient(const LogitRows<Logit, Number>& args) {
  over_rows(args, [&](std::int64_t row) {
    if (args.grad_entropy) {
      gradient_of_row<true>(args, row);
    } else {
      gradient_of_row<false>(args, row);
    }
  });
}

template void logprob_statistics(const LogitRows<float, float>&);
template void logprob_statistics(const LogitRows<double, double>&);
template void logprob_statistics(const LogitRows<BFloat16, float>&);
template void logprob_gradient(const LogitRows<float, float>&);
template void logprob_gradient(const LogitRows<double, double>&);
template void logprob_gradient(const LogitRows<BFloat16, float>&);

}  // namespace manus_fast::cpu

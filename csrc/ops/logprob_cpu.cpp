// Log-probability of a target and entropy of rows of logits, and their gradient, on the CPU.
//
// For y = (z - top) / T and L = log sum e^y:  log-prob = y_t - L,  entropy = L - sum e^y y / sum e^y,  and with upstream
// gradients g and h:  d/dz_j = [g (1{j = t} - p_j) - h p_j (log p_j + entropy)] / T. A row is read twice forward (it is
// in the cache the second time) and once backward; sums are kept in the number's own type for a chunk, then in double.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "common/parallel.h"
#include "ops/ops.h"
#include "ops/vectors.h"

namespace manus_fast::cpu {
namespace {

constexpr std::int64_t kChunk = 512;
constexpr std::int64_t kGrain = 16384;  // logits that are worth a thread
constexpr double kImpossible = -1e4;    // stands for a log-probability of -inf: times a probability of 0 it is 0

struct Totals {
  double total = 0, weighted = 0;  // of e^y, and where the entropy is asked for of e^y y
};

float largest(const float* z, std::int64_t n) {
  Floats top = splat(-std::numeric_limits<float>::infinity());
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) top = max(load(z + i, kLanes), top);
  float out = -std::numeric_limits<float>::infinity();
  for (int k = 0; k < kLanes; ++k) out = std::max(out, static_cast<float>(top[k]));
  for (; i < n; ++i) out = std::max(out, z[i]);
  return out;
}

double largest(const double* z, std::int64_t n) { return *std::max_element(z, z + n); }

// Up to kChunk logits.
template <bool kWeighted>
Totals totals(const float* z, std::int64_t n, float shift, float scale) {
  Floats total{}, weighted{};
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const int m = static_cast<int>(std::min<std::int64_t>(kLanes, n - i));
    Floats y = (load(z + i, m) - shift) * scale;
    if (m < kLanes) {
      for (int k = m; k < kLanes; ++k) y[k] = -std::numeric_limits<float>::infinity();
    }
    const Floats e = exp_below_zero(y);
    total += e;
    if (kWeighted) weighted += e * max(y, splat(kImpossible));
  }
  Totals out;
  for (int k = 0; k < kLanes; ++k) out.total += total[k], out.weighted += weighted[k];
  return out;
}

template <bool kWeighted>
Totals totals(const double* z, std::int64_t n, double shift, double scale) {
  Totals out;
  for (std::int64_t i = 0; i < n; ++i) {
    const double y = (z[i] - shift) * scale, e = std::exp(y);
    out.total += e;
    if (kWeighted) out.weighted += e * std::max(y, kImpossible);
  }
  return out;
}

// The gradient but for the target's own part: factor and slope of -p (factor + slope (log p + entropy)).
void row_gradient(const float* z, std::int64_t n, float top, float log_total, float scale, float factor, float slope,
                  float entropy, float* to) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const int m = static_cast<int>(std::min<std::int64_t>(kLanes, n - i));
    const Floats log_p = (load(z + i, m) - top) * scale - log_total;
    // Rounding may leave a log-probability just above 0.
    const Floats p = exp_below_zero(pick(log_p > 0.0f, Floats{}, log_p));
    store(to + i, -p * (factor + slope * (max(log_p, splat(kImpossible)) + entropy)), m);
  }
}

void row_gradient(const double* z, std::int64_t n, double top, double log_total, double scale, double factor,
                  double slope, double entropy, double* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double log_p = (z[i] - top) * scale - log_total;
    to[i] = -std::exp(log_p) * (factor + slope * (std::max(log_p, kImpossible) + entropy));
  }
}

template <typename Number>
Number scale_of(const LogitRows<Number>& args, std::int64_t row) {
  return 1 / (args.temperature ? args.temperature[row] : args.one_temperature);
}

template <typename Number>
void over_rows(const LogitRows<Number>& args, const std::function<void(std::int64_t)>& of_row) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, args.vocabulary));
  parallel_for(args.rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) of_row(row);
  });
}

}  // namespace

template <typename Number>
void logprob_statistics(const LogitRows<Number>& args) {
  over_rows(args, [&](std::int64_t row) {
    const Number* const z = args.logits + row * args.stride;
    if (args.target[row] < 0) {
      args.log_prob[row] = args.top[row] = args.log_total[row] = 0;
      if (args.entropy) args.entropy[row] = 0;
      return;
    }
    const Number top = largest(z, args.vocabulary), scale = scale_of(args, row);
    const Number shift = top == -std::numeric_limits<Number>::infinity() ? 0 : top;
    Totals sum;
    for (std::int64_t i = 0; i < args.vocabulary; i += kChunk) {
      const std::int64_t n = std::min(kChunk, args.vocabulary - i);
      const Totals part = args.entropy ? totals<true>(z + i, n, shift, scale) : totals<false>(z + i, n, shift, scale);
      sum.total += part.total, sum.weighted += part.weighted;
    }
    const double log_total = std::log(sum.total);
    args.top[row] = top;
    args.log_total[row] = static_cast<Number>(log_total);
    args.log_prob[row] = static_cast<Number>((z[args.target[row]] - shift) * scale - log_total);
    if (args.entropy) args.entropy[row] = static_cast<Number>(log_total - sum.weighted / sum.total);
  });
}

template <typename Number>
void logprob_gradient(const LogitRows<Number>& args) {
  over_rows(args, [&](std::int64_t row) {
    Number* const to = args.gradient + row * args.gradient_stride;
    if (args.target[row] < 0) {
      std::fill(to, to + args.vocabulary, Number(0));
      return;
    }
    const Number scale = scale_of(args, row), g = args.grad_log_prob[row] * scale;
    const Number h = args.grad_entropy ? args.grad_entropy[row] * scale : 0;
    const Number entropy = args.grad_entropy ? args.entropy[row] : 0;
    row_gradient(args.logits + row * args.stride, args.vocabulary, args.top[row], args.log_total[row], scale, g, h,
                 entropy, to);
    to[args.target[row]] += g;
  });
}

template void logprob_statistics<float>(const LogitRows<float>&);
template void logprob_statistics<double>(const LogitRows<double>&);
template void logprob_gradient<float>(const LogitRows<float>&);
template void logprob_gradient<double>(const LogitRows<double>&);

}  // namespace manus_fast::cpu

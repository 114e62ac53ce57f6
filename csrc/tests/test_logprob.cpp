#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/ops.h"

using namespace manus_fast;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Every array ends where its last number does, so that a sanitizer sees a vector that reaches beyond.
template <typename Number>
struct Rows {
  Rows(std::int64_t rows, std::int64_t vocabulary, Number one_temperature)
      : logits(static_cast<std::size_t>(rows * vocabulary)), gradient(logits.size(), NAN), target(rows), top(rows),
        log_total(rows), entropy(rows, NAN), log_prob(rows, NAN), grad_log_prob(rows), grad_entropy(rows) {
    for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<Number>(3 * std::sin(1.7 * double(i)));
    for (std::int64_t row = 0; row < rows; ++row) {
      target[row] = (vocabulary - 1 + row) % vocabulary;  // the first row's is the last of a tail
      grad_log_prob[row] = Number(0.5) + Number(row);
      grad_entropy[row] = Number(1) - Number(0.7) * Number(row);
    }
    args.logits = logits.data();
    args.target = target.data();
    args.one_temperature = one_temperature;
    args.rows = rows;
    args.vocabulary = args.stride = args.gradient_stride = vocabulary;
    args.top = top.data();
    args.log_total = log_total.data();
    args.entropy = entropy.data();
    args.log_prob = log_prob.data();
    args.grad_log_prob = grad_log_prob.data();
    args.grad_entropy = grad_entropy.data();
    args.gradient = gradient.data();
  }

  void run() {
    cpu::logprob_statistics(args);
    cpu::logprob_gradient(args);
  }

  std::vector<Number> logits, gradient;
  std::vector<std::int64_t> target;
  std::vector<Number> top, log_total, entropy, log_prob, grad_log_prob, grad_entropy;
  LogitRows<Number> args{};
};

// The definition, in double: log-probabilities of one row.
template <typename Number>
std::vector<double> log_softmax(const Rows<Number>& rows, std::int64_t row) {
  const std::int64_t n = rows.args.vocabulary;
  std::vector<double> out(static_cast<std::size_t>(n));
  double total = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    out[j] = double(rows.logits[row * n + j]) / double(rows.args.one_temperature);
    total += std::exp(out[j]);
  }
  for (double& x : out) x -= std::log(total);
  return out;
}

template <typename Number>
void matches_the_definition(double tolerance) {
  for (const std::int64_t vocabulary : {1, 7, 15, 16, 17, 511, 512, 513, 1025}) {
    CAPTURE(vocabulary);
    Rows<Number> rows(3, vocabulary, Number(0.8));
    rows.run();
    for (std::int64_t row = 0; row < 3; ++row) {
      const std::vector<double> log_p = log_softmax(rows, row);
      double entropy = 0;
      for (const double x : log_p) entropy -= std::exp(x) * x;
      CHECK(std::abs(rows.log_prob[row] - log_p[rows.target[row]]) < tolerance);
      CHECK(std::abs(rows.entropy[row] - entropy) < tolerance);
      double worst = 0;
      for (std::int64_t j = 0; j < vocabulary; ++j) {
        const double p = std::exp(log_p[j]), hit = j == rows.target[row];
        const double want = (rows.grad_log_prob[row] * (hit - p) - rows.grad_entropy[row] * p * (log_p[j] + entropy)) /
                            double(rows.args.one_temperature);
        worst = std::max(worst, std::abs(rows.gradient[row * vocabulary + j] - want));
      }
      CHECK(worst < tolerance);
    }
  }
}

}  // namespace

TEST_CASE("log-prob, entropy and gradient match their definition for every tail of a vector and of a chunk") {
  matches_the_definition<float>(2e-5);
  matches_the_definition<double>(1e-12);
}

TEST_CASE("impossible, NaN and ignored rows") {
  constexpr std::int64_t kVocabulary = 19;
  Rows<float> rows(5, kVocabulary, 1.0f);
  for (std::int64_t j = 0; j < kVocabulary; ++j) {
    rows.logits[0 * kVocabulary + j] = j == 18 ? 2.0f : -float(kInfinity);  // certain: the target of row 0
    rows.logits[1 * kVocabulary + j] = j == 0 ? -float(kInfinity) : 1e30f;  // the target cannot be
    rows.logits[2 * kVocabulary + j] = -float(kInfinity);                   // nothing can be
    rows.logits[4 * kVocabulary + j] = NAN;
  }
  rows.logits[3 * kVocabulary + 17] = NAN;  // in the tail
  rows.target[4] = -7;
  rows.run();
  CHECK(rows.log_prob[0] == 0.0f);
  CHECK(rows.entropy[0] == 0.0f);
  CHECK(rows.log_prob[1] == -float(kInfinity));
  CHECK(rows.entropy[1] == doctest::Approx(std::log(18.0)));
  CHECK(rows.gradient[kVocabulary] == rows.grad_log_prob[1]);
  for (const int row : {2, 3}) {
    CHECK(std::isnan(rows.log_prob[row]));
    CHECK(std::isnan(rows.entropy[row]));
    CHECK(std::isnan(rows.gradient[row * kVocabulary + 18]));
  }
  CHECK(rows.log_prob[4] == 0.0f);
  CHECK(rows.entropy[4] == 0.0f);
  for (std::int64_t j = 0; j < kVocabulary; ++j) CHECK(rows.gradient[4 * kVocabulary + j] == 0.0f);
}

TEST_CASE("the gradient may be written over the logits, and rows may lie apart") {
  constexpr std::int64_t kVocabulary = 33, kStride = 40;
  Rows<float> rows(2, kVocabulary, 1.3f);
  rows.run();
  std::vector<float> apart(kStride + kVocabulary, 7.0f);
  for (std::int64_t i = 0; i < 2 * kVocabulary; ++i) {
    apart[i / kVocabulary * kStride + i % kVocabulary] = rows.logits[i];
  }
  const std::vector<float> want = rows.gradient;
  rows.args.logits = rows.args.gradient = apart.data();
  rows.args.stride = rows.args.gradient_stride = kStride;
  rows.run();
  for (std::int64_t i = 0; i < 2 * kVocabulary; ++i) {
    CHECK(apart[i / kVocabulary * kStride + i % kVocabulary] == want[i]);
  }
  for (std::int64_t i = kVocabulary; i < kStride; ++i) CHECK(apart[i] == 7.0f);
}

TEST_CASE("sums follow a largest logit that grows from chunk to chunk") {
  constexpr std::int64_t kVocabulary = 2000;
  Rows<float> rows(2, kVocabulary, 0.8f);
  for (std::int64_t j = 0; j < kVocabulary; ++j) {
    rows.logits[j] = 0.01f * float(j);                                               // a little more with each
    rows.logits[kVocabulary + j] = j < 1000 ? -float(kInfinity) : float(j % 7) - 3;  // nothing in the first
  }
  rows.target[1] = 1001;
  rows.run();
  for (std::int64_t row = 0; row < 2; ++row) {
    const std::vector<double> log_p = log_softmax(rows, row);
    double entropy = 0;
    for (const double x : log_p) entropy -= std::exp(x) * std::max(x, -1e4);
    CHECK(std::abs(rows.log_prob[row] - log_p[rows.target[row]]) < 2e-5);
    CHECK(std::abs(rows.entropy[row] - entropy) < 2e-5);
  }
}

TEST_CASE("bfloat16 logits give the results of the same in float, and its gradient rounded once") {
  constexpr std::int64_t kVocabulary = 37;
  const auto rounded = [](float x) {  // to the nearest, ties to even
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return std::uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  };
  for (const bool entropy : {false, true}) {
    Rows<float> rows(3, kVocabulary, 0.8f);
    std::vector<BFloat16> half(rows.logits.size());
    for (std::size_t i = 0; i < half.size(); ++i) {
      half[i].bits = rounded(rows.logits[i]);
      const std::uint32_t bits = std::uint32_t{half[i].bits} << 16;
      std::memcpy(&rows.logits[i], &bits, sizeof(bits));
    }
    if (!entropy) rows.args.entropy = nullptr, rows.args.grad_entropy = nullptr;
    rows.run();
    Rows<float> other(3, kVocabulary, 0.8f);
    LogitRows<BFloat16, float> args{};
    args.logits = args.gradient = half.data();  // over the logits
    args.target = other.target.data();
    args.one_temperature = 0.8f;
    args.rows = 3;
    args.vocabulary = args.stride = args.gradient_stride = kVocabulary;
    args.top = other.top.data();
    args.log_total = other.log_total.data();
    args.log_prob = other.log_prob.data();
    args.grad_log_prob = other.grad_log_prob.data();
    if (entropy) args.entropy = other.entropy.data(), args.grad_entropy = other.grad_entropy.data();
    cpu::logprob_statistics(args);
    cpu::logprob_gradient(args);
    CHECK(other.log_prob == rows.log_prob);
    if (entropy) CHECK(other.entropy == rows.entropy);
    for (std::size_t i = 0; i < half.size(); ++i) CHECK(half[i].bits == rounded(rows.gradient[i]));
  }
}

// The scan over siblings: the action of the highest score, ties to the lowest index. Two versions give the
// same doubles: a portable loop, and AVX-512 for the common case (PUCT, no descent in flight).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "search/tree.h"

#ifdef __AVX512F__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false alarms inside GCC 12's own headers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace manus_fast::search {

constexpr double kNoScore = -std::numeric_limits<double>::infinity();

// Mean value of a node from its own counts, descents in flight as visits that returned -1.
inline double mean_value(const Node& node, std::uint32_t visits, std::uint32_t in_flight) {
  const std::uint32_t n = visits + in_flight;
  return n == 0 ? 0.0 : (node.value_sum - in_flight) / n;
}

// Q of a visited child (visits + descents in flight > 0).
inline double child_q(const Tree& tree, std::int32_t child, std::uint32_t word, double discount) {
  const std::uint32_t in_flight = word >> kVisitBits;
  if (in_flight == 0) return tree.q[child];
  const Node& node = tree.nodes[child];
  return node.reward + discount * ((node.value_sum - in_flight) / ((word & kVisitMask) + in_flight));
}

inline std::uint32_t total_visits(const std::uint32_t* words, int n) {
  std::uint32_t total = 0;
  for (int a = 0; a < n; ++a) total += (words[a] & kVisitMask) + (words[a] >> kVisitBits);
  return total;
}

// Returns -1 when every action has failed. `visits` and `in_flight` are the node's own.
inline int best_action_portable(Tree& tree, const Node& node, std::uint32_t visits, std::uint32_t in_flight,
                                const Config& config) {
  const int n = node.num_actions;
  const float* priors = tree.priors(node);
  const std::uint32_t* words = tree.visit_words(node);
  const std::int32_t* children = tree.children(node);
  const double mean = mean_value(node, visits, in_flight);
  const std::uint32_t total = total_visits(words, n);
  const bool normalize = config.normalize && tree.q_max > tree.q_min;
  const double span = tree.q_max - tree.q_min;
  const double root = std::sqrt(static_cast<double>(total));
  const double log_total = config.rule == Rule::uct && total > 0 ? std::log(static_cast<double>(total)) : 0.0;
  int best = -1;
  double best_score = kNoScore;
  for (int a = 0; a < n; ++a) {
    if (priors[a] < 0.0f) continue;
    const double count = (words[a] & kVisitMask) + (words[a] >> kVisitBits);
    double score;
    if (config.rule == Rule::uct && count == 0) {
      score = std::numeric_limits<double>::infinity();
    } else {
      double q = count == 0 ? mean : child_q(tree, children[a], words[a], config.discount);
      if (normalize) q = (q - tree.q_min) / span;
      score = config.rule == Rule::uct ? q + config.c * std::sqrt(log_total / count)
                                       : q + config.c * priors[a] * root / (1.0 + count);
    }
    if (best < 0 || score > best_score) {
      best = a;
      best_score = score;
    }
  }
  return best;
}

#ifdef __AVX512F__
template <bool kNormalize>
inline int best_action_avx512(Tree& tree, const Node& node, double mean, const Config& config) {
  const int n = node.num_actions;
  const float* priors = tree.priors(node);
  const std::uint32_t* words = tree.visit_words(node);
  const std::int32_t* children = tree.children(node);
  __m512i sums = _mm512_setzero_si512();
  for (int a = 0; a < n; a += 16) {
    const __mmask16 lanes = n - a >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (n - a)) - 1);
    sums = _mm512_add_epi32(sums, _mm512_maskz_loadu_epi32(lanes, words + a));
  }
  const double root_total = std::sqrt(static_cast<double>(static_cast<std::uint32_t>(_mm512_reduce_add_epi32(sums))));
  const __m512d root = _mm512_set1_pd(root_total), c = _mm512_set1_pd(config.c), one = _mm512_set1_pd(1.0);
  const __m512d parent = _mm512_set1_pd(mean);
  const __m512d low = _mm512_set1_pd(tree.q_min), span = _mm512_set1_pd(tree.q_max - tree.q_min);
  __m512d best = _mm512_set1_pd(kNoScore);
  __m512i best_at = _mm512_set1_epi64(std::numeric_limits<std::int64_t>::max());
  __m512i at = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  for (int a = 0; a < n; a += 8) {
    const __mmask8 lanes = n - a >= 8 ? 0xFF : static_cast<__mmask8>((1u << (n - a)) - 1);
    const __m256 p = _mm512_castps512_ps256(_mm512_maskz_loadu_ps(lanes, priors + a));
    const __m256i word = _mm512_castsi512_si256(_mm512_maskz_loadu_epi32(lanes, words + a));
    const __m512d prior = _mm512_cvtps_pd(p);
    const __m512d count = _mm512_cvtepi32_pd(word);  // nothing in flight: the word is the count, below 2^24
    const __mmask8 visited = _mm512_cmp_pd_mask(count, _mm512_setzero_pd(), _CMP_GT_OQ);
    __m512d q = parent;
    if (visited) {
      const __m256i child = _mm512_castsi512_si256(_mm512_maskz_loadu_epi32(visited, children + a));
      q = _mm512_mask_i32gather_pd(parent, visited, child, tree.q, 8);
    }
    if (kNormalize) q = _mm512_div_pd(_mm512_sub_pd(q, low), span);
    const __m512d bonus =
        _mm512_div_pd(_mm512_mul_pd(_mm512_mul_pd(c, prior), root), _mm512_add_pd(one, count));
    const __m512d score = _mm512_add_pd(q, bonus);
    const __mmask8 allowed = _mm512_mask_cmp_pd_mask(lanes, prior, _mm512_setzero_pd(), _CMP_GE_OQ);
    const __mmask8 better = _mm512_mask_cmp_pd_mask(allowed, score, best, _CMP_GT_OQ);
    best = _mm512_mask_mov_pd(best, better, score);
    best_at = _mm512_mask_mov_epi64(best_at, better, at);
    at = _mm512_add_epi64(at, _mm512_set1_epi64(8));
  }
  const double top = _mm512_reduce_max_pd(best);
  if (top == kNoScore) return -1;
  const __mmask8 ties = _mm512_cmp_pd_mask(best, _mm512_set1_pd(top), _CMP_EQ_OQ);
  return static_cast<int>(_mm512_mask_reduce_min_epi64(ties, best_at));
}
#endif

inline int best_action(Tree& tree, const Node& node, std::uint32_t visits, std::uint32_t in_flight,
                       const Config& config) {
#ifdef __AVX512F__
  if (tree.in_flight == 0 && config.rule == Rule::puct) {
    const double mean = mean_value(node, visits, 0);
    return config.normalize && tree.q_max > tree.q_min ? best_action_avx512<true>(tree, node, mean, config)
                                                       : best_action_avx512<false>(tree, node, mean, config);
  }
#endif
  return best_action_portable(tree, node, visits, in_flight, config);
}

}  // namespace manus_fast::search

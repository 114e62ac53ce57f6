// What happens only at a root: Dirichlet noise, and Gumbel selection with sequential halving.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/check.h"
#include "search/score.h"
#include "search/tree.h"

namespace manus_fast::search {
namespace {

enum Stream : std::uint64_t { kNoise = 1, kGumbel = 2 };

Rng root_rng(const Config& config, std::int32_t index, const Root& root, Stream stream) {
  return Rng(counter_hash(config.seed, index, root.epoch), stream);
}

// Uniform in (0, 1), both ends excluded: 52 bits and a half.
double open_uniform(Rng& rng) { return (static_cast<double>(rng.next() >> 12) + 0.5) * 0x1.0p-52; }

// Marsaglia and Tsang, "A simple method for generating gamma variables", 2000; the normal by Box and Muller.
double gamma_draw(Rng& rng, double alpha) {
  double boost = 1.0;
  if (alpha < 1.0) {
    boost = std::pow(open_uniform(rng), 1.0 / alpha);
    alpha += 1.0;
  }
  const double d = alpha - 1.0 / 3.0;
  const double c = 1.0 / (3.0 * std::sqrt(d));
  for (;;) {
    const double radius = std::sqrt(-2.0 * std::log(open_uniform(rng)));
    const double x = radius * std::cos(6.283185307179586 * open_uniform(rng));
    const double t = 1.0 + c * x;
    if (t <= 0.0) continue;
    const double v = t * t * t;
    if (std::log(open_uniform(rng)) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v * boost;
  }
}

}  // namespace

void TreeBatch::add_root_noise(std::int32_t index, double alpha, double fraction) {
  Tree& tree = checked_tree(index);
  const Node& root = tree.nodes[0];
  MF_CHECK(alpha > 0 && alpha <= 1e6, "alpha: expected a number above 0 and up to 1e6, got ", alpha);
  MF_CHECK(fraction >= 0 && fraction <= 1, "fraction: expected 0 to 1, got ", fraction);
  MF_CHECK(tree.expanded(root), "add_root_noise: expected an expanded root, that of tree ", index, " is not");
  Rng rng = root_rng(config_, index, roots_[index], kNoise);
  std::vector<double> noise(root.num_actions);
  double sum = 0.0;
  for (double& draw : noise) {
    draw = gamma_draw(rng, alpha);
    sum += draw;
  }
  if (sum == 0.0) return;  // every draw underflowed: an alpha this small has no usable noise
  float* priors = tree.priors(root);
  for (int a = 0; a < root.num_actions; ++a) {
    if (priors[a] < 0.0f) continue;
    priors[a] = static_cast<float>((1.0 - fraction) * priors[a] + fraction * (noise[a] / sum));
  }
}

std::vector<std::int32_t> halving_schedule(std::int32_t considered, std::int32_t simulations) {
  std::vector<std::int32_t> schedule;
  if (considered <= 1) {
    for (std::int32_t i = 0; i < simulations; ++i) schedule.push_back(i);
    return schedule;
  }
  int phases = 0;
  while ((std::int64_t{1} << phases) < considered) ++phases;
  std::vector<std::int32_t> visits(considered, 0);
  std::int64_t left = considered;
  while (static_cast<std::int32_t>(schedule.size()) < simulations) {
    const std::int64_t rounds = std::max<std::int64_t>(1, simulations / (phases * left));
    for (std::int64_t round = 0; round < rounds; ++round) {
      for (std::int64_t i = 0; i < left; ++i) schedule.push_back(visits[i]++);
    }
    left = std::max<std::int64_t>(2, left / 2);
  }
  schedule.resize(simulations);
  return schedule;
}

void TreeBatch::begin_gumbel(std::int32_t index) {
  Tree& tree = trees_[index];
  const Node& root = tree.nodes[0];
  if (!tree.expanded(root)) return;
  GumbelRoot& gumbel = roots_[index].gumbel;
  gumbel.logit.clear();
  gumbel.before.clear();
  Rng rng = root_rng(config_, index, roots_[index], kGumbel);
  const float* priors = tree.priors(root);
  const std::uint32_t* words = tree.visit_words(root);
  for (int a = 0; a < root.num_actions; ++a) {
    const double draw = -std::log(-std::log(open_uniform(rng)));
    const double log_prior = priors[a] > 0.0f ? std::log(static_cast<double>(priors[a])) : kNoScore;
    gumbel.logit.push_back(draw + log_prior);
    gumbel.before.push_back(static_cast<std::int32_t>((words[a] & kVisitMask) + (words[a] >> kVisitBits)));
  }
  gumbel.schedule = halving_schedule(std::min<std::int32_t>(config_.gumbel_considered, root.num_actions),
                                      config_.gumbel_simulations);
  tree.halving = true;
}

// Among the actions that have the wanted visits, the highest gumbel + log prior + sigma(q). Wanted is the
// schedule's entry; past its end, or when nobody has it, or for the final answer: the most visits of all.
std::int32_t TreeBatch::gumbel_choice(Tree& tree, bool final) {
  const Node& root = tree.nodes[0];
  const GumbelRoot& gumbel = root_of(tree).gumbel;
  const int n = root.num_actions;
  const float* priors = tree.priors(root);
  const std::uint32_t* words = tree.visit_words(root);
  const std::int32_t* children = tree.children(root);
  const double mean = mean_value(root, tree.visits, tree.in_flight);
  auto count = [&](int a) { return static_cast<std::int64_t>((words[a] & kVisitMask) + (words[a] >> kVisitBits)); };
  auto value = [&](int a) { return count(a) == 0 ? mean : child_q(tree, children[a], words[a], config_.discount); };
  double low = std::numeric_limits<double>::infinity(), high = -low;
  std::int64_t most = 0, most_since = 0, done = 0;
  for (int a = 0; a < n; ++a) {
    done += count(a) - gumbel.before[a];
    if (priors[a] < 0.0f) continue;
    low = std::min(low, value(a));
    high = std::max(high, value(a));
    most = std::max(most, count(a));
    most_since = std::max(most_since, count(a) - gumbel.before[a]);
  }
  std::int64_t wanted = most_since;
  if (!final && done < static_cast<std::int64_t>(gumbel.schedule.size())) {
    const std::int64_t entry = gumbel.schedule[done];
    for (int a = 0; a < n; ++a) {
      if (priors[a] >= 0.0f && count(a) - gumbel.before[a] == entry) wanted = entry;
    }
  }
  const double scale = (config_.gumbel_visit + most) * config_.gumbel_scale;
  std::int32_t best = -1;
  double best_score = 0.0;
  for (int a = 0; a < n; ++a) {
    if (priors[a] < 0.0f || count(a) - gumbel.before[a] != wanted) continue;
    const double q = high > low ? (value(a) - low) / (high - low) : 0.0;
    const double score = gumbel.logit[a] + scale * q;
    if (best < 0 || score > best_score) {
      best = a;
      best_score = score;
    }
  }
  return best;
}

std::int32_t TreeBatch::gumbel_action(std::int32_t index) {
  Tree& tree = checked_tree(index);
  MF_CHECK(config_.gumbel_considered > 0, "gumbel_action: expected a batch made with gumbel_considered > 0");
  if (!tree.expanded(tree.nodes[0])) return -1;
  if (!tree.halving) begin_gumbel(index);
  return gumbel_choice(tree, true);
}

}  // namespace manus_fast::search

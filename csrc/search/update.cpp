// Answers to leaves: expansion, closing, backup. Every row is checked before the first one is applied.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/parallel.h"
#include "search/tree.h"

namespace manus_fast::search {
namespace {

constexpr int kGroup = 16;
constexpr std::int64_t kGrain = 32;
constexpr double kLargest = 1e100;  // sums of 2^24 such values stay far from infinity

bool usable(double value) { return std::fabs(value) <= kLargest; }  // false for NaN too

bool ascending(std::int64_t count, const std::int32_t* tree) {
  bool result = true;
  for (std::int64_t i = 1; i < count; ++i) result &= tree[i] >= tree[i - 1];
  return result;
}

// Makes of body(begin, end) one whose chunks are cut between trees: the rows of a tree stay in order.
template <typename Body>
auto between_trees(std::int64_t count, const std::int32_t* tree, const Body& body) {
  return [=](std::int64_t begin, std::int64_t end) {
    while (begin > 0 && begin < end && tree[begin] == tree[begin - 1]) ++begin;
    if (begin == end) return;  // one tree's rows, taken by the chunk in which they start
    while (end < count && tree[end] == tree[end - 1]) ++end;
    body(begin, end);
  };
}

}  // namespace

double checked_prior_sum(const float* priors, std::int64_t n, std::int64_t row) {
  double sum = 0.0;
  bool valid = true;
  for (std::int64_t a = 0; a < n; ++a) {
    sum += priors[a];
    valid &= priors[a] >= 0.0f;  // false for NaN
  }
  if (valid && sum > 0.0 && sum <= static_cast<double>(std::numeric_limits<float>::max()) * n) return sum;
  for (std::int64_t a = 0; a < n; ++a) {
    MF_CHECK(std::isfinite(priors[a]) && priors[a] >= 0.0f, "priors[", row, ", ", a,
             "]: expected a finite number >= 0, got ", priors[a]);
  }
  MF_CHECK(sum > 0.0, "priors[", row, "]: expected a sum > 0, got ", sum);
  return sum;
}

void TreeBatch::expand_leaf(Tree& tree, std::int32_t id, const float* priors, double prior_sum, std::int32_t actions) {
  Node& node = tree.nodes[id];
  if (static_cast<std::int64_t>(tree.num_edges) + actions > max_edges_) {
    tree.full = true;
    node.num_actions = kUnexpanded;
    return;
  }
  node.edges = 3 * tree.num_edges;
  node.num_actions = static_cast<std::uint16_t>(actions);
  tree.num_edges += actions;
  float* to = tree.priors(node);
  for (std::int32_t a = 0; a < actions; ++a) to[a] = static_cast<float>(priors[a] / prior_sum);
  std::memset(tree.visit_words(node), 0, sizeof(std::uint32_t) * actions);
  std::memset(tree.children(node), 0xFF, sizeof(std::int32_t) * actions);  // -1: no node yet
}

void TreeBatch::close_leaf(Tree& tree, std::int32_t id, double value) {
  const float stored = static_cast<float>(value);
  std::memcpy(&tree.nodes[id].edges, &stored, sizeof stored);
  tree.nodes[id].num_actions = kClosed;
}

// One node of the path; moves `id` to its parent and `value` over the edge. False at the root.
inline bool TreeBatch::backup_step(Tree& tree, std::int32_t& id, double& value, std::uint32_t in_flight) {
  Node& node = tree.nodes[id];
  node.value_sum += value;
  double q;
  if (id == 0) {
    tree.visits += 1;
    tree.in_flight -= in_flight;
    q = node.value_sum / tree.visits;
  } else {
    std::uint32_t& word = tree.visit_word(node);
    word = word + 1 - in_flight * kOneInFlight;
    q = node.reward + config_.discount * (node.value_sum / (word & kVisitMask));
  }
  tree.q[id] = q;
  if (q < tree.q_min) tree.q_min = q;
  if (q > tree.q_max) tree.q_max = q;
  if (id == 0) return false;
  value = node.reward + config_.discount * value;
  id = node.parent;
  return true;
}

void TreeBatch::backup_path(Tree& tree, std::int32_t id, double value, std::uint32_t in_flight) {
  while (backup_step(tree, id, value, in_flight)) {
  }
}

void TreeBatch::leave_flight(Tree& tree, std::int32_t id) {
  for (; id != 0; id = tree.nodes[id].parent) tree.visit_word(tree.nodes[id]) -= kOneInFlight;
  --tree.in_flight;
}

void TreeBatch::answer_one(std::int32_t index, std::int32_t node, const float* priors, double prior_sum,
                           std::int32_t actions, float reward, bool terminal, double value) {
  Tree& tree = trees_[index];
  tree.nodes[node].reward = node == 0 ? 0.0f : reward;
  if (terminal || actions == 0) {
    close_leaf(tree, node, value);
    value = static_cast<float>(value);
  } else {
    expand_leaf(tree, node, priors, prior_sum, actions);
  }
  backup_path(tree, node, value, 1);
}

// Checks rows [begin, end) and marks their leaves, so that a row given twice is found too.
void TreeBatch::claim(std::int64_t begin, std::int64_t end, const LeafRows& rows, const Answers& answers,
                      double* sums) {
  constexpr std::int64_t kAhead = 8;
  for (std::int64_t row = begin; row < end; ++row) {
    if (row + kAhead < end && rows.status[row + kAhead] == kEvaluate) {
      const std::int32_t index = rows.tree[row + kAhead], id = rows.node[row + kAhead];
      if (index >= 0 && index < num_trees() && id >= 0 && id < max_nodes_) {
        __builtin_prefetch(&trees_[index].nodes[id]);
      }
    }
    if (rows.status[row] != kEvaluate) continue;
    Tree& tree = checked_tree(rows.tree[row]);
    const std::int32_t id = rows.node[row];
    MF_CHECK(id >= 0 && id < tree.num_nodes && tree.nodes[id].num_actions == kPending, "leaves[", row,
             "]: expected a leaf in flight, got node ", id, " of tree ", rows.tree[row],
             ", which is not (answered twice, or selected before the root moved)");
    if (answers.values) {
      MF_CHECK(usable(answers.values[row]), "values[", row, "]: expected a number within +-1e100, got ",
               answers.values[row]);
    }
    if (answers.rewards) {
      MF_CHECK(std::isfinite(answers.rewards[row]), "rewards[", row, "]: expected a finite number, got ",
               answers.rewards[row]);
    }
    if (answers.priors && !(answers.terminal && answers.terminal[row])) {
      const std::int64_t n = answers.counts ? answers.counts[row] : answers.width;
      MF_CHECK(n >= 0 && n <= answers.width && n <= kMaxActions, "counts[", row, "]: expected 0 to ",
               std::min<std::int64_t>(answers.width, kMaxActions), " actions, got ", n);
      sums[row] = n == 0 ? 0.0 : checked_prior_sum(answers.priors + row * answers.width, n, row);
    }
    tree.nodes[id].num_actions = kClaimed;
  }
}

void TreeBatch::apply(std::int64_t begin, std::int64_t end, const LeafRows& rows, const Answers& answers,
                      const double* sums, bool backup) {
  struct Walk {
    Tree* tree;
    std::int32_t id;
    double value;
  } group[kGroup];
  std::int64_t row = begin;
  while (row < end) {
    // A group holds at most one row of a tree: paths of one tree are backed up one after the other.
    int size = 0;
    for (std::int32_t last = -1; row < end && size < kGroup; ++row) {
      if (rows.status[row] != kEvaluate) continue;
      if (rows.tree[row] <= last) break;
      last = rows.tree[row];
      Tree& tree = trees_[last];
      const std::int32_t id = rows.node[row];
      Node& node = tree.nodes[id];
      double value = answers.values ? answers.values[row] : 0.0;
      if (node.parent >= 0) {
        __builtin_prefetch(&tree.nodes[node.parent]);
        if (answers.rewards) node.reward = answers.rewards[row];
      }
      const bool terminal = answers.terminal && answers.terminal[row];
      const std::int32_t actions =
          answers.counts ? answers.counts[row] : static_cast<std::int32_t>(answers.width);
      if (terminal || (answers.priors && actions == 0)) {
        close_leaf(tree, id, value);
        value = static_cast<float>(value);
      } else if (answers.priors) {
        expand_leaf(tree, id, answers.priors + row * answers.width, sums[row], actions);
      } else {
        node.num_actions = kUnexpanded;
      }
      group[size++] = Walk{&tree, id, value};
    }
    if (!backup) continue;
    while (size > 0) {
      for (int i = 0; i < size; ++i) {
        const Walk& walk = group[i];
        const Node& node = walk.tree->nodes[walk.id];
        if (node.parent < 0) continue;
        const Node& parent = walk.tree->nodes[node.parent];
        __builtin_prefetch(&walk.tree->visit_words(parent)[node.action], 1);
        if (parent.parent >= 0) __builtin_prefetch(&walk.tree->nodes[parent.parent]);
      }
      int left = 0;
      for (int i = 0; i < size; ++i) {
        if (backup_step(*group[i].tree, group[i].id, group[i].value, 1)) group[left++] = group[i];
      }
      size = left;
    }
  }
}

void TreeBatch::run_rows(std::int64_t count, const LeafRows& rows, const Answers& answers, bool backup) {
  if (answers.priors && sums_.size() < static_cast<std::size_t>(count)) sums_.resize(count);
  double* sums = sums_.data();
  const auto check = [&](std::int64_t begin, std::int64_t end) { claim(begin, end, rows, answers, sums); };
  const auto change = [&](std::int64_t begin, std::int64_t end) { apply(begin, end, rows, answers, sums, backup); };
  try {
    if (ascending(count, rows.tree)) {
      parallel_phases(count, kGrain, between_trees(count, rows.tree, check), between_trees(count, rows.tree, change));
    } else {
      check(0, count);
      change(0, count);
    }
  } catch (...) {
    unclaim(count, rows);
    throw;
  }
}

// After a row that was refused: what was marked is in flight as before.
void TreeBatch::unclaim(std::int64_t count, const LeafRows& rows) {
  for (std::int64_t row = 0; row < count; ++row) {
    if (rows.status[row] != kEvaluate || rows.tree[row] < 0 || rows.tree[row] >= num_trees()) continue;
    Tree& tree = trees_[rows.tree[row]];
    const std::int32_t id = rows.node[row];
    if (id < 0 || id >= tree.num_nodes) continue;
    if (tree.nodes[id].num_actions == kClaimed) tree.nodes[id].num_actions = kPending;
  }
}

void TreeBatch::update(std::int64_t count, const LeafRows& rows, const Answers& answers) {
  MF_CHECK(count == 0 || answers.values, "values: expected one number per leaf, got none");
  run_rows(count, rows, answers, true);
}

void TreeBatch::expand(std::int64_t count, const LeafRows& rows, const Answers& answers) {
  MF_CHECK(count == 0 || answers.priors, "priors: expected one row per leaf, got none");
  run_rows(count, rows, answers, false);
}
// A descent ended at this node when more are in flight through it than through its children.
bool TreeBatch::ended_here(Tree& tree, std::int32_t id) {
  Node& node = tree.nodes[id];
  if (node.num_actions == kPending) return true;
  std::uint32_t in_flight = id == 0 ? tree.in_flight : tree.visit_word(node) >> kVisitBits;
  if (!tree.expanded(node)) return in_flight > 0;
  const std::uint32_t* words = tree.visit_words(node);
  for (int a = 0; a < node.num_actions; ++a) in_flight -= words[a] >> kVisitBits;
  return in_flight > 0;
}

void TreeBatch::backup(std::int64_t count, const LeafRows& rows, const double* values) {
  std::vector<std::pair<std::int32_t, std::int32_t>> seen;
  for (std::int64_t row = 0; row < count; ++row) {
    if (rows.status[row] != kEvaluate) continue;
    Tree& tree = checked_tree(rows.tree[row]);
    const std::int32_t id = rows.node[row];
    MF_CHECK(id >= 0 && id < tree.num_nodes && ended_here(tree, id), "leaves[", row,
             "]: expected a leaf in flight, got node ", id, " of tree ", rows.tree[row], ", which is not");
    MF_CHECK(usable(values[row]), "values[", row, "]: expected a number within +-1e100, got ", values[row]);
    seen.emplace_back(rows.tree[row], id);
  }
  std::sort(seen.begin(), seen.end());
  const auto twice = std::adjacent_find(seen.begin(), seen.end());
  MF_CHECK(twice == seen.end(), "leaves: expected each leaf once, got node ", twice->second, " of tree ", twice->first,
           " twice");
  for (std::int64_t row = 0; row < count; ++row) {
    if (rows.status[row] != kEvaluate) continue;
    Tree& tree = trees_[rows.tree[row]];
    Node& node = tree.nodes[rows.node[row]];
    double value = values[row];
    if (node.num_actions == kPending) node.num_actions = kUnexpanded;
    if (node.num_actions == kClosed) {
      close_leaf(tree, rows.node[row], value);
      value = static_cast<float>(value);
    }
    backup_path(tree, rows.node[row], value, 1);
  }
}

void TreeBatch::drop_one(std::int32_t index, std::int32_t node) {
  trees_[index].nodes[node].num_actions = kUnexpanded;
  leave_flight(trees_[index], node);
}

void TreeBatch::drop(std::int64_t count, const LeafRows& rows, bool fail) {
  try {
    claim(0, count, rows, Answers{}, nullptr);
  } catch (...) {
    unclaim(count, rows);
    throw;
  }
  for (std::int64_t row = 0; row < count; ++row) {
    if (rows.status[row] != kEvaluate) continue;
    Tree& tree = trees_[rows.tree[row]];
    const Node& node = tree.nodes[rows.node[row]];
    drop_one(rows.tree[row], rows.node[row]);
    if (fail && node.parent >= 0) tree.priors(tree.nodes[node.parent])[node.action] = -1.0f;
  }
}

}  // namespace manus_fast::search

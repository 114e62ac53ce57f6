#include "search/tree.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "common/check.h"

namespace manus_fast::search {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t region_bytes(std::int32_t max_nodes, std::int64_t max_edges) {
  const std::size_t bytes = max_nodes * kBytesPerNode + static_cast<std::size_t>(max_edges) * kBytesPerEdge;
  const std::size_t lines = (bytes + kLine - 1) / kLine;
  // An odd number of lines: the roots of neighbouring trees do not fall into the same cache sets.
  return (lines | 1) * kLine;
}

void empty_tree(Tree& tree) {
  tree.num_nodes = 1;
  tree.num_edges = 0;
  tree.visits = 0;
  tree.in_flight = 0;
  tree.q_min = std::numeric_limits<double>::infinity();
  tree.q_max = -std::numeric_limits<double>::infinity();
  tree.full = false;
  tree.halving = false;
  tree.nodes[0] = Node{0.0, 0.0f, -1, 0, 0, kUnexpanded};
  tree.q[0] = 0.0;
}

}  // namespace

void TreeBatch::Free::operator()(void* memory) const { std::free(memory); }

TreeBatch::TreeBatch(std::int32_t num_trees, std::int32_t max_nodes, std::int64_t max_edges, const Config& config)
    : config_(config), max_nodes_(max_nodes), max_edges_(max_edges) {
  MF_CHECK(num_trees >= 1, "num_trees: expected an integer >= 1, got ", num_trees);
  MF_CHECK(max_nodes >= 1, "max_nodes: expected an integer >= 1, got ", max_nodes);
  MF_CHECK(max_edges >= 0 && max_edges < (std::int64_t{1} << 30), "max_edges: expected 0 to 2^30 - 1, got ", max_edges);
  MF_CHECK(std::isfinite(config.c) && config.c >= 0 && config.c <= 1e100, "c: expected 0 <= c <= 1e100, got ",
           config.c);
  MF_CHECK(config.discount >= 0 && config.discount <= 1, "discount: expected 0 <= discount <= 1, got ",
           config.discount);
  MF_CHECK(config.gumbel_considered >= 0, "gumbel_considered: expected an integer >= 0, got ",
           config.gumbel_considered);
  MF_CHECK(config.gumbel_considered == 0 || config.gumbel_simulations >= 1,
           "gumbel_simulations: expected an integer >= 1 when gumbel_considered is set, got ",
           config.gumbel_simulations);
  MF_CHECK(config.gumbel_simulations <= static_cast<std::int32_t>(kVisitMask), "gumbel_simulations: expected at most ",
           kVisitMask, ", got ", config.gumbel_simulations);
  MF_CHECK(config.gumbel_visit >= 0 && config.gumbel_visit <= 1e100 && config.gumbel_scale >= 0 &&
               config.gumbel_scale <= 1e100,
           "gumbel_visit, gumbel_scale: expected numbers from 0 to 1e100, got ", config.gumbel_visit, ", ",
           config.gumbel_scale);
  stride_ = region_bytes(max_nodes, max_edges);
  if (stride_ > (std::numeric_limits<std::size_t>::max() / 2) / num_trees) throw std::bad_alloc();
  const std::size_t total = (stride_ * num_trees + kHugePage - 1) / kHugePage * kHugePage;
  arena_.reset(static_cast<unsigned char*>(std::aligned_alloc(kHugePage, total)));
  if (!arena_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(arena_.get(), total, MADV_HUGEPAGE);  // a hint: fewer TLB misses, the same results without it
#endif
  trees_ = std::vector<Tree>(num_trees);
  roots_ = std::vector<Root>(num_trees);
  for (std::int32_t index = 0; index < num_trees; ++index) {
    unsigned char* region = arena_.get() + stride_ * index;
    Tree& tree = trees_[index];
    tree.nodes = reinterpret_cast<Node*>(region);
    tree.q = reinterpret_cast<double*>(region + sizeof(Node) * max_nodes);
    tree.words = reinterpret_cast<std::uint32_t*>(region + kBytesPerNode * max_nodes);
    empty_tree(tree);
  }
}

Tree& TreeBatch::checked_tree(std::int32_t index) {
  MF_CHECK(index >= 0 && index < num_trees(), "tree: expected an index below ", num_trees(), ", got ", index);
  return trees_[index];
}

void TreeBatch::reset(std::int32_t index) {
  Tree& tree = checked_tree(index);
  MF_CHECK(tree.in_flight == 0, "reset: expected no leaf in flight, tree ", index, " has ", tree.in_flight);
  ++roots_[index].epoch;
  empty_tree(tree);
}

std::vector<std::int32_t> TreeBatch::advance_root(std::int32_t index, std::int32_t action) {
  Tree& tree = checked_tree(index);
  MF_CHECK(tree.in_flight == 0, "advance_root: expected no leaf in flight, tree ", index, " has ", tree.in_flight);
  const Node old_root = tree.nodes[0];
  std::int32_t child = -1;
  if (action >= 0 && tree.expanded(old_root)) {
    MF_CHECK(action < old_root.num_actions, "action: expected one of ", old_root.num_actions,
             " actions of the root of tree ", index, ", got ", action);
    if (tree.priors(old_root)[action] >= 0.0f) child = tree.children(old_root)[action];
  }
  const std::uint32_t visits = child < 0 ? 0 : tree.visit_words(old_root)[action];
  if (visits == 0) {
    reset(index);
    return {};
  }

  // Parents precede children, so one pass in id order finds the subtree and its new ids.
  std::vector<std::int32_t> renamed(tree.num_nodes, -1), kept;
  for (std::int32_t id = child; id < tree.num_nodes; ++id) {
    const std::int32_t parent = tree.nodes[id].parent;
    // What hangs under a node that was closed later (all its actions failed) goes too.
    if (id == child || (parent >= 0 && renamed[parent] >= 0 && tree.expanded(tree.nodes[parent]))) {
      renamed[id] = static_cast<std::int32_t>(kept.size());
      kept.push_back(id);
    }
  }
  std::vector<std::uint32_t> words;
  for (std::size_t to = 0; to < kept.size(); ++to) {
    Node node = tree.nodes[kept[to]];
    if (tree.expanded(node)) {
      const std::size_t start = words.size(), n = node.num_actions;
      words.insert(words.end(), tree.words + node.edges, tree.words + node.edges + 3 * n);
      for (std::size_t a = start + 2 * n; a < start + 3 * n; ++a) {
        const std::int32_t to_child = static_cast<std::int32_t>(words[a]);
        if (to_child >= 0) words[a] = static_cast<std::uint32_t>(renamed[to_child]);
      }
      node.edges = static_cast<std::uint32_t>(start);
    }
    node.parent = to == 0 ? -1 : renamed[node.parent];
    tree.nodes[to] = node;  // to <= kept[to]: nothing that is still to be read is overwritten
    tree.q[to] = tree.q[kept[to]];
  }
  if (!words.empty()) std::memcpy(tree.words, words.data(), words.size() * sizeof(std::uint32_t));
  tree.num_nodes = static_cast<std::int32_t>(kept.size());
  tree.num_edges = static_cast<std::uint32_t>(words.size() / 3);
  tree.visits = visits;
  tree.full = false;
  tree.halving = false;
  ++roots_[index].epoch;
  tree.nodes[0].reward = 0.0f;
  tree.nodes[0].action = 0;
  tree.q[0] = tree.nodes[0].value_sum / visits;
  tree.q_min = tree.q_max = tree.q[0];
  for (std::int32_t id = 1; id < tree.num_nodes; ++id) {
    if ((tree.visit_word(tree.nodes[id]) & kVisitMask) == 0) continue;
    if (tree.q[id] < tree.q_min) tree.q_min = tree.q[id];
    if (tree.q[id] > tree.q_max) tree.q_max = tree.q[id];
  }
  return kept;
}

}  // namespace manus_fast::search

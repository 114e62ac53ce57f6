// From the root to a leaf, by the highest score. Trees are walked in groups, a level at a time: while one
// tree's next block is on its way from memory, the others are scored.
#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "common/parallel.h"
#include "search/score.h"
#include "search/tree.h"

namespace manus_fast::search {
namespace {

constexpr int kGroup = 16;
constexpr std::int64_t kGrain = 32;  // trees a thread takes at least: about 10 us of work

inline void prefetch_block(const Tree& tree, const Node& node) {
  if (!tree.expanded(node)) return;
  const char* at = reinterpret_cast<const char*>(tree.words + node.edges);
  const int bytes = std::min<int>(12 * node.num_actions, 12 * 64);  // the hardware follows longer blocks
  for (int offset = 0; offset < bytes; offset += 64) __builtin_prefetch(at + offset);
}

}  // namespace

struct TreeBatch::Cursor {
  Tree* tree;
  std::int32_t id;          // node reached
  std::uint32_t visits;     // its own counts, this descent not included
  std::uint32_t in_flight;
  std::int64_t row;
  Status status;
};

// One level down. Returns true when the descent has ended; then `status` says how.
bool TreeBatch::descend(Cursor& cursor) {
  Tree& tree = *cursor.tree;
  Node& node = tree.nodes[cursor.id];
  switch (node.num_actions) {
    case kUnexpanded:
      cursor.status = tree.full ? kFull : kEvaluate;
      return true;
    case kPending:
    case kClaimed:
      cursor.status = kCollision;
      return true;
    case kClosed:
      cursor.status = kTerminal;
      return true;
    default:
      break;
  }
  const int action = cursor.id == 0 && tree.halving ? gumbel_choice(tree, false)
                                                   : best_action(tree, node, cursor.visits, cursor.in_flight, config_);
  if (action < 0) {  // every action failed: the node is closed with what it was worth
    close_leaf(tree, cursor.id, mean_value(node, cursor.visits, cursor.in_flight));
    cursor.status = kTerminal;
    return true;
  }
  std::uint32_t& word = tree.visit_words(node)[action];
  std::int32_t& child = tree.children(node)[action];
  if (child < 0) {
    if (tree.full || tree.num_nodes == max_nodes_) {
      tree.full = true;
      cursor.status = kFull;
      return true;
    }
    child = tree.num_nodes++;
    tree.nodes[child] = Node{0.0, 0.0f, cursor.id, 0, static_cast<std::uint16_t>(action), kUnexpanded};
    tree.q[child] = 0.0;
  } else {
    __builtin_prefetch(&tree.nodes[child]);
  }
  cursor.visits = word & kVisitMask;
  cursor.in_flight = word >> kVisitBits;
  cursor.id = child;
  word += kOneInFlight;
  return false;
}

void TreeBatch::finish(Cursor& cursor, Status status) {
  Tree& tree = *cursor.tree;
  ++tree.in_flight;
  if (status == kEvaluate) {
    tree.nodes[cursor.id].num_actions = kPending;
  } else if (status == kTerminal) {
    float value;
    std::memcpy(&value, &tree.nodes[cursor.id].edges, sizeof value);
    backup_path(tree, cursor.id, value, 1);
  } else {
    leave_flight(tree, cursor.id);
  }
}

Status TreeBatch::select_one(std::int32_t index, std::int32_t* node) {
  Tree& tree = trees_[index];
  if (config_.gumbel_considered > 0 && !tree.halving) begin_gumbel(index);
  Cursor cursor{&tree, 0, tree.visits, tree.in_flight, 0, kEvaluate};
  while (!descend(cursor)) {
  }
  finish(cursor, cursor.status);
  *node = cursor.id;
  return cursor.status;
}

void TreeBatch::select_trees(const std::int32_t* which, std::int64_t begin, std::int64_t end, int leaves,
                             const LeafRows& out) {
  Cursor group[kGroup];
  int active[kGroup];
  for (std::int64_t first = begin; first < end; first += kGroup) {
    const int size = static_cast<int>(std::min<std::int64_t>(kGroup, end - first));
    for (int leaf = 0; leaf < leaves; ++leaf) {
      int count = size;
      for (int i = 0; i < size; ++i) {
        const std::int32_t index = which ? which[first + i] : static_cast<std::int32_t>(first + i);
        Tree& tree = trees_[index];
        if (config_.gumbel_considered > 0 && !tree.halving) begin_gumbel(index);
        group[i] = Cursor{&tree, 0, tree.visits, tree.in_flight, (first + i) * leaves + leaf, kEvaluate};
        active[i] = i;
        __builtin_prefetch(&tree.nodes[0]);
      }
      while (count > 0) {
        for (int i = 0; i < count; ++i) {
          const Cursor& cursor = group[active[i]];
          prefetch_block(*cursor.tree, cursor.tree->nodes[cursor.id]);
        }
        int left = 0;
        for (int i = 0; i < count; ++i) {
          if (!descend(group[active[i]])) active[left++] = active[i];
        }
        count = left;
      }
      for (int i = 0; i < size; ++i) {
        Cursor& cursor = group[i];
        finish(cursor, cursor.status);
        const std::int64_t row = cursor.row;
        const Node& node = cursor.tree->nodes[cursor.id];
        const bool leaf_known = cursor.status != kFull;
        out.tree[row] = static_cast<std::int32_t>(cursor.tree - trees_.data());
        out.node[row] = leaf_known ? cursor.id : -1;
        out.parent[row] = leaf_known ? node.parent : -1;
        out.action[row] = leaf_known && node.parent >= 0 ? node.action : -1;
        out.status[row] = cursor.status;
      }
    }
  }
}

void TreeBatch::check_select(const std::int32_t* which, std::int64_t begin, std::int64_t end, int leaves) {
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int32_t index = which ? which[i] : static_cast<std::int32_t>(i);
    const Tree& tree = checked_tree(index);
    MF_CHECK(!which || i == 0 || which[i] > which[i - 1], "trees: expected indices in ascending order, got ", index,
             " after ", which[i - 1]);
    MF_CHECK(tree.in_flight + leaves <= kMaxInFlight, "leaves: expected at most ", kMaxInFlight,
             " in flight in a tree, tree ", index, " has ", tree.in_flight, " and ", leaves, " more were asked");
    MF_CHECK(tree.visits + kMaxInFlight < kVisitMask, "select: tree ", index, " has used up its ", kVisitMask,
             " visits; advance or reset it");
  }
}

void TreeBatch::select(const std::int32_t* which, std::int64_t count, int leaves, LeafRows out) {
  MF_CHECK(leaves >= 1 && leaves <= static_cast<int>(kMaxInFlight), "leaves: expected 1 to ", kMaxInFlight, ", got ",
           leaves);
  parallel_phases(
      count, kGrain,
      [&](std::int64_t begin, std::int64_t end) { check_select(which, begin, end, leaves); },
      [&](std::int64_t begin, std::int64_t end) { select_trees(which, begin, end, leaves, out); });
}

}  // namespace manus_fast::search

// A batch of search trees in one fixed block of memory. The rules are manus_fast/search/reference.py;
// this file holds their layout. Per tree, one region with three parts:
//
//   Node   nodes[max_nodes]   what a step along a path touches together (24 bytes)
//   double q[max_nodes]       Q of the edge into the node, read by the scan over siblings (8 bytes)
//   word   edges[3 * max_edges]   per expanded node one block of A priors, A visit words, A child ids
//
// so a node costs 32 bytes and an edge 12, and the scan reads contiguous arrays. Visit words carry the
// visits in the low 24 bits and the descents in flight (virtual visits) in the high 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/rng.h"

namespace manus_fast::search {

enum class Rule { puct, uct };

enum Status : std::int32_t {
  kEvaluate = 0,   // a leaf that waits for update()
  kTerminal = 1,   // a closed leaf: its value was backed up at once
  kCollision = 2,  // the leaf is in flight already: nothing changed
  kFull = 3,       // no memory left for a leaf: nothing changed
};

struct Config {
  Rule rule = Rule::puct;
  double c = 1.25;
  double discount = 1.0;  // per turn, that is per edge
  bool normalize = false;
  std::int32_t gumbel_considered = 0;  // root actions considered by sequential halving; 0: rule at the root too
  std::int32_t gumbel_simulations = 0;
  double gumbel_visit = 50.0;
  double gumbel_scale = 1.0;
  std::uint64_t seed = 0;
};

// Values of Node::num_actions that are not counts.
constexpr std::uint16_t kUnexpanded = 65535;
constexpr std::uint16_t kPending = 65534;  // selected, unexpanded, waits for update()
constexpr std::uint16_t kClaimed = 65533;  // as kPending, seen by the update() that runs now
constexpr std::uint16_t kClosed = 65532;   // terminal: `edges` holds the bits of its float value
constexpr int kMaxActions = 65000;

constexpr int kVisitBits = 24;
constexpr std::uint32_t kVisitMask = (1u << kVisitBits) - 1;
constexpr std::uint32_t kOneInFlight = 1u << kVisitBits;
constexpr std::uint32_t kMaxInFlight = 255;

struct Node {
  double value_sum;     // of returns from this node on, the reward into it not included
  float reward;         // of the edge into this node
  std::int32_t parent;  // -1 at the root, which is node 0
  std::uint32_t edges;  // first word of its block
  std::uint16_t action;
  std::uint16_t num_actions;
};
constexpr std::size_t kBytesPerNode = sizeof(Node) + sizeof(double);
constexpr std::size_t kBytesPerEdge = sizeof(float) + sizeof(std::uint32_t) + sizeof(std::int32_t);
static_assert(kBytesPerNode <= 32, "a node must fit 32 bytes");
static_assert(kBytesPerEdge <= 12, "an edge must fit 12 bytes");

// What sequential halving keeps for one root; drawn again whenever the root changes.
struct GumbelRoot {
  std::vector<double> logit;         // gumbel + log prior, one per action
  std::vector<std::int32_t> before;  // visits when the root was set up (a kept subtree has some)
  std::vector<std::int32_t> schedule;
};

struct alignas(64) Tree {
  Node* nodes;
  double* q;
  std::uint32_t* words;
  std::int32_t num_nodes;
  std::uint32_t num_edges;
  std::uint32_t visits;     // of the root
  std::uint32_t in_flight;  // descents that wait for update()
  double q_min, q_max;
  bool full;
  bool halving;  // the root picks by sequential halving: see roots_

  float* priors(const Node& node) { return reinterpret_cast<float*>(words + node.edges); }
  std::uint32_t* visit_words(const Node& node) { return words + node.edges + node.num_actions; }
  std::int32_t* children(const Node& node) {
    return reinterpret_cast<std::int32_t*>(words + node.edges + 2 * static_cast<std::uint32_t>(node.num_actions));
  }
  bool expanded(const Node& node) const { return node.num_actions <= kMaxActions; }
  // Visits of a node other than the root stand in its parent's block.
  // What hangs under a node that was closed later (all its actions failed) has no block to stand in.
  bool linked(const Node& node) const { return node.parent >= 0 && expanded(nodes[node.parent]); }
  std::uint32_t& visit_word(const Node& node) { return visit_words(nodes[node.parent])[node.action]; }
};

static_assert(sizeof(Tree) == 64, "a cache line per tree");

// What is rarely read of a root.
struct Root {
  std::uint32_t epoch = 0;  // how often the root has changed: selects its random stream
  GumbelRoot gumbel;
};

// Rows of leaves, as select() writes and update() reads them; arrays of `count` int32.
struct LeafRows {
  std::int32_t* tree;
  std::int32_t* node;
  std::int32_t* parent;
  std::int32_t* action;
  std::int32_t* status;
};

// One answer per leaf row; rows whose status is not kEvaluate are not read.
struct Answers {
  const double* values = nullptr;          // [count]
  const float* priors = nullptr;           // [count, width], null: nothing is expanded
  std::int64_t width = 0;
  const std::int32_t* counts = nullptr;    // [count] actions per row, null: width
  const float* rewards = nullptr;          // [count] of the edge into the leaf, null: 0
  const std::uint8_t* terminal = nullptr;  // [count] close the leaf with its value, null: none
};

class TreeBatch {
 public:
  TreeBatch(std::int32_t num_trees, std::int32_t max_nodes, std::int64_t max_edges, const Config& config);
  TreeBatch(const TreeBatch&) = delete;
  TreeBatch& operator=(const TreeBatch&) = delete;

  std::int32_t num_trees() const { return static_cast<std::int32_t>(trees_.size()); }
  std::int32_t max_nodes() const { return max_nodes_; }
  std::int64_t max_edges() const { return max_edges_; }
  std::size_t arena_bytes() const { return stride_ * trees_.size(); }
  const Config& config() const { return config_; }
  Tree& tree(std::int32_t index) { return trees_[index]; }
  Tree& checked_tree(std::int32_t index);

  // Writes `leaves` rows for each of the `count` trees (null: all), tree after tree.
  void select(const std::int32_t* which, std::int64_t count, int leaves, LeafRows out);
  // Expands each leaf (or closes it) and backs its value up. Every row is checked before anything changes.
  void update(std::int64_t count, const LeafRows& rows, const Answers& answers);
  // The two halves of update(), for callers that have the priors before the values.
  void expand(std::int64_t count, const LeafRows& rows, const Answers& answers);
  void backup(std::int64_t count, const LeafRows& rows, const double* values);
  // Takes leaves out of flight; with `fail` the edges into them are never chosen again.
  void drop(std::int64_t count, const LeafRows& rows, bool fail);

  // Makes the child under `action` the root and frees the rest; action < 0 or an unvisited one empties the
  // tree. Returns, per kept node, the id it had.
  std::vector<std::int32_t> advance_root(std::int32_t index, std::int32_t action);
  void reset(std::int32_t index);
  // Mixes Dirichlet(alpha) noise into the root's priors: (1 - fraction) P + fraction noise.
  void add_root_noise(std::int32_t index, double alpha, double fraction);
  // Sequential halving's answer: among the most visited actions the one of the highest score; -1 without one.
  std::int32_t gumbel_action(std::int32_t index);

  // One tree at a time, unchecked: what the closed loop is made of.
  Status select_one(std::int32_t index, std::int32_t* node);
  void answer_one(std::int32_t index, std::int32_t node, const float* priors, double prior_sum, std::int32_t actions,
                  float reward, bool terminal, double value);
  void drop_one(std::int32_t index, std::int32_t node);

 private:
  struct Cursor;
  void check_select(const std::int32_t* which, std::int64_t begin, std::int64_t end, int leaves);
  void select_trees(const std::int32_t* which, std::int64_t begin, std::int64_t end, int leaves, const LeafRows& out);
  bool descend(Cursor& cursor);
  void finish(Cursor& cursor, Status status);
  void expand_leaf(Tree& tree, std::int32_t id, const float* priors, double prior_sum, std::int32_t actions);
  void close_leaf(Tree& tree, std::int32_t id, double value);
  void backup_path(Tree& tree, std::int32_t id, double value, std::uint32_t in_flight);
  bool backup_step(Tree& tree, std::int32_t& id, double& value, std::uint32_t in_flight);
  void leave_flight(Tree& tree, std::int32_t id);
  void claim(std::int64_t begin, std::int64_t end, const LeafRows& rows, const Answers& answers, double* sums);
  void unclaim(std::int64_t count, const LeafRows& rows);
  bool ended_here(Tree& tree, std::int32_t id);
  void apply(std::int64_t begin, std::int64_t end, const LeafRows& rows, const Answers& answers, const double* sums,
             bool backup);
  void run_rows(std::int64_t count, const LeafRows& rows, const Answers& answers, bool backup);
  void begin_gumbel(std::int32_t index);
  std::int32_t gumbel_choice(Tree& tree, bool final);
  Root& root_of(const Tree& tree) { return roots_[&tree - trees_.data()]; }

  Config config_;
  std::int32_t max_nodes_;
  std::int64_t max_edges_;
  std::size_t stride_;
  std::vector<Tree> trees_;
  std::vector<Root> roots_;
  std::vector<double> sums_;  // of each row's priors, from its check to its expansion
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<unsigned char, Free> arena_;
};

// Sum of a row of priors in index order; throws unless every prior is finite, >= 0 and the sum > 0.
double checked_prior_sum(const float* priors, std::int64_t n, std::int64_t row);

// How many visits a considered action must have at each simulation (Danihelka et al., ICLR 2022, algorithm 2).
std::vector<std::int32_t> halving_schedule(std::int32_t considered, std::int32_t simulations);

}  // namespace manus_fast::search

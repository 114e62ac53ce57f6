// The closed loop: select, evaluate, expand and backup without leaving C++, a tree at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "search/tree.h"
#include "search/world.h"

namespace manus_fast::search {

// Simulations over given answers: the e-th evaluation of tree b (the root's is the 0th) is row
// (e mod rounds) * trees + b of `priors` [rounds * trees, width] and `values` [rounds * trees].
void search_given(TreeBatch& batch, std::int32_t simulations, int leaves, std::int64_t rounds, const float* priors,
                  std::int64_t width, const double* values);

// Simulations over priors and values in [-1, 1) hashed from (seed, tree, node): no input at all.
void search_hashed(TreeBatch& batch, std::int32_t simulations, int leaves, std::int32_t actions, std::uint64_t seed);

// Simulations over worlds. Keeps the world of every node, so that a search can go on after advance().
class WorldSearch {
 public:
  explicit WorldSearch(TreeBatch& batch) : batch_(batch), worlds_(batch.num_trees()) {}

  // Empties the tree and puts it at `world`.
  void set_root(std::int32_t index, std::unique_ptr<World> world);
  // `simulations` descents in each tree that has a root world, `leaves` in flight at a time; a root that was
  // not evaluated yet is evaluated first, which is not counted.
  void run(std::int32_t simulations, int leaves);
  // Empties the tree; its root's world stays.
  void reset(std::int32_t index);
  // Steps into the child under `action`, keeping its subtree and worlds. Returns what the step gave.
  WorldStep advance(std::int32_t index, std::int32_t action);
  const World* world(std::int32_t index) const;

 private:
  struct Kept {
    std::vector<std::unique_ptr<World>> by_node;
    std::uint64_t evaluations = 0;
  };
  const World& world_of(std::int32_t index, std::int32_t node, WorldStep& step);
  void evaluate(std::int32_t index, std::int32_t node, std::vector<float>& priors);

  TreeBatch& batch_;
  std::vector<Kept> worlds_;
};

}  // namespace manus_fast::search

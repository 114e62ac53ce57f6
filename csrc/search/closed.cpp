#include "search/closed.h"

#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "common/parallel.h"

namespace manus_fast::search {
namespace {

// Runs `simulations` descents in one tree; answer(node) evaluates a leaf. The root's own evaluation, if it
// is due, comes first and is not counted. Ends early when the tree is full.
template <typename Answer>
void run_tree(TreeBatch& batch, std::int32_t index, std::int32_t simulations, int leaves, const Answer& answer) {
  std::int32_t node = 0;
  Tree& tree = batch.tree(index);
  std::int32_t waiting[kMaxInFlight];
  // Answers the waiting leaves; when an evaluation throws, the rest are taken out of flight.
  const auto answer_all = [&](int count) {
    int i = 0;
    try {
      for (; i < count; ++i) answer(waiting[i]);
    } catch (...) {
      for (; i < count; ++i) batch.drop_one(index, waiting[i]);
      throw;
    }
  };
  if (tree.nodes[0].num_actions == kUnexpanded && batch.select_one(index, &waiting[0]) == kEvaluate) answer_all(1);
  for (std::int32_t done = 0; done < simulations;) {
    MF_CHECK(tree.visits + kMaxInFlight < kVisitMask, "run: tree ", index, " has used up its ", kVisitMask,
             " visits; advance or reset it");
    int count = 0, counted = 0;
    bool full = false;
    for (int leaf = 0; leaf < std::min(leaves, simulations - done); ++leaf) {
      const Status status = batch.select_one(index, &node);
      if (status == kEvaluate) waiting[count++] = node;
      if (status == kEvaluate || status == kTerminal) ++counted;
      full |= status == kFull;
    }
    answer_all(count);
    done += counted;
    if (full && counted == 0) return;
  }
}

void check_run(const TreeBatch& batch, std::int32_t simulations, int leaves) {
  MF_CHECK(simulations >= 0, "simulations: expected an integer >= 0, got ", simulations);
  MF_CHECK(leaves >= 1 && leaves <= static_cast<int>(kMaxInFlight), "leaves: expected 1 to ", kMaxInFlight, ", got ",
           leaves);
  for (std::int32_t index = 0; index < batch.num_trees(); ++index) {
    MF_CHECK(const_cast<TreeBatch&>(batch).tree(index).in_flight == 0, "run: expected no leaf in flight, tree ", index,
             " has some");
  }
}

}  // namespace

double random_rollout(const World& world, std::int32_t depth, double discount, Rng& rng) {
  std::unique_ptr<World> play = world.clone();
  double value = 0.0, weight = 1.0;
  for (std::int32_t turn = 0; turn < depth; ++turn) {
    const std::int32_t actions = play->num_actions();
    if (actions == 0) break;
    const WorldStep step = play->step(static_cast<std::int32_t>(rng.below(static_cast<std::uint32_t>(actions))));
    value += weight * step.reward;
    weight *= discount;
    if (step.terminal) break;
  }
  return value;
}

void search_given(TreeBatch& batch, std::int32_t simulations, int leaves, std::int64_t rounds, const float* priors,
                  std::int64_t width, const double* values) {
  check_run(batch, simulations, leaves);
  const std::int64_t trees = batch.num_trees();
  MF_CHECK(rounds >= 1, "priors: expected at least one row per tree, got none");
  MF_CHECK(width >= 1 && width <= kMaxActions, "priors: expected 1 to ", kMaxActions, " actions, got ", width);
  std::vector<double> sums(rounds * trees);
  parallel_for(rounds * trees, 1024, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      MF_CHECK(values[row] >= -1e100 && values[row] <= 1e100, "values[", row,
               "]: expected a number within +-1e100, got ", values[row]);
      sums[row] = checked_prior_sum(priors + row * width, width, row);
    }
  });
  parallel_for(trees, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      std::int64_t evaluation = 0;
      const std::int32_t b = static_cast<std::int32_t>(index);
      run_tree(batch, b, simulations, leaves, [&](std::int32_t node) {
        const std::int64_t row = evaluation++ % rounds * trees + index;
        batch.answer_one(b, node, priors + row * width, sums[row], static_cast<std::int32_t>(width), 0.0f, false,
                         values[row]);
      });
    }
  });
}

void search_hashed(TreeBatch& batch, std::int32_t simulations, int leaves, std::int32_t actions, std::uint64_t seed) {
  check_run(batch, simulations, leaves);
  MF_CHECK(actions >= 1 && actions <= kMaxActions, "actions: expected 1 to ", kMaxActions, ", got ", actions);
  parallel_for(batch.num_trees(), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> priors(actions);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int32_t b = static_cast<std::int32_t>(index);
      run_tree(batch, b, simulations, leaves, [&](std::int32_t node) {
        const std::uint64_t key = counter_hash(seed, index, node);
        double sum = 0.0;
        for (std::int32_t a = 0; a < actions; ++a) {
          priors[a] = static_cast<float>((mix64(key ^ (a + 1)) >> 40) + 1) * 0x1.0p-24f;
          sum += priors[a];
        }
        const double value = static_cast<double>(mix64(key) >> 11) * 0x1.0p-52 - 1.0;
        batch.answer_one(b, node, priors.data(), sum, actions, 0.0f, false, value);
      });
    }
  });
}

void WorldSearch::set_root(std::int32_t index, std::unique_ptr<World> world) {
  batch_.reset(index);
  Kept& kept = worlds_[index];
  kept.by_node.clear();
  kept.by_node.push_back(std::move(world));
}

const World* WorldSearch::world(std::int32_t index) const {
  const Kept& kept = worlds_[index];
  return kept.by_node.empty() ? nullptr : kept.by_node[0].get();
}

void WorldSearch::reset(std::int32_t index) {
  batch_.reset(index);
  std::vector<std::unique_ptr<World>>& worlds = worlds_[index].by_node;
  if (!worlds.empty()) worlds.resize(1);
}

// The world of a node, made from the nearest one above it that is there: nodes that were expanded from outside of this
// loop have none yet. `step` is what the turn into the node gave. A world is kept only once its step has succeeded.
const World& WorldSearch::world_of(std::int32_t index, std::int32_t id, WorldStep& step) {
  std::vector<std::unique_ptr<World>>& worlds = worlds_[index].by_node;
  Node& node = batch_.tree(index).nodes[id];
  if (static_cast<std::size_t>(id) >= worlds.size()) worlds.resize(id + 1);
  if (worlds[id]) {
    step.reward = node.reward;
    return *worlds[id];
  }
  std::unique_ptr<World> world = world_of(index, node.parent, step).clone();
  MF_CHECK(node.action < world->num_actions(), "search: node ", id, " of tree ", index,
           " was reached by an action that its world does not have");
  step = world->step(node.action);
  MF_CHECK(std::isfinite(step.reward), "World::step: expected a finite reward, got ", step.reward);
  if (!batch_.tree(index).expanded(node)) node.reward = step.reward;
  worlds[id] = std::move(world);
  return *worlds[id];
}

void WorldSearch::evaluate(std::int32_t index, std::int32_t id, std::vector<float>& priors) {
  WorldStep step;
  const World& world = world_of(index, id, step);
  if (step.terminal) {
    batch_.answer_one(index, id, nullptr, 0.0, 0, step.reward, true, 0.0);
    return;
  }
  const std::int32_t actions = world.num_actions();
  MF_CHECK(actions >= 0 && actions <= kMaxActions, "World::num_actions: expected 0 to ", kMaxActions, ", got ",
           actions);
  priors.resize(std::max<std::size_t>(priors.size(), actions));
  Rng rng(counter_hash(batch_.config().seed, index, worlds_[index].evaluations++), 3);
  const double value = world.evaluate(priors.data(), rng);
  MF_CHECK(value >= -1e100 && value <= 1e100, "World::evaluate: expected a value within +-1e100, got ", value);
  const double sum = actions == 0 ? 0.0 : checked_prior_sum(priors.data(), actions, id);
  batch_.answer_one(index, id, priors.data(), sum, actions, step.reward, false, value);
}

void WorldSearch::run(std::int32_t simulations, int leaves) {
  check_run(batch_, simulations, leaves);
  parallel_for(batch_.num_trees(), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> priors;
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int32_t b = static_cast<std::int32_t>(index);
      if (!world(b)) continue;
      run_tree(batch_, b, simulations, leaves, [&](std::int32_t node) { evaluate(b, node, priors); });
    }
  });
}

WorldStep WorldSearch::advance(std::int32_t index, std::int32_t action) {
  Kept& kept = worlds_[index];
  MF_CHECK(world(index), "advance: expected a tree with a root world, tree ", index, " has none");
  MF_CHECK(action >= 0 && action < kept.by_node[0]->num_actions(), "action: expected one of ",
           kept.by_node[0]->num_actions(), " actions, got ", action);
  std::unique_ptr<World> next = kept.by_node[0]->clone();
  const WorldStep step = next->step(action);
  const std::vector<std::int32_t> old_ids = batch_.advance_root(index, action);
  std::vector<std::unique_ptr<World>> by_node(std::max<std::size_t>(1, old_ids.size()));
  for (std::size_t id = 0; id < old_ids.size(); ++id) {
    if (static_cast<std::size_t>(old_ids[id]) < kept.by_node.size()) by_node[id] = std::move(kept.by_node[old_ids[id]]);
  }
  by_node[0] = std::move(next);
  kept.by_node = std::move(by_node);
  return step;
}

}  // namespace manus_fast::search

// The tree engine without Python: the two scans against each other, random orders of operations with every
// invariant checked, and the same trees for any number of threads. Made to run under ASan, UBSan and TSan.
#include <doctest/doctest.h>

#include <cstring>
#include <deque>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "common/parallel.h"
#include "common/rng.h"
#include "search/closed.h"
#include "search/score.h"
#include "search/tabular.h"
#include "search/tree.h"

using namespace manus_fast;
using namespace manus_fast::search;

namespace {

struct Rows {
  explicit Rows(std::int64_t count) : data(5 * count), count(count) {}
  LeafRows view() {
    return {data.data(), data.data() + count, data.data() + 2 * count, data.data() + 3 * count,
            data.data() + 4 * count};
  }
  std::vector<std::int32_t> data;
  std::int64_t count;
};

// Visits and descents in flight add up along every edge; ids, blocks and budgets are in range.
void check_invariants(TreeBatch& batch) {
  for (std::int32_t b = 0; b < batch.num_trees(); ++b) {
    Tree& tree = batch.tree(b);
    REQUIRE(tree.num_nodes >= 1);
    REQUIRE(tree.num_nodes <= batch.max_nodes());
    REQUIRE(tree.num_edges <= batch.max_edges());
    std::int64_t edges = 0;
    for (std::int32_t id = 0; id < tree.num_nodes; ++id) {
      Node& node = tree.nodes[id];
      REQUIRE((id == 0) == (node.parent < 0));
      REQUIRE(node.parent < id);
      if (!tree.expanded(node)) continue;
      edges += node.num_actions;
      REQUIRE(node.edges + 3u * node.num_actions <= 3u * tree.num_edges);
      const bool linked = id == 0 || tree.linked(node);
      const std::uint32_t own = id == 0 ? tree.visits : linked ? tree.visit_word(node) & kVisitMask : 0;
      const std::uint32_t flying = id == 0 ? tree.in_flight : linked ? tree.visit_word(node) >> kVisitBits : 0;
      std::uint32_t visits = 0, in_flight = 0;
      for (int a = 0; a < node.num_actions; ++a) {
        const std::uint32_t word = tree.visit_words(node)[a];
        const std::int32_t child = tree.children(node)[a];
        visits += word & kVisitMask;
        in_flight += word >> kVisitBits;
        REQUIRE((child >= 0 || word == 0));
        if (child >= 0) {
          REQUIRE(child < tree.num_nodes);
          REQUIRE(tree.nodes[child].parent == id);
          REQUIRE(tree.nodes[child].action == a);
        }
      }
      if (linked) {
        REQUIRE(visits <= own);
        REQUIRE(in_flight <= flying);
      }
    }
    REQUIRE(edges <= tree.num_edges);
  }
}

std::uint64_t digest(TreeBatch& batch) {
  std::uint64_t hash = 0;
  for (std::int32_t b = 0; b < batch.num_trees(); ++b) {
    Tree& tree = batch.tree(b);
    hash = mix64(hash ^ tree.visits);
    for (std::int32_t id = 0; id < tree.num_nodes; ++id) {
      std::uint64_t bits;
      std::memcpy(&bits, &tree.nodes[id].value_sum, sizeof bits);
      hash = mix64(hash ^ bits);
      hash = mix64(hash ^ (tree.linked(tree.nodes[id]) ? tree.visit_word(tree.nodes[id]) : 0));
    }
  }
  return hash;
}

Config random_config(Rng& rng) {
  Config config;
  config.rule = rng.below(4) == 0 ? Rule::uct : Rule::puct;
  config.discount = rng.below(2) ? 1.0 : 0.9;
  config.normalize = rng.below(2);
  if (rng.below(3) == 0) {
    config.gumbel_considered = 1 + rng.below(8);
    config.gumbel_simulations = 1 + rng.below(64);
  }
  config.seed = rng.next();
  return config;
}

// Random calls in random order: leaves answered late, twice, wrongly, dropped; roots moved; memory run out.
void fuzz(std::uint64_t seed, int operations) {
  Rng rng(seed, 0);
  const std::int32_t trees = 1 + rng.below(4);
  TreeBatch batch(trees, 1 + rng.below(60), rng.below(200), random_config(rng));
  struct Leaf {
    std::int32_t tree, node;
  };
  std::vector<Leaf> flying;
  auto answer = [&](std::size_t count, int how) {
    count = std::min(count, flying.size());
    Rows rows(static_cast<std::int64_t>(count));
    std::vector<double> values(count);
    std::vector<float> priors(count * 8), rewards(count);
    std::vector<std::int32_t> counts(count);
    std::vector<std::uint8_t> terminal(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t pick = rng.below(static_cast<std::uint32_t>(flying.size()));
      rows.view().tree[i] = flying[pick].tree;
      rows.view().node[i] = flying[pick].node;
      flying.erase(flying.begin() + static_cast<std::ptrdiff_t>(pick));
      values[i] = rng.uniform() - 0.5;
      rewards[i] = static_cast<float>(rng.below(2));
      counts[i] = static_cast<std::int32_t>(rng.below(9));
      terminal[i] = rng.below(6) == 0;
      for (int a = 0; a < 8; ++a) priors[i * 8 + a] = static_cast<float>(rng.below(4) + (a == 0));
    }
    Answers answers{values.data(), priors.data(), 8, counts.data(), rewards.data(), terminal.data()};
    const LeafRows view = rows.view();
    const std::int64_t n = static_cast<std::int64_t>(count);
    if (count > 0 && rng.below(4) == 0) {  // first something wrong, which must change nothing
      const std::uint64_t before = digest(batch);
      const double value = values[count - 1];
      values[count - 1] = std::numeric_limits<double>::quiet_NaN();
      CHECK_THROWS_AS(batch.update(n, view, answers), std::invalid_argument);
      values[count - 1] = value;
      CHECK(digest(batch) == before);
    }
    if (how == 0) batch.update(n, view, answers);
    if (how == 1) {
      batch.expand(n, view, answers);
      check_invariants(batch);
      batch.backup(n, view, values.data());
    }
    if (how >= 2) batch.drop(n, view, how == 3);
    if (count > 0) CHECK_THROWS_AS(batch.drop(n, view, false), std::invalid_argument);
  };
  for (int operation = 0; operation < operations; ++operation) {
    switch (rng.below(8)) {
      case 0:
      case 1:
      case 2: {
        const int leaves = 1 + static_cast<int>(rng.below(4));
        Rows rows(std::int64_t{trees} * leaves);
        batch.select(nullptr, trees, leaves, rows.view());
        for (std::int64_t i = 0; i < rows.count; ++i) {
          if (rows.view().status[i] == kEvaluate) flying.push_back({rows.view().tree[i], rows.view().node[i]});
        }
        break;
      }
      case 3:
      case 4:
        answer(1 + rng.below(6), 0);
        break;
      case 5:
        answer(1 + rng.below(6), 1);
        break;
      case 6:
        answer(1 + rng.below(2), 2 + static_cast<int>(rng.below(2)));
        break;
      default: {
        answer(flying.size(), 0);
        const std::int32_t index = static_cast<std::int32_t>(rng.below(static_cast<std::uint32_t>(trees)));
        Tree& tree = batch.tree(index);
        const bool open = tree.expanded(tree.nodes[0]);
        if (open) batch.add_root_noise(index, 0.3, 0.25);
        if (batch.config().gumbel_considered > 0) batch.gumbel_action(index);
        const std::int32_t actions = open ? tree.nodes[0].num_actions : 0;
        const std::int32_t action = static_cast<std::int32_t>(rng.below(static_cast<std::uint32_t>(actions + 1))) - 1;
        const std::vector<std::int32_t> kept = batch.advance_root(index, action);
        CHECK(static_cast<std::size_t>(batch.tree(index).num_nodes) == std::max<std::size_t>(1, kept.size()));
      }
    }
    check_invariants(batch);
  }
}

std::shared_ptr<const Tables> random_tables(std::uint64_t seed, std::int32_t states, std::int32_t width) {
  Rng rng(seed, 1);
  auto tables = std::make_shared<Tables>();
  tables->width = width;
  for (std::int32_t s = 0; s < states; ++s) {
    tables->actions.push_back(static_cast<std::int32_t>(rng.below(static_cast<std::uint32_t>(width + 1))));
    tables->values.push_back(rng.uniform());
    for (std::int32_t a = 0; a < width; ++a) {
      tables->next.push_back(static_cast<std::int32_t>(rng.below(static_cast<std::uint32_t>(states))));
      tables->rewards.push_back(static_cast<float>(rng.uniform()));
      tables->terminal.push_back(rng.below(8) == 0);
      tables->priors.push_back(static_cast<float>(rng.uniform() + 0.01));
    }
  }
  return tables;
}

}  // namespace

TEST_CASE("search: random orders of operations keep every invariant") {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    fuzz(seed, 60);
  }
}

#ifdef __AVX512F__
TEST_CASE("search: the AVX-512 scan picks what the portable one picks") {
  Rng rng(7, 0);
  for (int actions : {1, 2, 7, 8, 9, 15, 16, 17, 50, 64, 129, 512}) {
    for (int round = 0; round < 40; ++round) {
      Config config;
      config.discount = 0.9;
      config.normalize = round % 2;
      config.c = round % 5 == 0 ? 0.0 : 1.25;  // 0: many equal scores
      TreeBatch batch(1, 600, 200000, config);
      Tree& tree = batch.tree(0);
      std::vector<float> priors(static_cast<std::size_t>(actions));
      for (int simulation = 0; simulation < 400; ++simulation) {
        std::int32_t leaf;
        if (batch.select_one(0, &leaf) != kEvaluate) break;
        double sum = 0.0;
        for (float& prior : priors) {
          prior = static_cast<float>(rng.below(4)) + 0.5f;
          sum += prior;
        }
        const double value = round % 3 == 0 ? 0.0 : rng.uniform();
        batch.answer_one(0, leaf, priors.data(), sum, actions, static_cast<float>(rng.below(2)), false, value);
        if (rng.below(10) == 0) {
          const std::uint32_t at = rng.below(static_cast<std::uint32_t>(actions));
          tree.priors(tree.nodes[0])[at] = -1.0f;  // a failed action, at times all of them
        }
        for (std::int32_t id = 0; id < tree.num_nodes; id += 1 + tree.num_nodes / 8) {
          const Node& node = tree.nodes[id];
          if (!tree.expanded(node)) continue;
          const std::uint32_t visits = id == 0 ? tree.visits : tree.visit_word(node) & kVisitMask;
          const bool normalize = config.normalize && tree.q_max > tree.q_min;
          const double mean = mean_value(node, visits, 0);
          const int fast = normalize ? best_action_avx512<true>(tree, node, mean, config)
                                     : best_action_avx512<false>(tree, node, mean, config);
          REQUIRE(fast == best_action_portable(tree, node, visits, 0, config));
        }
      }
    }
  }
}
#endif

TEST_CASE("search: the same trees for any number of threads") {
  const int before = num_threads();
  std::vector<std::uint64_t> digests;
  for (int threads : {1, 2, 4, 7}) {
    set_num_threads(threads);
    TreeBatch batch(150, 101, 101 * 6, Config{});
    Rows rows(150 * 2);
    std::vector<double> values(300);
    std::vector<float> priors(300 * 6);
    for (int call = 0; call < 40; ++call) {
      batch.select(nullptr, 150, 2, rows.view());
      Rng rng(11, static_cast<std::uint64_t>(call));
      for (double& value : values) value = rng.uniform();
      for (float& prior : priors) prior = static_cast<float>(rng.uniform() + 0.01);
      batch.update(300, rows.view(), Answers{values.data(), priors.data(), 6});
    }
    search_hashed(batch, 10, 3, 6, 5);
    WorldSearch worlds(batch);
    const std::shared_ptr<const Tables> tables = random_tables(3, 40, 6);
    std::uint64_t hash = digest(batch);
    for (std::int32_t b = 0; b < 150; ++b) {
      worlds.set_root(b, std::make_unique<TabularWorld>(tables, b % 40, b % 2 ? 5 : 0, 1.0));
    }
    worlds.run(30, 3);
    for (std::int32_t b = 0; b < 150; ++b) {
      if (worlds.world(b)->num_actions() > 0) worlds.advance(b, 0);
    }
    worlds.run(20, 1);
    check_invariants(batch);
    digests.push_back(mix64(hash) ^ digest(batch));
  }
  set_num_threads(before);
  for (const std::uint64_t hash : digests) CHECK(hash == digests[0]);
}

TEST_CASE("search: a wrong row in the middle of many changes no tree, with threads too") {
  const int before = num_threads();
  set_num_threads(4);
  TreeBatch batch(400, 10, 100, Config{});
  Rows rows(400);
  batch.select(nullptr, 400, 1, rows.view());
  std::vector<double> values(400, 0.5);
  std::vector<float> priors(400 * 2, 1.0f);
  const std::uint64_t untouched = digest(batch);
  priors[2 * 333] = -1.0f;
  CHECK_THROWS_AS(batch.update(400, rows.view(), Answers{values.data(), priors.data(), 2}), std::invalid_argument);
  CHECK(digest(batch) == untouched);
  priors[2 * 333] = 1.0f;
  batch.update(400, rows.view(), Answers{values.data(), priors.data(), 2});
  check_invariants(batch);
  set_num_threads(before);
}

TEST_CASE("search: a world that throws leaves the other trees usable") {
  struct Broken final : World {
    std::unique_ptr<World> clone() const override { return std::make_unique<Broken>(*this); }
    std::int32_t num_actions() const override { return 2; }
    WorldStep step(std::int32_t) override { throw std::runtime_error("the world is gone"); }
    double evaluate(float* priors, Rng&) const override {
      priors[0] = priors[1] = 1.0f;
      return 0.0;
    }
  };
  TreeBatch batch(2, 10, 100, Config{});
  WorldSearch worlds(batch);
  worlds.set_root(0, std::make_unique<TabularWorld>(random_tables(1, 5, 3), 0, 0, 1.0));
  worlds.set_root(1, std::make_unique<Broken>());
  CHECK_THROWS_AS(worlds.run(5, 3), std::runtime_error);
  check_invariants(batch);
  CHECK(batch.tree(1).in_flight == 0);
  worlds.set_root(1, std::make_unique<TabularWorld>(random_tables(1, 5, 3), 0, 0, 1.0));
  worlds.run(5, 3);
  check_invariants(batch);
}

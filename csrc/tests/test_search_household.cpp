// Household games in the closed loop: clones, commands, ends, and the same trees for any number of threads.
#include <doctest/doctest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/parallel.h"
#include "common/rng.h"
#include "household/generator.h"
#include "search/closed.h"
#include "search/household_world.h"
#include "search/tree.h"

using namespace manus_fast;

namespace {

std::shared_ptr<const household::World> game(std::uint64_t index) {
  const household::Difficulty level = household::difficulty(1);
  return household::generate(
      household::recipe(household::Split::kTrain, index, 0, {household::GoalKind::kPlace}, 1000, 100000, level));
}

std::unique_ptr<search::HouseholdWorld> started(std::uint64_t index, std::int32_t max_steps, std::int32_t depth) {
  std::shared_ptr<const household::World> world = game(index);
  household::State state;
  world->reset(state);
  return std::make_unique<search::HouseholdWorld>(std::move(world), state, max_steps, depth, 0.99);
}

std::vector<std::int32_t> root_visits(search::TreeBatch& batch, std::int32_t index) {
  search::Tree& tree = batch.tree(index);
  std::vector<std::int32_t> out;
  for (int a = 0; a < tree.nodes[0].num_actions; ++a) {
    out.push_back(static_cast<std::int32_t>(tree.visit_words(tree.nodes[0])[a] & search::kVisitMask));
  }
  return out;
}

}  // namespace

TEST_CASE("household world: random play follows the rules, and a clone leaves its original alone") {
  Rng rng(7, 0);
  for (std::uint64_t index = 0; index < 20; ++index) {
    const std::unique_ptr<search::HouseholdWorld> world = started(index, 30, 0);
    const std::shared_ptr<const household::World> rules = game(index);
    household::State state;
    rules->reset(state);
    std::string text;
    bool over = false;
    for (int turn = 0; turn < 30 && !over; ++turn) {
      std::string commands;
      REQUIRE(world->num_actions() == rules->admissible(state, commands));
      const auto action = static_cast<std::int32_t>(rng.below(static_cast<std::uint32_t>(world->num_actions())));
      std::size_t begin = 0;
      for (std::int32_t i = 0; i < action; ++i) begin = commands.find('\n', begin) + 1;
      const std::unique_ptr<search::World> copy = world->clone();
      copy->step(0);
      const search::WorldStep step = world->step(action);
      REQUIRE(rules->step(state, commands.substr(begin, commands.find('\n', begin) - begin), text));
      CHECK(rules->hash(state) == rules->hash(world->state()));
      CHECK(step.terminal == (state.won != 0));
      CHECK(step.reward == (state.won ? 1.0f : 0.0f));
      over = step.terminal;
    }
    if (!over) CHECK(world->num_actions() == 0);  // out of steps
    CHECK_THROWS_AS(world->step(world->num_actions()), std::invalid_argument);
  }
}

TEST_CASE("household world: searches are the same for any number of threads and go on after a move") {
  const int before = num_threads();
  std::vector<std::vector<std::int32_t>> first;
  for (const int threads : {1, 4}) {
    set_num_threads(threads);
    search::Config config;
    config.discount = 0.99;
    config.seed = 3;
    search::TreeBatch batch(6, 256, 256 * 40, config);
    search::WorldSearch loop(batch);
    for (std::int32_t b = 0; b < 6; ++b) loop.set_root(b, started(b, 20, 10));
    loop.run(150, 2);
    std::vector<std::vector<std::int32_t>> visits;
    for (std::int32_t b = 0; b < 6; ++b) {
      visits.push_back(root_visits(batch, b));
      loop.advance(b, 0);
    }
    loop.run(50, 1);
    for (std::int32_t b = 0; b < 6; ++b) visits.push_back(root_visits(batch, b));
    if (threads == 1) first = visits;
    CHECK(visits == first);
  }
  set_num_threads(before);
}

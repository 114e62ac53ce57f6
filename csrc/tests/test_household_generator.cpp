// Generated games, the two experts, and batches of worlds.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "common/parallel.h"
#include "common/rng.h"
#include "household/batch.h"

using namespace manus_fast;
using namespace manus_fast::household;

namespace {

const std::vector<GoalKind> kAllKinds = {GoalKind::kLook, GoalKind::kPlace, GoalKind::kClean,
                                         GoalKind::kHeat, GoalKind::kCool,  GoalKind::kTwo};

Recipe task(Split split, std::uint64_t index, const Difficulty& d) {
  return recipe(split, index, 0, kAllKinds, 1000, 100000, d);
}

// All commands that can be carried out, by brute force over their text.
std::vector<std::string> commands(const World& world, const State& state) {
  std::string joined;
  world.admissible(state, joined);
  std::vector<std::string> out;
  for (std::size_t begin = 0; begin < joined.size();) {
    const std::size_t end = joined.find('\n', begin);
    out.push_back(joined.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

// The length of a shortest way to the goal, by breadth-first search over situations; -1 beyond `limit`.
int shortest(const World& world, const State& start, int limit) {
  if (world.goal_reached(start)) return 0;
  std::vector<State> frontier = {start}, next;
  std::unordered_set<std::uint64_t> seen = {world.hash(start)};
  std::string text;
  for (int depth = 1; depth <= limit; ++depth) {
    next.clear();
    for (const State& state : frontier) {
      for (const std::string& command : commands(world, state)) {
        State after = state;
        world.step(after, command, text);
        if (after.won) return depth;
        if (seen.insert(world.hash(after)).second) next.push_back(after);
      }
    }
    frontier.swap(next);
  }
  return -1;
}

}  // namespace

TEST_CASE("the vocabulary keeps objects only where they may be put") {
  const Vocabulary& words = vocabulary();
  for (std::size_t o = 0; o < words.objects.size(); ++o) {
    CAPTURE(words.objects[o].name);
    CHECK(words.objects[o].rooms != 0);
    if (o > 0) CHECK(words.objects[o - 1].name < words.objects[o].name);
    if (!(words.objects[o].properties & kPickupable)) continue;
    for (std::size_t r = 0; r < words.receptacles.size(); ++r) {
      CAPTURE(words.receptacles[r].name);
      if (words.objects[o].homes[r] > 0) CHECK(words.can_contain[r][o]);
    }
  }
}

TEST_CASE("the planner's plans are shortest ones, from any situation") {
  // Small enough for an exhaustive search.
  const Difficulty tiny = {4, 6, 3, 4, 2};
  int checked = 0, longest = 0;
  for (std::uint64_t index = 0; index < 90; ++index) {
    const auto world = generate(task(Split::kTrain, index, tiny));
    State state;
    world->reset(state);
    Rng rng(index, 5);
    std::string text;
    for (int restart = 0; restart < 3; ++restart) {
      for (int i = 0; i < restart * 6; ++i) {  // something was played before
        const std::vector<std::string> choices = commands(*world, state);
        world->step(state, choices[rng.below(static_cast<std::uint32_t>(choices.size()))], text);
      }
      const std::vector<Move> moves = plan(*world, state);
      const int length = static_cast<int>(moves.size());
      if (length > 7) continue;  // the search would take too long
      CAPTURE(index);
      CAPTURE(restart);
      CHECK(shortest(*world, state, 8) == length);
      ++checked;
      longest = std::max(longest, length);
    }
  }
  CHECK(checked > 150);
  CHECK(longest == 7);
}

TEST_CASE("every game is unsolved at first and solved by both experts, in every difficulty and split") {
  for (int level = 1; level <= 3; ++level) {
    for (const Split split : {Split::kTrain, Split::kValidSeen, Split::kValidUnseen}) {
      for (std::uint64_t index = 0; index < 300; ++index) {
        const Recipe r = task(split, index, difficulty(level));
        const auto world = generate(r);
        CHECK(world->num_receptacles() >= r.difficulty.min_receptacles);
        CHECK(world->num_receptacles() <= r.difficulty.max_receptacles);
        CHECK(world->num_objects() <= r.difficulty.max_objects);
        CHECK(world->num_objects() >= r.difficulty.min_objects);
        for (const ExpertKind kind : {ExpertKind::kPlanner, ExpertKind::kExplorer, ExpertKind::kSweep}) {
          State state;
          world->reset(state);
          REQUIRE_FALSE(state.won);
          const std::size_t planned = plan(*world, state).size();
          std::string command, text;
          int steps = 0;
          while (!state.won && steps < 200) {
            const Move move = next_move(*world, state, kind);
            REQUIRE(move.reason != Reason::kStuck);
            command.clear();
            world->command_text(move.command, command);
            REQUIRE(world->step(state, command, text));
            const std::string why = thought(*world, move);
            CHECK(std::count(why.begin(), why.end(), ' ') < 12);
            ++steps;
          }
          CHECK(state.won);
          const int least = static_cast<int>(planned);
          CHECK((kind == ExpertKind::kPlanner ? steps == least : steps >= least));
        }
      }
    }
  }
}

TEST_CASE("explorers know nothing but what they were told") {
  // Objects that were not seen are moved about: the moves until then stay the same.
  for (std::uint64_t index = 0; index < 60; ++index) {
    const auto world = generate(task(Split::kTrain, index, difficulty(2)));
    State state;
    world->reset(state);
    std::string command, text;
    for (int step = 0; step < 12 && !state.won; ++step) {
      const Move move = next_move(*world, state, ExpertKind::kExplorer);
      State other = state;
      for (int o = 0; o < world->num_objects(); ++o) {
        if (state.conditions[o] & kKnown || state.held == o) continue;
        for (int r = 0; r < world->num_receptacles(); ++r) {  // into an unseen receptacle that takes it
          if (state.has_seen(r) || r == state.place[o] || !world->can_contain(r, o)) continue;
          other.place[o] = static_cast<std::uint8_t>(r);
        }
      }
      for (int r = 0; r < world->num_receptacles(); ++r) {  // an unseen door elsewhere may be open or not
        if (state.has_seen(r) || world->spec().receptacles[r].location == state.location) continue;
        if (world->spec().receptacles[r].openable) other.opened[r >> 6] ^= 1ull << (r & 63);
      }
      if (!world->goal_reached(other)) CHECK(next_move(*world, other, ExpertKind::kExplorer).command == move.command);
      command.clear();
      world->command_text(move.command, command);
      world->step(state, command, text);
    }
  }
}

TEST_CASE("without a way to the goal the experts look around") {
  const auto solvable = generate(task(Split::kTrain, 1, difficulty(1)));
  WorldSpec spec = solvable->spec();
  spec.objects.clear();
  const World world(spec);
  State state;
  world.reset(state);
  CHECK(plan(world, state).empty());
  const Move move = next_move(world, state, ExpertKind::kPlanner);
  CHECK(move.reason == Reason::kStuck);
  CHECK(move.command.verb == Verb::kLookAround);
}

TEST_CASE("layouts and games are disjoint between the splits") {
  std::set<std::uint64_t> layouts[3];
  for (int split = 0; split < 3; ++split) {
    for (std::uint64_t index = 0; index < 3000; ++index) {
      const Recipe r = task(static_cast<Split>(split), index, difficulty(1));
      layouts[split].insert(layout_signature(r.room, layout_counts(r)));
    }
  }
  for (const std::uint64_t layout : layouts[2]) CHECK(layouts[0].count(layout) + layouts[1].count(layout) == 0);
  CHECK(layouts[2].size() > 100);
}

TEST_CASE("ranges that leave no room are refused") {
  CHECK_THROWS_AS(difficulty(0), std::invalid_argument);
  Recipe r = task(Split::kTrain, 0, difficulty(1));
  r.difficulty.min_receptacles = 9;
  CHECK_THROWS_AS(generate(r), std::invalid_argument);
  r = task(Split::kTrain, 3, difficulty(1));
  r.difficulty.min_receptacles = 1;
  r.difficulty.max_receptacles = 3;  // a kitchen has a fridge, a microwave, a sink and a countertop at least
  CHECK_THROWS_AS(generate(r), std::invalid_argument);
  r = task(Split::kTrain, 0, difficulty(1));
  r.difficulty.min_objects = r.difficulty.max_objects = 0;
  CHECK_THROWS_AS(generate(r), std::invalid_argument);
  r = task(Split::kTrain, 0, difficulty(1));
  r.room = static_cast<Room>(9);
  CHECK_THROWS_AS(generate(r), std::invalid_argument);
  CHECK_THROWS_AS(recipe(Split::kTrain, 0, 0, {}, 10, 10, difficulty(1)), std::invalid_argument);
  CHECK_THROWS_AS(recipe(Split::kTrain, 0, 0, kAllKinds, 0, 10, difficulty(1)), std::invalid_argument);
  CHECK_THROWS_AS(recipe(Split::kTrain, 0, 0, kAllKinds, 10, 5, difficulty(1)), std::invalid_argument);
}

TEST_CASE("a batch: threads, clone, save, restore, limits") {
  const int n = 200;
  std::vector<int> slots(n);
  std::vector<Recipe> recipes(n);
  for (int i = 0; i < n; ++i) {
    slots[i] = i;
    recipes[i] = task(Split::kTrain, i, difficulty(2));
  }
  std::vector<std::string> records;
  const int threads_before = num_threads();
  for (const int threads : {1, 2, 4}) {
    set_num_threads(threads);
    Batch batch(n, 6);
    batch.reset(slots, recipes);
    std::string record;
    std::vector<std::string> actions, thoughts;
    std::vector<float> reward(n);
    std::vector<std::uint8_t> terminated(n), truncated(n);
    std::vector<int> live = slots;
    for (int step = 0; step < 6; ++step) {
      batch.expert(live, ExpertKind::kExplorer, actions, thoughts);
      const std::vector<std::string_view> views(actions.begin(), actions.end());
      batch.step(live, views, reward.data(), terminated.data(), truncated.data());
      std::vector<int> next;
      for (std::size_t i = 0; i < live.size(); ++i) {
        record += batch.text(live[i]) + batch.commands(live[i]) + thoughts[i] + char('0' + terminated[i]);
        CHECK(reward[i] == float(terminated[i]));
        CHECK_FALSE((terminated[i] && truncated[i]));
        CHECK(bool(terminated[i] || truncated[i]) == (step == 5 || terminated[i]));
        if (!terminated[i]) next.push_back(live[i]);
      }
      live = next;
    }
    records.push_back(record);
    CHECK_FALSE(live.empty());
    CHECK_THROWS_AS(batch.step({live[0]}, {"look"}, reward.data(), terminated.data(), truncated.data()),
                    std::invalid_argument);  // over
  }
  CHECK(records[0] == records[1]);
  CHECK(records[0] == records[2]);
  set_num_threads(threads_before);

  Batch batch(3, 50);
  CHECK_THROWS_AS(batch.text(0), std::invalid_argument);  // no game yet
  CHECK_THROWS_AS(batch.save(0), std::invalid_argument);
  CHECK_THROWS_AS(batch.clone(0, 1), std::invalid_argument);
  batch.reset({0, 1}, {recipes[0], recipes[1]});
  CHECK_THROWS_AS(batch.reset({0, 0}, {recipes[0], recipes[1]}), std::invalid_argument);
  CHECK_THROWS_AS(batch.reset({3}, {recipes[0]}), std::invalid_argument);
  CHECK_THROWS_AS(batch.reset({-1}, {recipes[0]}), std::invalid_argument);
  CHECK_THROWS_AS(batch.clone(0, 3), std::invalid_argument);
  float reward;
  std::uint8_t terminated, truncated;
  const auto play = [&](Batch& b, int slot, const std::string& command) {
    b.step({slot}, {command}, &reward, &terminated, &truncated);
    return b.text(slot) + "|" + b.commands(slot);
  };
  std::vector<std::string> actions, thoughts;
  batch.expert({0}, ExpertKind::kPlanner, actions, thoughts);
  play(batch, 0, actions[0]);
  const std::string saved = batch.save(0);
  batch.clone(0, 1);
  batch.clone(0, 2);
  CHECK(batch.save(1) == saved);
  CHECK(batch.text(2) == batch.text(0));
  batch.expert({0}, ExpertKind::kPlanner, actions, thoughts);
  const std::string after = play(batch, 0, actions[0]);
  CHECK(play(batch, 1, actions[0]) == after);
  CHECK(batch.save(2) == saved);  // untouched by what its clones did
  batch.restore(0, saved);
  CHECK(batch.save(0) == saved);
  CHECK(play(batch, 0, actions[0]) == after);
  Batch other(1, 50);  // another batch, which has never seen the game
  other.restore(0, saved);
  CHECK(other.hash(0) == batch.hash(2));
  CHECK(play(other, 0, actions[0]) == after);

  CHECK_THROWS_AS(other.restore(0, ""), std::invalid_argument);
  CHECK_THROWS_AS(other.restore(0, saved + "x"), std::invalid_argument);
  CHECK_THROWS_AS(other.restore(1, saved), std::invalid_argument);
  for (std::size_t i = 0; i < saved.size(); i += 5) {
    std::string bad = saved;
    bad[i] = char(bad[i] ^ 0x55);
    CHECK_THROWS_AS(other.restore(0, bad), std::invalid_argument);
  }
}

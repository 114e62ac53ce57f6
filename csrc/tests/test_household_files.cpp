// What ALFWorld's game files have and generated rooms do not: objects whose own place is not their receptacle's,
// objects in two receptacles, receptacles out of reach, the words of 0.3. Expected texts are those of the real engine.
#include <doctest/doctest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "household/world.h"

using namespace manus_fast::household;

namespace {

// Places: 0 two shelves, 1 a safe, 2 the start. A third shelf is nowhere.
WorldSpec room() {
  WorldSpec spec;
  spec.receptacle_types = {"shelf", "safe"};
  spec.object_types = {"apple", "knife"};
  spec.can_contain = {{true, true}, {true, true}};
  const auto receptacle = [](const char* name, std::uint8_t type, std::uint8_t location, bool openable) {
    ReceptacleSpec r;
    r.name = name;
    r.type = type;
    r.location = location;
    r.openable = openable;
    return r;
  };
  spec.receptacles = {receptacle("shelf 3", 0, kNone, false), receptacle("shelf 2", 0, 0, false),
                      receptacle("shelf 1", 0, 0, false), receptacle("safe 1", 1, 1, true)};
  const auto object = [](const char* name, std::uint8_t type, std::uint16_t properties, std::uint8_t place,
                         std::uint8_t location, std::vector<std::uint8_t> also) {
    ObjectSpec o;
    o.name = name;
    o.type = type;
    o.properties = static_cast<std::uint16_t>(properties | kPickupable);
    o.receptacle = place;
    o.location = location;
    o.also = std::move(also);
    return o;
  };
  spec.objects = {object("apple 3", 0, kSliceable, 0, 0, {}), object("apple 2", 0, kSliceable, 1, 1, {3}),
                  object("apple 1", 0, kSliceable, 1, 0, {}), object("knife 1", 1, kKnife, 3, 1, {})};
  spec.start = 2;
  spec.goal.kind = GoalKind::kTwo;
  spec.goal.object_type = 0;
  spec.goal.receptacle_type = 1;
  spec.task = "put two apple in safe";
  return spec;
}

class Game {
 public:
  explicit Game(WorldSpec spec) : world(std::move(spec)) { world.reset(state); }

  std::string operator()(const std::string& command) {
    world.step(state, command, text);
    return text;
  }

  bool admits(const std::string& command) const {
    std::string joined = "\n";
    world.admissible(state, joined);
    Command parsed;
    const bool listed = joined.find("\n" + command + "\n") != std::string::npos;
    CHECK(listed == (world.parse(command, parsed) && world.applicable(state, parsed)));
    return listed;
  }

  World world;
  State state;
  std::string text;
};

}  // namespace

TEST_CASE("a receptacle out of reach is not listed and not gone to") {
  Game play(room());
  std::string intro;
  play.world.intro(play.state, intro);
  CHECK(intro.find("you see a shelf 2, a shelf 1, and a safe 1.") != std::string::npos);
  CHECK(!play.admits("go to shelf 3"));
  CHECK(play("go to shelf 3") == "Nothing happens.");
  WorldSpec nowhere = room();
  nowhere.start = kNone;
  CHECK_THROWS_AS(World(std::move(nowhere)), std::invalid_argument);
}

TEST_CASE("look tells what was taken from one receptacle here and put into the other") {
  Game play(room());
  CHECK(play("look") == "You are in the middle of a room. Looking quickly around you, you see nothing.");
  play("go to shelf 2");
  CHECK(play("look") == "You are facing the shelf 2, and shelf 1. Next to it, you see nothing.");
  play("take apple 1 from shelf 2");
  CHECK(play("look") == "You are facing the shelf 2, and shelf 1. Next to it, you see nothing.");
  play("move apple 1 to shelf 1");
  CHECK(play("look") == "You are facing the shelf 2, and shelf 1. Next to it, you see a apple 1.");
  play("take apple 1 from shelf 1");
  CHECK(play("look") == "You are facing the shelf 2, and shelf 1. Next to it, you see nothing.");
  // Taken from both, put back into the first: next to the second.
  play("move apple 1 to shelf 2");
  CHECK(play("look") == "You are facing the shelf 2, and shelf 1. Next to it, you see a apple 1.");
}

TEST_CASE("an object's own place is where it can be sliced, until it is taken there") {
  Game play(room());
  play("go to safe 1");
  play("open safe 1");
  CHECK(play("take knife 1 from safe 1") == "You pick up the knife 1 from the safe 1.");
  CHECK(play.admits("slice apple 2 with knife 1"));  // lies on shelf 2 and in the safe, its own place is here
  CHECK(!play.admits("slice apple 1 with knife 1"));
  play("go to shelf 1");
  CHECK(!play.admits("slice apple 2 with knife 1"));  // on shelf 2, but its own place is not here
  CHECK(play("slice apple 1 with knife 1") == "You sliced the apple 1 with the knife 1.");
  play("move knife 1 to shelf 1");
  play("take apple 2 from shelf 2");
  play("move apple 2 to shelf 2");
  play("take knife 1 from shelf 1");
  CHECK(play.admits("slice apple 2 with knife 1"));  // moved here
  play("go to safe 1");
  CHECK(play.admits("slice apple 2 with knife 1"));  // and still at its own place: it was not taken there
}

TEST_CASE("an object in two receptacles is taken from one and stays in the other") {
  Game play(room());
  play("go to safe 1");
  CHECK(play("open safe 1") == "You open the safe 1. The safe 1 is open. In it, you see a apple 2, and a knife 1.");
  play("go to shelf 2");
  CHECK(play("examine shelf 2") == "On the shelf 2, you see a apple 2, and a apple 1.");
  CHECK(play.admits("take apple 2 from shelf 2"));
  CHECK(!play.admits("take apple 2 from shelf 1"));
  const std::uint64_t before = play.world.hash(play.state);
  play("take apple 2 from shelf 2");
  CHECK(play.admits("examine apple 2"));
  CHECK(play("go to safe 1") == "You arrive at safe 1. The safe 1 is open. In it, you see a apple 2, and a knife 1.");
  CHECK(!play.admits("take apple 2 from safe 1"));  // the hand is full
  play("move apple 2 to safe 1");                   // where it is already: now in the safe alone
  CHECK(play("examine safe 1") == "The safe 1 is open. In it, you see a apple 2, and a knife 1.");
  play("take apple 2 from safe 1");
  CHECK(play("examine safe 1") == "The safe 1 is open. In it, you see a knife 1.");
  play("move apple 2 to safe 1");
  CHECK(play.state.won == 0);
  CHECK(play.world.hash(play.state) != before);
  // One object counts once, however many receptacles list it.
  play("go to shelf 2");
  play("take apple 1 from shelf 2");
  play("go to safe 1");
  play("move apple 1 to safe 1");
  CHECK(play.state.won == 1);
}

TEST_CASE("which slot says where an object is makes no difference to the hash") {
  Game there(room()), back(room());
  there("go to shelf 2");
  there("take apple 2 from shelf 2");
  there("move apple 2 to shelf 1");
  back("go to safe 1");
  back("open safe 1");
  back("take apple 2 from safe 1");
  back("go to shelf 1");
  back("move apple 2 to shelf 1");  // on both shelves, as the other one is in safe and shelf 1
  CHECK(back.world.hash(back.state) != there.world.hash(there.state));
  back("take apple 2 from shelf 2");
  back("go to safe 1");
  back("move apple 2 to safe 1");
  back("close safe 1");
  back("go to shelf 1");
  // On shelf 1 and in the safe in both, but in the second its own place is the safe's alone.
  CHECK(back.world.hash(back.state) != there.world.hash(there.state));
  back("take apple 2 from shelf 1");
  back("move apple 2 to shelf 1");
  CHECK(there("examine shelf 1") == back("examine shelf 1"));
  CHECK(there.world.lies_in(there.state, 1, 3));
  CHECK(back.world.lies_in(back.state, 1, 3));
  CHECK(there.world.hash(there.state) == back.world.hash(back.state));
}

TEST_CASE("the words of version 0.3") {
  WorldSpec spec = room();
  spec.help = false;
  spec.put_grammar = true;
  for (ReceptacleSpec& r : spec.receptacles) r.arrival = "loc 7";
  Game play(std::move(spec));
  CHECK(play("go to shelf 1") == "You arrive at loc 7. On the shelf 1, you see nothing.");
  CHECK(play("help") == "Nothing happens.");
  CHECK(!play.admits("help"));
  play("take apple 1 from shelf 2");
  CHECK(play("put apple 1 in/on shelf 1") == "You put the apple 1 in/on the shelf 1.");
}

TEST_CASE("limits of files are named") {
  WorldSpec spec = room();
  spec.objects[0].also.assign(kMaxExtras + 1, 1);
  CHECK_THROWS_AS(World(std::move(spec)), std::invalid_argument);
  spec = room();
  spec.objects[0].receptacle = kNone;
  spec.objects[0].also = {1};
  CHECK_THROWS_AS(World(std::move(spec)), std::invalid_argument);
  spec = room();
  for (int i = 0; i <= kMaxShared; ++i) {
    spec.receptacles.push_back(spec.receptacles[2]);
    spec.receptacles.back().name = "shelf " + std::to_string(10 + i);
  }
  CHECK_THROWS_AS(World(std::move(spec)), std::invalid_argument);
}

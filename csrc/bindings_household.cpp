#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "common/check.h"
#include "household/batch.h"

namespace py = pybind11;

namespace manus_fast {
namespace {

using namespace household;

py::str to_str(std::string_view text) { return py::str(text.data(), text.size()); }

// Views into the strings' own UTF-8; valid while `actions` lives (a tuple: no thread can take its strings away). A
// string that has no UTF-8 form (a lone surrogate) is no command of any world: it goes on as one that cannot match.
std::vector<std::string_view> views(const py::tuple& actions) {
  std::vector<std::string_view> out;
  out.reserve(actions.size());
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const py::object action = actions[i];
    MF_CHECK(PyUnicode_Check(action.ptr()), "actions[", i, "]: expected a str, got ", Py_TYPE(action.ptr())->tp_name);
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(action.ptr(), &size);
    if (text == nullptr) {
      PyErr_Clear();
      out.emplace_back();
    } else {
      out.emplace_back(text, static_cast<std::size_t>(size));
    }
  }
  return out;
}

py::list split_lines(const std::string& text, int count) {
  py::list out(count);
  std::size_t begin = 0;
  for (int i = 0; i < count; ++i) {
    const std::size_t end = text.find('\n', begin);
    out[i] = to_str(std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

Difficulty make_difficulty(int level, std::pair<int, int> receptacles, std::pair<int, int> objects, int copies) {
  Difficulty d = difficulty(level);
  const auto byte = [](int value, const char* what) {
    MF_CHECK(value >= 1 && value <= 255, what, ": expected numbers 1 … 255, got ", value);
    return static_cast<std::uint8_t>(value);
  };
  if (receptacles.first != 0) {
    d.min_receptacles = byte(receptacles.first, "receptacles");
    d.max_receptacles = byte(receptacles.second, "receptacles");
  }
  if (objects.first != 0) {
    d.min_objects = byte(objects.first, "objects");
    d.max_objects = byte(objects.second, "objects");
  }
  if (copies != 0) d.copies = byte(copies, "copies");
  return d;
}

GoalKind goal_kind(const std::string& name) {
  for (int i = 0; i < kGoalKinds; ++i) {
    if (name == kGoalNames[i]) return static_cast<GoalKind>(i);
  }
  MF_CHECK(false, "task type: unknown name '", name, "'");
  return GoalKind::kPlace;
}

ExpertKind expert_kind(const std::string& name) {
  if (name == "planner") return ExpertKind::kPlanner;
  if (name == "explorer") return ExpertKind::kExplorer;
  if (name == "sweep") return ExpertKind::kSweep;
  MF_CHECK(false, "kind: expected planner, explorer or sweep, got '", name, "'");
  return ExpertKind::kPlanner;
}

Room room(const std::string& name) {
  for (int i = 0; i < kRooms; ++i) {
    if (name == kRoomNames[i]) return static_cast<Room>(i);
  }
  MF_CHECK(false, "room: unknown name '", name, "'");
  return Room::kKitchen;
}

Split split(const std::string& name) {
  if (name == "train") return Split::kTrain;
  if (name == "valid_seen") return Split::kValidSeen;
  if (name == "valid_unseen") return Split::kValidUnseen;
  MF_CHECK(false, "split: expected train, valid_seen or valid_unseen, got '", name, "'");
  return Split::kTrain;
}

using Place = int;  // in specs from Python: an index, or -1 for none

std::uint8_t index(Place value, const char* what) {
  MF_CHECK(value >= -1 && value < kNone, what, ": expected -1 … ", kNone - 1, ", got ", value);
  return value < 0 ? kNone : static_cast<std::uint8_t>(value);
}

Role role(const std::string& name) {
  if (name == "sink") return Role::kSink;
  if (name == "microwave") return Role::kMicrowave;
  if (name == "fridge") return Role::kFridge;
  MF_CHECK(name.empty(), "role: expected sink, microwave, fridge or none, got '", name, "'");
  return Role::kPlain;
}

// The bits of `names` in a table of (name, bit).
template <typename Bits>
Bits bits(const std::vector<std::string>& names, const std::vector<std::pair<const char*, Bits>>& table) {
  unsigned out = 0;
  for (const std::string& name : names) {
    bool known = false;
    for (const auto& [word, bit] : table) {
      if (name == word) out |= bit, known = true;
    }
    MF_CHECK(known, "objects: unknown property '", name, "'");
  }
  return static_cast<Bits>(out);
}

std::shared_ptr<World> make_world(const py::dict& table) {
  WorldSpec spec;
  spec.receptacle_types = table["receptacle_types"].cast<std::vector<std::string>>();
  spec.object_types = table["object_types"].cast<std::vector<std::string>>();
  spec.can_contain.assign(spec.receptacle_types.size(), std::vector<bool>(spec.object_types.size()));
  for (const auto& [r, o] : table["can_contain"].cast<std::vector<std::pair<std::size_t, std::size_t>>>()) {
    MF_CHECK(r < spec.receptacle_types.size() && o < spec.object_types.size(), "can_contain: index out of range");
    spec.can_contain[r][o] = true;
  }
  for (const py::handle item : table["receptacles"]) {
    ReceptacleSpec r;
    r.name = item["name"].cast<std::string>();
    r.type = index(item["type"].cast<Place>(), "receptacle type");
    r.location = index(item["location"].cast<Place>(), "receptacle location");
    r.openable = item["openable"].cast<bool>();
    r.opened = item["opened"].cast<bool>();
    r.role = role(item["role"].cast<std::string>());
    r.arrival = item["arrival"].cast<std::string>();
    spec.receptacles.push_back(std::move(r));
  }
  for (const py::handle item : table["objects"]) {
    ObjectSpec o;
    o.name = item["name"].cast<std::string>();
    o.type = index(item["type"].cast<Place>(), "object type");
    o.properties = bits<std::uint16_t>(
        item["properties"].cast<std::vector<std::string>>(),
        {{"pickupable", kPickupable}, {"cleanable", kCleanable}, {"heatable", kHeatable}, {"coolable", kCoolable},
         {"sliceable", kSliceable}, {"toggleable", kToggleable}, {"holds", kHolds}, {"knife", kKnife}});
    o.conditions = bits<std::uint8_t>(
        item["states"].cast<std::vector<std::string>>(),
        {{"isclean", kClean}, {"ishot", kHot}, {"iscool", kCool}, {"issliced", kSliced}, {"istoggled", kToggled}});
    for (const Place place : item["receptacles"].cast<std::vector<Place>>()) {
      (o.receptacle == kNone ? o.receptacle : o.also.emplace_back()) = index(place, "object receptacle");
    }
    o.location = index(item["location"].cast<Place>(), "object location");
    for (const Place inner : item["inside"].cast<std::vector<Place>>()) o.inside.push_back(index(inner, "inside"));
    spec.objects.push_back(std::move(o));
  }
  const py::dict goal = table["goal"];
  spec.goal.kind = goal_kind(goal["kind"].cast<std::string>());
  spec.goal.object_type = index(goal["object"].cast<Place>(), "goal object");
  spec.goal.receptacle_type = index(goal["receptacle"].cast<Place>(), "goal receptacle");
  spec.goal.toggle_type = index(goal["toggle"].cast<Place>(), "goal toggle");
  spec.start = index(table["start"].cast<Place>(), "start");
  spec.task = table["task"].cast<std::string>();
  spec.put_grammar = table["put"].cast<bool>();
  spec.help = table["help"].cast<bool>();
  return std::make_shared<World>(std::move(spec));
}

}  // namespace

void register_household(py::module_& module) {
  py::module_ m = module.def_submodule("household", "Native household worlds; use manus_fast.envs.household.");
  m.attr("task_types") = py::tuple(py::cast(std::vector<std::string>(kGoalNames.begin(), kGoalNames.end())));

  py::class_<Difficulty>(m, "Difficulty")
      .def(py::init(&make_difficulty), py::arg("level"), py::arg("receptacles") = std::pair<int, int>(0, 0),
           py::arg("objects") = std::pair<int, int>(0, 0), py::arg("copies") = 0)
      .def_property_readonly("receptacles", [](const Difficulty& d) {
        return py::make_tuple(d.min_receptacles, d.max_receptacles); })
      .def_property_readonly("objects", [](const Difficulty& d) {
        return py::make_tuple(d.min_objects, d.max_objects); })
      .def_readonly("copies", &Difficulty::copies);

  py::class_<Recipe>(m, "Recipe")
      .def(py::init([](const std::string& split_name, const std::string& type, const std::string& room_name,
                       std::uint32_t layout, std::uint64_t seed, const Difficulty& d, bool put_grammar) {
             Recipe r;
             r.split = split(split_name);
             r.kind = goal_kind(type);
             r.room = room(room_name);
             r.layout = layout;
             r.seed = seed;
             r.difficulty = d;
             r.put_grammar = put_grammar;
             return r;
           }),
           py::arg("split"), py::arg("type"), py::arg("room"), py::arg("layout"), py::arg("seed"),
           py::arg("difficulty"), py::arg("put_grammar") = false)
      .def_property_readonly("type", [](const Recipe& r) { return kGoalNames[static_cast<int>(r.kind)]; })
      .def_property_readonly("room", [](const Recipe& r) { return kRoomNames[static_cast<int>(r.room)]; })
      .def_readonly("layout", &Recipe::layout)
      .def_readonly("seed", &Recipe::seed)
      .def("layout_counts", [](const Recipe& r) {
        py::dict out;
        const std::vector<std::uint8_t> counts = layout_counts(r);
        for (std::size_t c = 0; c < counts.size(); ++c) {
          if (counts[c] > 0) out[py::str(vocabulary().receptacles[c].name)] = int{counts[c]};
        }
        return out;
      });

  m.def(
      "recipe",
      [](const std::string& split_name, std::uint64_t index, std::uint64_t base_seed,
         const std::vector<std::string>& types, std::uint32_t layouts, std::uint32_t num_train,
         const Difficulty& d) {
        std::vector<GoalKind> kinds;
        for (const std::string& type : types) kinds.push_back(goal_kind(type));
        return recipe(split(split_name), index, base_seed, kinds, layouts, num_train, d);
      },
      py::arg("split"), py::arg("index"), py::arg("base_seed"), py::arg("types"), py::arg("layouts"),
      py::arg("num_train"), py::arg("difficulty"));

  // A game given as tables (see manus_fast/envs/alfworld/problem.py); ValueError where they contradict themselves.
  py::class_<World, std::shared_ptr<World>>(m, "World")
      .def(py::init(&make_world), py::arg("table"))
      .def("fingerprint", &World::fingerprint);

  py::class_<Batch>(m, "Batch")
      .def(py::init<int, int>(), py::arg("slots"), py::arg("max_steps"))
      .def_property_readonly("slots", &Batch::slots)
      .def("reset", &Batch::reset, py::arg("slots"), py::arg("recipes"), py::call_guard<py::gil_scoped_release>())
      .def(
          "load",
          [](Batch& batch, const std::vector<int>& slots, const std::vector<std::shared_ptr<World>>& worlds) {
            const std::vector<std::shared_ptr<const World>> given(worlds.begin(), worlds.end());
            const py::gil_scoped_release release;
            batch.load(slots, given);
          },
          py::arg("slots"), py::arg("worlds"))
      .def(
          "step",
          [](Batch& batch, const std::vector<int>& slots, const py::sequence& actions) {
            const py::tuple held(actions);
            const std::vector<std::string_view> commands = views(held);
            const auto n = static_cast<py::ssize_t>(slots.size());
            py::array_t<float> reward(n);
            py::array_t<bool> terminated(n), truncated(n);
            float* r = reward.mutable_data();
            auto* term = reinterpret_cast<std::uint8_t*>(terminated.mutable_data());
            auto* trunc = reinterpret_cast<std::uint8_t*>(truncated.mutable_data());
            {
              const py::gil_scoped_release release;
              batch.step(slots, commands, r, term, trunc);
            }
            return py::make_tuple(reward, terminated, truncated);
          },
          py::arg("slots"), py::arg("actions"))
      .def(
          "texts",
          [](const Batch& batch, const std::vector<int>& slots) {
            py::list out(slots.size());
            for (std::size_t i = 0; i < slots.size(); ++i) out[i] = to_str(batch.text(slots[i]));
            return out;
          },
          py::arg("slots"))
      .def(
          "admissible",
          [](const Batch& batch, const std::vector<int>& slots) {
            py::list out(slots.size());
            for (std::size_t i = 0; i < slots.size(); ++i) {
              out[i] = split_lines(batch.commands(slots[i]), batch.num_commands(slots[i]));
            }
            return out;
          },
          py::arg("slots"))
      .def(
          "expert",
          [](const Batch& batch, const std::vector<int>& slots, const std::string& kind, bool brief) {
            std::vector<std::string> actions, thoughts;
            const ExpertKind which = expert_kind(kind);
            {
              const py::gil_scoped_release release;
              batch.expert(slots, which, actions, thoughts, brief);
            }
            return py::make_tuple(actions, thoughts);
          },
          py::arg("slots"), py::arg("kind"), py::arg("brief") = false)
      .def("clone", &Batch::clone, py::arg("source"), py::arg("destination"))
      .def("save", [](const Batch& batch, int slot) { return py::bytes(batch.save(slot)); }, py::arg("slot"))
      .def("restore", [](Batch& batch, int slot, const py::bytes& bytes) {
        batch.restore(slot, std::string_view(bytes));
      }, py::arg("slot"), py::arg("state"))
      .def(
          "progress",
          [](const Batch& batch, const std::vector<int>& slots) {
            std::vector<float> out(slots.size());
            for (std::size_t i = 0; i < slots.size(); ++i) out[i] = batch.progress(slots[i]);
            return out;
          },
          py::arg("slots"))
      .def("hash", &Batch::hash, py::arg("slot"))
      .def("fingerprint", [](const Batch& batch, int slot) { return batch.world(slot).fingerprint(); }, py::arg("slot"))
      .def("steps", [](const Batch& batch, int slot) { return int{batch.state(slot).steps}; }, py::arg("slot"));
}

}  // namespace manus_fast

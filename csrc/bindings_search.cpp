#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "bindings.h"
#include "common/check.h"
#include "household/batch.h"
#include "search/closed.h"
#include "search/household_world.h"
#include "search/score.h"
#include "search/tabular.h"
#include "search/tree.h"

namespace py = pybind11;

namespace manus_fast {
namespace {

using search::Answers;
using search::Config;
using search::LeafRows;
using search::Tree;
using search::TreeBatch;

constexpr int kDense = py::array::c_style | py::array::forcecast;
template <typename T>
using Array = py::array_t<T, kDense>;
template <typename T>
using Optional = std::optional<Array<T>>;

// A batch, the worlds of a search over tables, and a lock: the GIL is released while trees are worked on.
struct Batch {
  Batch(std::int32_t num_trees, std::int32_t max_nodes, std::int64_t max_edges, const Config& config)
      : trees(num_trees, max_nodes, max_edges, config) {}
  TreeBatch trees;
  std::unique_ptr<search::WorldSearch> worlds;
  std::shared_ptr<const search::Tables> tables;
  std::mutex mutex;
};

template <typename Body>
auto unlocked(Batch& batch, const Body& body) {
  const py::gil_scoped_release release;
  const std::lock_guard<std::mutex> lock(batch.mutex);
  return body();
}

LeafRows leaf_rows(std::int32_t* data, std::int64_t count) {
  return LeafRows{data, data + count, data + 2 * count, data + 3 * count, data + 4 * count};
}

// int32 numbers of whatever integers came; forcing a cast would cut fractions off and wrap large numbers around.
Array<std::int32_t> integers(const py::object& given, const char* name) {
  if (py::isinstance<py::array_t<std::int32_t>>(given)) return Array<std::int32_t>::ensure(given);
  const py::array array = py::array::ensure(given);
  MF_CHECK(array && (array.size() == 0 || array.dtype().kind() == 'i' || array.dtype().kind() == 'u'), name,
           ": expected integers, got ", std::string(py::str(array ? py::object(array.dtype()) : py::type::of(given))));
  const Array<std::int64_t> wide = Array<std::int64_t>::ensure(array);
  for (py::ssize_t i = 0; i < wide.size(); ++i) {
    MF_CHECK(wide.data()[i] >= INT32_MIN && wide.data()[i] <= INT32_MAX, name, ": expected integers of 32 bits, got ",
             wide.data()[i]);
  }
  return Array<std::int32_t>::ensure(wide);
}

LeafRows leaf_rows(const Array<std::int32_t>& leaves) {
  MF_CHECK(leaves.ndim() == 2 && leaves.shape(0) == 5, "leaves: expected the rows that select() gave, an array [5, n]");
  return leaf_rows(const_cast<std::int32_t*>(leaves.data()), leaves.shape(1));  // read only from here on
}

template <typename T>
const T* checked(const Optional<T>& array, std::int64_t count, const char* name) {
  if (!array) return nullptr;
  MF_CHECK(array->ndim() == 1 && array->shape(0) == count, name, ": expected one entry per leaf [", count,
           "], got ", array->ndim(), " dimensions and ", array->size(), " entries");
  return array->data();
}

py::array_t<std::int32_t> select(Batch& batch, int leaves, const std::optional<py::object>& given) {
  Optional<std::int32_t> which;
  if (given) which = integers(*given, "trees");
  MF_CHECK(!which || which->ndim() == 1, "trees: expected a list of indices, got ", which->ndim(), " dimensions");
  const std::int64_t trees = which ? which->size() : batch.trees.num_trees();
  MF_CHECK(leaves >= 1 && leaves <= static_cast<int>(search::kMaxInFlight), "leaves: expected 1 to ",
           search::kMaxInFlight, ", got ", leaves);
  py::array_t<std::int32_t> out({std::int64_t{5}, trees * leaves});
  const LeafRows rows = leaf_rows(out.mutable_data(), trees * leaves);
  const std::int32_t* indices = which ? which->data() : nullptr;
  unlocked(batch, [&] { batch.trees.select(indices, trees, leaves, rows); });
  return out;
}

Answers answers_of(std::int64_t count, const Optional<double>& values, const Optional<float>& priors,
                   const Optional<std::int32_t>& counts, const Optional<float>& rewards,
                   const Optional<bool>& terminal) {
  Answers answers;
  answers.values = checked(values, count, "values");
  answers.counts = checked(counts, count, "counts");
  answers.rewards = checked(rewards, count, "rewards");
  answers.terminal = reinterpret_cast<const std::uint8_t*>(checked(terminal, count, "terminal"));
  if (priors) {
    MF_CHECK(priors->ndim() == 2 && priors->shape(0) == count, "priors: expected one row per leaf [", count,
             ", actions], got ", priors->ndim(), " dimensions and ", priors->size(), " entries");
    answers.priors = priors->data();
    answers.width = priors->shape(1);
    MF_CHECK(counts || answers.width <= search::kMaxActions, "priors: expected at most ", search::kMaxActions,
             " actions, got ", answers.width);
  }
  return answers;
}

void update(Batch& batch, const Array<std::int32_t>& leaves, const Array<double>& values,
            const Optional<float>& priors, const std::optional<py::object>& given, const Optional<float>& rewards,
            const Optional<bool>& terminal) {
  const Optional<std::int32_t> counts = given ? Optional<std::int32_t>(integers(*given, "counts")) : std::nullopt;
  const LeafRows rows = leaf_rows(leaves);
  const std::int64_t count = leaves.shape(1);
  const Answers answers = answers_of(count, values, priors, counts, rewards, terminal);
  unlocked(batch, [&] { batch.trees.update(count, rows, answers); });
}

void expand(Batch& batch, const Array<std::int32_t>& leaves, const Array<float>& priors,
            const std::optional<py::object>& given, const Optional<float>& rewards, const Optional<bool>& terminal) {
  const Optional<std::int32_t> counts = given ? Optional<std::int32_t>(integers(*given, "counts")) : std::nullopt;
  const LeafRows rows = leaf_rows(leaves);
  const std::int64_t count = leaves.shape(1);
  const Answers answers = answers_of(count, std::nullopt, priors, counts, rewards, terminal);
  unlocked(batch, [&] { batch.trees.expand(count, rows, answers); });
}

void backup(Batch& batch, const Array<std::int32_t>& leaves, const Array<double>& values) {
  const LeafRows rows = leaf_rows(leaves);
  const std::int64_t count = leaves.shape(1);
  const double* data = checked(Optional<double>(values), count, "values");
  unlocked(batch, [&] { batch.trees.backup(count, rows, data); });
}

void drop(Batch& batch, const Array<std::int32_t>& leaves, bool fail) {
  const LeafRows rows = leaf_rows(leaves);
  const std::int64_t count = leaves.shape(1);
  unlocked(batch, [&] { batch.trees.drop(count, rows, fail); });
}

py::array_t<std::int32_t> int_array(const std::vector<std::int32_t>& values) {
  return py::array_t<std::int32_t>(values.size(), values.data());
}

// [trees, width] of one number per root action; `width` is at least the widest root.
template <typename T, typename Read>
py::array_t<T> per_root_action(Batch& batch, T missing, const Read& read) {
  const std::lock_guard<std::mutex> lock(batch.mutex);
  TreeBatch& trees = batch.trees;
  std::int64_t width = 0;
  for (std::int32_t b = 0; b < trees.num_trees(); ++b) {
    const Tree& tree = trees.tree(b);
    if (tree.expanded(tree.nodes[0])) width = std::max<std::int64_t>(width, tree.nodes[0].num_actions);
  }
  py::array_t<T> out({static_cast<std::int64_t>(trees.num_trees()), width});
  std::fill_n(out.mutable_data(), out.size(), missing);
  for (std::int32_t b = 0; b < trees.num_trees(); ++b) {
    Tree& tree = trees.tree(b);
    if (!tree.expanded(tree.nodes[0])) continue;
    for (int a = 0; a < tree.nodes[0].num_actions; ++a) out.mutable_data()[b * width + a] = read(tree, a);
  }
  return out;
}

py::array_t<std::int64_t> root_visits(Batch& batch) {
  return per_root_action<std::int64_t>(batch, 0, [](Tree& tree, int a) {
    return static_cast<std::int64_t>(tree.visit_words(tree.nodes[0])[a] & search::kVisitMask);
  });
}

py::array_t<float> root_priors(Batch& batch) {
  return per_root_action<float>(batch, 0.0f, [](Tree& tree, int a) { return tree.priors(tree.nodes[0])[a]; });
}

py::array_t<double> root_q(Batch& batch) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  return per_root_action<double>(batch, nan, [nan](Tree& tree, int a) {
    const bool visited = (tree.visit_words(tree.nodes[0])[a] & search::kVisitMask) != 0;
    return visited ? tree.q[tree.children(tree.nodes[0])[a]] : nan;
  });
}

// Every node of one tree as arrays, and the priors of all expanded nodes one after the other.
py::dict snapshot(Batch& batch, std::int32_t index) {
  const std::lock_guard<std::mutex> lock(batch.mutex);
  Tree& tree = batch.trees.checked_tree(index);
  const std::int64_t n = tree.num_nodes;
  py::array_t<std::int32_t> parent(n), action(n), actions(n), visits(n), in_flight(n);
  py::array_t<double> value(n), q(n);
  py::array_t<float> reward(n);
  py::array_t<bool> closed(n);
  std::vector<float> priors;
  for (std::int32_t id = 0; id < n; ++id) {
    const search::Node& node = tree.nodes[id];
    const std::uint32_t word = tree.linked(node) ? tree.visit_word(node) : 0;
    const std::int32_t count = id == 0 ? static_cast<std::int32_t>(tree.visits) : word & search::kVisitMask;
    parent.mutable_at(id) = node.parent;
    action.mutable_at(id) = id == 0 ? -1 : node.action;
    actions.mutable_at(id) = tree.expanded(node) ? node.num_actions : -1;
    closed.mutable_at(id) = node.num_actions == search::kClosed;
    visits.mutable_at(id) = count;
    in_flight.mutable_at(id) = id == 0 ? tree.in_flight : word >> search::kVisitBits;
    value.mutable_at(id) = count == 0 ? 0.0 : node.value_sum / count;
    q.mutable_at(id) = tree.q[id];
    reward.mutable_at(id) = node.reward;
    if (tree.expanded(node)) priors.insert(priors.end(), tree.priors(node), tree.priors(node) + node.num_actions);
  }
  py::dict out;
  out["parent"] = parent;
  out["action"] = action;
  out["num_actions"] = actions;
  out["closed"] = closed;
  out["visits"] = visits;
  out["in_flight"] = in_flight;
  out["value"] = value;
  out["q"] = q;
  out["reward"] = reward;
  out["priors"] = py::array_t<float>(priors.size(), priors.data());
  return out;
}

// Per tree: nodes, edges, root visits, leaves in flight, full.
py::array_t<std::int64_t> counts(Batch& batch) {
  const std::lock_guard<std::mutex> lock(batch.mutex);
  py::array_t<std::int64_t> out({std::int64_t{5}, static_cast<std::int64_t>(batch.trees.num_trees())});
  for (std::int32_t b = 0; b < batch.trees.num_trees(); ++b) {
    const Tree& tree = batch.trees.tree(b);
    const std::int64_t row[5] = {tree.num_nodes, tree.num_edges, tree.visits, tree.in_flight, tree.full};
    for (int i = 0; i < 5; ++i) out.mutable_at(i, b) = row[i];
  }
  return out;
}

py::array_t<double> root_values(Batch& batch) {
  const std::lock_guard<std::mutex> lock(batch.mutex);
  py::array_t<double> out(batch.trees.num_trees());
  for (std::int32_t b = 0; b < batch.trees.num_trees(); ++b) {
    const Tree& tree = batch.trees.tree(b);
    out.mutable_at(b) = tree.visits == 0 ? 0.0 : tree.nodes[0].value_sum / tree.visits;
  }
  return out;
}

void search_given(Batch& batch, std::int32_t simulations, int leaves, const Array<float>& priors,
                  const Array<double>& values) {
  const std::int64_t trees = batch.trees.num_trees();
  MF_CHECK(priors.ndim() == 3 && priors.shape(1) == trees, "priors: expected an array [rounds, ", trees,
           ", actions], got ", priors.ndim(), " dimensions and ", priors.size(), " entries");
  MF_CHECK(values.ndim() == 2 && values.shape(0) == priors.shape(0) && values.shape(1) == trees,
           "values: expected an array [", priors.shape(0), ", ", trees, "], got ", values.ndim(), " dimensions and ",
           values.size(), " entries");
  unlocked(batch, [&] {
    search::search_given(batch.trees, simulations, leaves, priors.shape(0), priors.data(), priors.shape(2),
                         values.data());
  });
}

template <typename T>
std::vector<T> table(const py::array_t<T, kDense>& array, std::int64_t size, const char* name) {
  MF_CHECK(array.size() == size, name, ": expected ", size, " entries, got ", array.size());
  return std::vector<T>(array.data(), array.data() + array.size());
}

void set_tables(Batch& batch, const Array<std::int32_t>& actions, const Array<std::int32_t>& next,
                const Array<float>& rewards, const Array<bool>& terminal, const Array<float>& priors,
                const Array<double>& values, const Array<std::int32_t>& roots, std::int32_t rollout_depth) {
  MF_CHECK(next.ndim() == 2, "next: expected an array [states, actions], got ", next.ndim(), " dimensions");
  const std::int64_t states = next.shape(0), width = next.shape(1);
  auto tables = std::make_shared<search::Tables>();
  tables->width = width;
  tables->actions = table(actions, states, "actions");
  tables->next = table(next, states * width, "next");
  tables->rewards = table(rewards, states * width, "rewards");
  MF_CHECK(terminal.size() == states * width, "terminal: expected ", states * width, " entries, got ",
           terminal.size());
  tables->terminal.assign(terminal.data(), terminal.data() + terminal.size());
  tables->priors = table(priors, states * width, "priors");
  tables->values = table(values, states, "values");
  for (const std::int32_t count : tables->actions) {
    MF_CHECK(count >= 0 && count <= width, "actions: expected 0 to ", width, ", got ", count);
  }
  for (const std::int32_t state : tables->next) {
    MF_CHECK(state >= 0 && state < states, "next: expected states 0 to ", states - 1, ", got ", state);
  }
  for (const float reward : tables->rewards) MF_CHECK(std::isfinite(reward), "rewards: expected finite numbers, got ", reward);
  const std::vector<std::int32_t> starts = table(roots, batch.trees.num_trees(), "roots");
  for (const std::int32_t state : starts) {
    MF_CHECK(state >= 0 && state < states, "roots: expected states 0 to ", states - 1, ", got ", state);
  }
  const std::lock_guard<std::mutex> lock(batch.mutex);
  batch.worlds = std::make_unique<search::WorldSearch>(batch.trees);
  batch.tables = tables;
  for (std::int32_t b = 0; b < batch.trees.num_trees(); ++b) {
    batch.worlds->set_root(b, std::make_unique<search::TabularWorld>(tables, starts[b], rollout_depth,
                                                                     batch.trees.config().discount));
  }
}

// Puts tree b at the present state of slot slots[b] of a household batch, which stays as it is.
void set_household(Batch& batch, const household::Batch& games, const std::vector<int>& slots,
                   std::int32_t rollout_depth) {
  MF_CHECK(static_cast<std::int32_t>(slots.size()) == batch.trees.num_trees(), "slots: expected one per tree (",
           batch.trees.num_trees(), "), got ", slots.size());
  MF_CHECK(rollout_depth >= 0, "rollout_depth: expected an integer >= 0, got ", rollout_depth);
  for (const int slot : slots) {
    MF_CHECK(!games.state(slot).over, "slot ", slot, ": its episode is over, reset or restore it first");
  }
  const std::lock_guard<std::mutex> lock(batch.mutex);
  batch.worlds = std::make_unique<search::WorldSearch>(batch.trees);
  for (std::int32_t b = 0; b < batch.trees.num_trees(); ++b) {
    batch.worlds->set_root(b, std::make_unique<search::HouseholdWorld>(games.shared_world(slots[b]),
                                                                       games.state(slots[b]), games.max_steps(),
                                                                       rollout_depth, batch.trees.config().discount));
  }
}

search::WorldSearch& worlds_of(Batch& batch) {
  MF_CHECK(batch.worlds, "search: expected set_tables or set_household to have been called");
  return *batch.worlds;
}

}  // namespace

void register_search(py::module_& module) {
  py::class_<Batch>(module, "TreeBatch")
      .def(py::init([](std::int32_t num_trees, std::int32_t max_nodes, std::int64_t max_edges, const std::string& rule,
                       double c, double discount, bool normalize, std::int32_t gumbel_considered,
                       std::int32_t gumbel_simulations, double gumbel_visit, double gumbel_scale,
                       std::uint64_t seed) {
             MF_CHECK(rule == "puct" || rule == "uct", "rule: expected puct or uct, got ", rule);
             Config config;
             config.rule = rule == "uct" ? search::Rule::uct : search::Rule::puct;
             config.c = c;
             config.discount = discount;
             config.normalize = normalize;
             config.gumbel_considered = gumbel_considered;
             config.gumbel_simulations = gumbel_simulations;
             config.gumbel_visit = gumbel_visit;
             config.gumbel_scale = gumbel_scale;
             config.seed = seed;
             return std::make_unique<Batch>(num_trees, max_nodes, max_edges, config);
           }),
           py::kw_only(), py::arg("num_trees"), py::arg("max_nodes"), py::arg("max_edges"), py::arg("rule"),
           py::arg("c"), py::arg("discount"), py::arg("normalize"), py::arg("gumbel_considered"),
           py::arg("gumbel_simulations"), py::arg("gumbel_visit"), py::arg("gumbel_scale"), py::arg("seed"))
      .def("select", &select)
      .def("update", &update)
      .def("expand", &expand)
      .def("backup", &backup)
      .def("drop", &drop)
      .def("advance_root",
           [](Batch& batch, std::int32_t tree, std::int32_t action) {
             return int_array(unlocked(batch, [&] {
               batch.trees.checked_tree(tree);
               MF_CHECK(!batch.worlds || !batch.worlds->world(tree), "advance_root: tree ", tree,
                        " has a world, which only advance_world moves along");
               return batch.trees.advance_root(tree, action);
             }));
           })
      .def("reset",
           [](Batch& batch, std::int32_t tree) {
             unlocked(batch, [&] { batch.worlds ? batch.worlds->reset(tree) : batch.trees.reset(tree); });
           })
      .def("add_root_noise",
           [](Batch& batch, double alpha, double fraction, const std::optional<std::int32_t>& index) {
             unlocked(batch, [&] {
               if (index) {
                 batch.trees.add_root_noise(*index, alpha, fraction);
                 return;
               }
               for (std::int32_t b = 0; b < batch.trees.num_trees(); ++b) {
                 const Tree& tree = batch.trees.tree(b);
                 if (tree.expanded(tree.nodes[0])) batch.trees.add_root_noise(b, alpha, fraction);
               }
             });
           })
      .def("gumbel_actions",
           [](Batch& batch) {
             std::vector<std::int32_t> out;
             unlocked(batch, [&] {
               for (std::int32_t b = 0; b < batch.trees.num_trees(); ++b) out.push_back(batch.trees.gumbel_action(b));
             });
             return int_array(out);
           })
      .def("root_visits", &root_visits)
      .def("root_priors", &root_priors)
      .def("root_q", &root_q)
      .def("root_values", &root_values)
      .def("snapshot", &snapshot)
      .def("counts", &counts)
      .def("arena_bytes", [](Batch& batch) { return batch.trees.arena_bytes(); })
      .def("search_given", &search_given)
      .def("search_hashed",
           [](Batch& batch, std::int32_t simulations, int leaves, std::int32_t actions, std::uint64_t seed) {
             unlocked(batch, [&] { search::search_hashed(batch.trees, simulations, leaves, actions, seed); });
           })
      .def("set_tables", &set_tables)
      .def("set_household", &set_household)
      .def("search_tables",
           [](Batch& batch, std::int32_t simulations, int leaves) {
             unlocked(batch, [&] { worlds_of(batch).run(simulations, leaves); });
           })
      .def("advance_tables", [](Batch& batch, std::int32_t tree, std::int32_t action) {
        batch.trees.checked_tree(tree);
        const search::WorldStep step = unlocked(batch, [&] { return worlds_of(batch).advance(tree, action); });
        return py::make_tuple(step.reward, step.terminal);
      });
  module.attr("search_bytes") = py::make_tuple(search::kBytesPerNode, search::kBytesPerEdge);
  module.def("halving_schedule", [](std::int32_t considered, std::int32_t simulations) {
    return int_array(search::halving_schedule(considered, simulations));
  });
}

}  // namespace manus_fast

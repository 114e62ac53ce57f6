"""The tree engine: edge cases, refused input, budgets, memory, threads."""

import math
import threading

import numpy as np
import pytest

from manus_fast.search import COLLISION, EVALUATE, FULL, TERMINAL, Leaves, TreeBatch


def fresh(trees: int = 1, **config) -> TreeBatch:
    batch = TreeBatch(trees, 50, max_actions=4, **config)
    batch.set_roots(np.zeros(trees), np.ones((trees, 4)))
    return batch


def test_search_zero_simulations():
    trees = fresh()
    trees.search_given(0, np.ones((1, 1, 4)), np.zeros((1, 1)))
    assert trees.root_visits().tolist() == [[0, 0, 0, 0]]
    assert TreeBatch(2, 4, max_actions=4).root_visits().shape == (2, 0)


def test_search_zero_and_one_action():
    trees = TreeBatch(2, 10, max_actions=3)
    trees.set_roots([0.5, 0.25], np.ones((2, 3)), counts=[0, 1])
    for _ in range(3):
        leaves = trees.select()
        assert leaves.status.tolist() == [TERMINAL, EVALUATE]  # no action: closed, and worth what it was given
        trees.update(leaves, [0.0, 0.25], np.ones((2, 3)), counts=[1, 1])
    assert trees.simulations.tolist() == [4, 4]
    assert trees.root_values().tolist() == [0.5, 0.25]
    assert trees.root_visits().tolist() == [[0], [3]]


def test_search_terminal_root_and_leaf():
    trees = TreeBatch(1, 10, max_actions=3)
    trees.update(trees.select(), [0.75], terminal=[True])
    assert trees.select(3).status.tolist() == [TERMINAL] * 3
    assert (trees.simulations[0], trees.root_values()[0], trees.num_nodes[0]) == (4, 0.75, 1)
    trees.advance_root([-1])
    assert trees.select().status.tolist() == [EVALUATE]


def test_search_collisions_leave_no_trace():
    trees = TreeBatch(1, 10, max_actions=1)
    trees.set_roots([0.0], [[1.0]])
    leaves = trees.select(5)
    assert leaves.status.tolist() == [EVALUATE] + [COLLISION] * 4
    assert trees.in_flight.tolist() == [1]
    trees.update(leaves, np.ones(5), np.ones((5, 1)))
    assert (trees.in_flight[0], trees.simulations[0]) == (0, 2)


def test_search_virtual_loss_spreads_the_leaves():
    """Equal arms: each leaf in flight counts as a visit that returned -1, so four leaves go to four arms."""
    leaves = fresh().select(4)
    assert sorted(leaves.action.tolist()) == [0, 1, 2, 3]
    assert (leaves.status == EVALUATE).all()


def test_search_full_tree_answers_full_until_the_root_moves():
    trees = TreeBatch(1, 3, max_actions=2)
    trees.set_roots([0.0], [[1.0, 1.0]])
    for _ in range(2):
        trees.update(trees.select(), [0.0], np.ones((1, 2)))
    before = trees.root_visits()
    leaves = trees.select(2)
    assert leaves.status.tolist() == [FULL, FULL]
    assert leaves.node.tolist() == [-1, -1]
    assert trees.full.tolist() == [True]
    np.testing.assert_array_equal(trees.root_visits(), before)
    assert trees.in_flight.tolist() == [0]
    trees.advance_root([0])
    assert trees.full.tolist() == [False]
    assert trees.select().status.tolist() == [EVALUATE]


def test_search_edges_run_out():
    """A leaf whose actions find no room stays a leaf; its value counts."""
    trees = TreeBatch(1, 10, max_edges=3)
    trees.set_roots([0.0], [[1.0, 1.0]])
    trees.update(trees.select(), [1.0], np.ones((1, 2)))
    assert (trees.full[0], trees.root_visits()[0].tolist()) == (True, [1, 0])
    assert trees.select().status.tolist() == [FULL]


def test_search_failed_edges_are_never_chosen_again():
    trees = fresh()
    trees.drop(trees.select(), fail=True)
    for _ in range(20):
        leaves = trees.select()
        assert leaves.action[0] != 0 or leaves.parent[0] != 0
        trees.update(leaves, [0.0], np.ones((1, 4)))
    assert trees.root_visits()[0, 0] == 0
    for _ in range(3):  # in a fresh tree all four fail: the root is closed with what it was worth
        trees.advance_root([-1])
        trees.set_roots([0.5], np.ones((1, 4)))
        for _ in range(4):
            trees.drop(trees.select(), fail=True)
        assert trees.select().status.tolist() == [TERMINAL]
        assert trees.root_values().tolist() == [0.5]


@pytest.mark.parametrize(
    "values,priors,extra,message",
    [
        ([np.nan], np.ones((1, 4)), {}, r"values\[0\]: expected a number within \+-1e100, got nan"),
        ([-np.inf], np.ones((1, 4)), {}, r"values\[0\].*got -inf"),
        ([0.0], [[1, np.nan, 1, 1]], {}, r"priors\[0, 1\]: expected a finite number >= 0, got nan"),
        ([0.0], [[1, 1, -0.5, 1]], {}, r"priors\[0, 2\].*got -0.5"),
        ([0.0], [[1, 1, 1, np.inf]], {}, r"priors\[0, 3\].*got inf"),
        ([0.0], np.zeros((1, 4)), {}, r"priors\[0\]: expected a sum > 0, got 0"),
        ([0.0], np.ones((1, 4)), {"rewards": [np.nan]}, r"rewards\[0\]: expected a finite number, got nan"),
        ([0.0], np.ones((1, 4)), {"counts": [5]}, r"counts\[0\]: expected 0 to 4 actions, got 5"),
        ([0.0], np.ones((1, 4)), {"counts": [-1]}, r"counts\[0\]: expected 0 to 4 actions, got -1"),
        ([0.0, 0.0], np.ones((1, 4)), {}, r"values: expected one entry per leaf \[1\]"),
        ([0.0], np.ones((2, 4)), {}, r"priors: expected one row per leaf \[1, actions\]"),
        ([0.0], np.ones(4), {}, r"priors: expected one row per leaf"),
    ],
)
def test_search_bad_answers_change_nothing(values, priors, extra, message):
    trees = fresh()
    leaves = trees.select()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            trees.update(leaves, values, priors, **extra)
    assert trees.in_flight.tolist() == [1]
    trees.update(leaves, [0.0], np.ones((1, 4)))
    assert trees.root_visits()[0].sum() == 1


def test_search_answers_to_nothing_are_refused():
    trees = fresh(2)
    leaves = trees.select()
    trees.update(leaves, [0.0, 0.0], np.ones((2, 4)))
    for call in (
        lambda: trees.update(leaves, [0.0, 0.0], np.ones((2, 4))),
        lambda: trees.backup(leaves, [0.0, 0.0]),
        lambda: trees.drop(leaves),
    ):
        with pytest.raises(ValueError, match=r"leaves\[0\]: expected a leaf in flight, got node 1 of tree 0"):
            call()
    twice = trees.select()[[0, 0]]
    with pytest.raises(ValueError, match=r"leaves\[1\]: expected a leaf in flight"):
        trees.update(twice, [0.0, 0.0], np.ones((2, 4)))
    with pytest.raises(ValueError, match="expected each leaf once, got node 2 of tree 0 twice"):
        trees.backup(twice, [0.0, 0.0])
    with pytest.raises(ValueError, match="advance_root: expected no leaf in flight, tree 0 has 1"):
        trees.advance_root([0, 0])
    rows = np.zeros((5, 1), np.int32)
    rows[0] = 7
    with pytest.raises(ValueError, match="tree: expected an index below 2, got 7"):
        trees.update(Leaves(rows), [0.0], np.ones((1, 4)))
    with pytest.raises(ValueError, match="set_roots: expected trees whose roots were not evaluated yet"):
        trees.set_roots([0.0, 0.0], np.ones((2, 4)))


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"num_trees": 0}, "num_trees: expected an integer >= 1, got 0"),
        ({"max_nodes": 0}, "max_nodes: expected an integer >= 1, got 0"),
        ({"max_edges": -1}, "max_edges: expected 0 to"),
        ({"rule": "best"}, "rule: expected puct or uct, got best"),
        ({"c": -1.0}, "c: expected 0 <= c"),
        ({"discount": 1.5}, "discount: expected 0 <= discount <= 1, got 1.5"),
        ({"discount": math.nan}, "discount"),
        ({"gumbel_considered": 4}, "gumbel_simulations: expected an integer >= 1"),
        ({"max_actions": 4}, "max_actions, max_edges: expected exactly one"),
    ],
)
def test_search_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        TreeBatch(**{"num_trees": 1, "max_nodes": 4, "max_edges": 8, **arguments})


def test_search_select_limits():
    trees = fresh(3)
    for leaves in (0, 256):
        with pytest.raises(ValueError, match="leaves: expected"):
            trees.select(leaves)
    with pytest.raises(ValueError, match="trees: expected indices in ascending order, got 1 after 2"):
        trees.select(trees=[2, 1])
    with pytest.raises(ValueError, match="tree: expected an index below 3, got 3"):
        trees.select(trees=[3])
    assert trees.select(trees=[0, 2]).tree.tolist() == [0, 2]


def test_search_a_tree_stops_before_its_counters_run_over():
    """A visit word counts to 2^24 - 1 beside what is in flight: a tree that gets there says so, no count is lost."""
    trees = TreeBatch(1, 4, max_actions=1)
    trees.set_roots([0.0], [[1.0]])
    trees.update(trees.select(), [0.0], rewards=[0.5], terminal=[True])
    given = np.ones((1, 1, 1)), np.zeros((1, 1))
    for call in (lambda: trees.search_given(2**24, *given), lambda: trees.select()):
        with pytest.raises(ValueError, match="tree 0 has used up its 16777215 visits; advance or reset it"):
            call()
    visits = int(trees.simulations[0])
    assert 2**24 - 300 < visits < 2**24 and trees.in_flight[0] == 0
    assert trees.root_visits().tolist() == [[visits - 1]]
    assert trees.root_values()[0] == 0.5 * (visits - 1) / visits
    trees.reset(0)
    trees.set_roots([0.0], [[1.0]])
    assert trees.select().status.tolist() == [EVALUATE]


def test_search_advance_keeps_the_subtree():
    trees = TreeBatch(1, 200, max_actions=4, discount=0.9)
    trees.search_hashed(150, 4, seed=2)
    before = trees.view(0)
    action = int(trees.root_visits()[0].argmax())
    [kept] = trees.advance_root([action])
    after = trees.view(0)
    assert before.path(kept[0])[0] == 0 and before.action[kept[0]] == action
    assert all(kept[0] in before.path(node) for node in kept)
    np.testing.assert_array_equal(before.visits[kept], after.visits)
    np.testing.assert_array_equal(before.value[kept], after.value)
    np.testing.assert_array_equal(kept[after.parent[1:]], before.parent[kept[1:]])
    for node, old in enumerate(kept):
        np.testing.assert_array_equal(after.priors[node], before.priors[old])
    # An unvisited child gives an empty tree.
    trees.advance_root([-1])
    assert (trees.num_nodes[0], trees.simulations[0]) == (1, 0)


def test_search_memory_per_node_and_edge():
    trees = TreeBatch(4, 1000, max_actions=16)
    trees.search_hashed(500, 16)
    memory = trees.memory()
    assert memory["node"] <= 32 and memory["edge"] <= 12
    assert memory["used"] == 4 * 501 * (32 + 12 * 16)
    assert memory["used"] <= memory["block"] <= 4 * (1000 * (32 + 12 * 16) + 128)


def test_search_takes_torch_tensors():
    import torch

    trees = TreeBatch(2, 10, max_actions=3)
    trees.set_roots(torch.zeros(2), torch.ones(2, 3))
    trees.update(trees.select(), torch.tensor([0.5, -0.5]), torch.ones(2, 3), rewards=torch.zeros(2))
    np.testing.assert_allclose(trees.root_values(), [0.25, -0.25])


def test_search_calls_from_several_threads():
    """Each call is whole: four threads that select and answer at once lose no leaf."""
    trees = TreeBatch(16, 4000, max_actions=4)
    trees.set_roots(np.zeros(16), np.ones((16, 4)))
    done = []

    def work():
        count = 0
        for _ in range(100):
            leaves = trees.select(2)
            trees.update(leaves, np.zeros(len(leaves)), np.ones((len(leaves), 4)))
            count += int((leaves.status == EVALUATE).sum())
        done.append(count)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trees.in_flight.sum() == 0
    assert trees.root_visits().sum() == sum(done)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda batch: batch.select(trees=[0.5]), "trees: expected integers, got float64"),
        (lambda batch: batch.select(trees=[1 << 32]), "trees: expected integers of 32 bits, got 4294967296"),
        (lambda batch: batch.select(trees=[[0, 1]]), "trees: expected a list of indices, got 2 dimensions"),
        (lambda batch: batch.select(leaves=2**31 - 1), "leaves: expected 1 to 255, got 2147483647"),
        (lambda batch: batch.add_root_noise(1.0, 0.25, -1), "tree: expected an index below 2, got -1"),
        (lambda batch: batch.set_roots([0, 0], np.ones((2, 2))), "set_roots: expected trees whose roots were not"),
    ],
)
def test_search_numbers_are_neither_cut_nor_wrapped_around(call, message):
    batch = fresh(2)
    with pytest.raises(ValueError, match=message):
        call(batch)
    assert not batch.in_flight.any() and batch.simulations.tolist() == [1, 1]


def test_search_counts_must_be_integers():
    batch = TreeBatch(1, 50, max_actions=2)
    leaves = batch.select()
    with pytest.raises(ValueError, match="counts: expected integers, got float64"):
        batch.update(leaves, [0.0], np.ones((1, 2)), counts=[1.5])
    batch.update(leaves, [0.0], np.ones((1, 2)), counts=np.array([1], np.uint8))
    assert batch.view(0).num_actions.tolist() == [1]


def test_search_roots_can_be_set_after_answers_that_were_none():
    batch = TreeBatch(1, 50, max_actions=2)
    with pytest.raises(TypeError):
        batch.set_roots([0.0], "priors")
    batch.set_roots([0.0], np.ones((1, 2)))
    assert batch.simulations.tolist() == [1]


def test_search_a_block_that_no_address_reaches_is_refused():
    with pytest.raises(MemoryError):
        TreeBatch(2**31 - 1, 2**31 - 1, max_edges=2**30 - 1)

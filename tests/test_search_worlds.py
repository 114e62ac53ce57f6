"""The tree engine on worlds: known answers, an independent implementation on 1,000 random MDPs, both ways of use."""

import math

import numpy as np
import pytest

from manus_fast import _C
from manus_fast.search import EVALUATE, TreeBatch

STATES, WIDTH = 12, 5


@pytest.fixture(autouse=True)
def restore_threads():
    before = _C.num_threads()
    yield
    _C.set_num_threads(before)


def random_mdps(count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """`count` MDPs of 12 states side by side in one table; roots are their first states."""
    n = count * STATES
    base = np.repeat(np.arange(count) * STATES, STATES)[:, None]
    return {
        "actions": rng.integers(0, WIDTH + 1, n) * (rng.random(n) < 0.9),
        "next": base + rng.integers(0, STATES, (n, WIDTH)),
        "rewards": rng.choice([0.0, 0.0, 1.0, -0.25], (n, WIDTH)).astype(np.float32),
        "terminal": rng.random((n, WIDTH)) < 0.1,
        "priors": rng.random((n, WIDTH), dtype=np.float32),
        "values": rng.uniform(-1, 1, n),
        "roots": np.arange(count) * STATES,
    }


class ByPath:
    """A second implementation, written from the rules and not from the code: dictionaries over action sequences,
    the state found by replay, every statistic recomputed from the list of returns."""

    def __init__(self, mdp, root, c, discount, normalize):
        self.mdp, self.root, self.c, self.discount, self.normalize = mdp, root, c, discount, normalize
        self.returns = {(): []}  # sequence → returns after it
        self.flying = {}
        self.known = {}  # sequence → priors; an empty list: the end, worth self.end[sequence]
        self.end = {}
        self.seen = []

    def where(self, path):
        state, reward, over = self.root, 0.0, False
        for action in path:
            reward, over = float(self.mdp["rewards"][state, action]), bool(self.mdp["terminal"][state, action])
            state = int(self.mdp["next"][state, action])
        return state, reward, over

    def count(self, path):
        return len(self.returns.get(path, ())) + self.flying.get(path, 0)

    def mean(self, path):
        total = 0.0
        for value in self.returns.get(path, ()):
            total += value
        return (total - self.flying.get(path, 0)) / self.count(path)

    def q(self, path):
        reward = self.where(path)[1] if self.returns.get(path) else 0.0  # unknown until the first answer
        return reward + self.discount * self.mean(path)

    def choose(self, path):
        priors = self.known[path]
        siblings = [(*path, action) for action in range(len(priors))]
        every = sum(map(self.count, siblings))
        best, best_score = None, None
        for child, prior in zip(siblings, priors, strict=True):
            q = self.q(child) if self.count(child) else self.mean(path)
            if self.normalize and max(self.seen) > min(self.seen):
                q = (q - min(self.seen)) / (max(self.seen) - min(self.seen))
            score = q + self.c * prior * math.sqrt(every) / (1 + self.count(child))
            if best is None or score > best_score:
                best, best_score = child, score
        return best

    def record(self, path, value):
        for length in range(len(path), -1, -1):
            here = path[:length]
            self.returns.setdefault(here, []).append(value)
            real, self.flying[here] = self.flying.get(here, 0), 0
            self.seen.append(self.q(here) if here else self.mean(here))
            self.flying[here] = real
            value = self.where(here)[1] + self.discount * value

    def descend(self):
        """A path to evaluate, or None when it was answered on the spot or is awaited already."""
        path = ()
        while self.known.get(path):
            path = self.choose(path)
        if path in self.end:
            self.record(path, self.end[path])
            return None, 1
        if self.flying.get(path):
            return None, 0
        for length in range(len(path) + 1):
            self.flying[path[:length]] = self.flying.get(path[:length], 0) + 1
        return path, 1

    def evaluate(self, path):
        state, _, over = self.where(path)
        n, value = int(self.mdp["actions"][state]), float(self.mdp["values"][state])
        if over or n == 0:
            value = self.end[path] = 0.0 if over else float(np.float32(value))
            self.known[path] = []
        else:
            priors = self.mdp["priors"][state, :n]
            total = 0.0
            for prior in priors.tolist():
                total += prior
            self.known[path] = [float(np.float32(p / total)) for p in priors.tolist()]
        for length in range(len(path) + 1):
            self.flying[path[:length]] -= 1
        self.record(path, value)

    def run(self, simulations, leaves):
        self.evaluate(self.descend()[0])
        done = 0
        while done < simulations:
            waiting = []
            for _ in range(min(leaves, simulations - done)):
                path, counted = self.descend()
                done += counted
                if path is not None:
                    waiting.append(path)
            for path in waiting:
                self.evaluate(path)


@pytest.mark.parametrize(
    "leaves,discount,normalize,simulations",
    [(1, 1.0, False, 40), (1, 0.9, True, 40), (3, 0.99, False, 30), (4, 0.95, True, 30)],
)
def test_search_equals_an_independent_implementation_on_1000_mdps(leaves, discount, normalize, simulations):
    count = 250
    mdp = random_mdps(count, np.random.default_rng(leaves))
    trees = TreeBatch(count, simulations + 2, max_actions=WIDTH, discount=discount, normalize=normalize)
    trees.set_tables(**mdp)
    trees.search_tables(simulations, leaves=leaves)
    visits = trees.root_visits()
    for b in range(count):
        other = ByPath(mdp, int(mdp["roots"][b]), 1.25, discount, normalize)
        other.run(simulations, leaves)
        n = len(other.known[()])
        assert visits[b, :n].tolist() == [other.count((a,)) for a in range(n)], b
        view = trees.view(b)
        for node in range(len(view.visits)):
            path = tuple(int(view.action[id]) for id in view.path(node)[1:])
            assert (view.visits[node], view.value[node]) == (other.count(path), other.mean(path)), (b, path)


def test_search_bandit_known_visits():
    """Two arms, P = 1/2 each, Q = 1 and 0, c = 1: by hand the visits after 6 simulations are 5 and 1.

    Simulation 1: ΣN = 0, equal scores, arm 0 by index. 2: the root's mean is 0.5 of (0, 1), so arm 1 scores
    0.5 + 0.5·1/1 = 1 and arm 0 scores 1 + 0.5·1/2 = 1.25: arm 0. 3: the mean is 2/3, √2 = 1.414: arm 1 has
    0.667 + 0.707 = 1.374, arm 0 has 1 + 0.707/3 = 1.236: arm 1. Then arm 1 has Q = 0 and loses:
    4: 0 + 0.5·1.732/2 = 0.433 against 1 + 0.289; 5 and 6 likewise.
    """
    trees = TreeBatch(1, 8, max_actions=2, c=1.0)
    trees.set_roots([0.0], [[1.0, 1.0]])
    order = []
    for _ in range(6):
        leaves = trees.select()
        if leaves.status[0] == EVALUATE:
            trees.update(leaves, [0.0], rewards=[1.0 - leaves.action[0]], terminal=[True])
        order.append(trees.root_visits()[0].tolist())
    assert order == [[1, 0], [2, 0], [2, 1], [3, 1], [4, 1], [5, 1]]
    np.testing.assert_allclose(trees.root_values(), 5 / 7)  # five ones over six simulations and the root's own 0
    np.testing.assert_array_equal(trees.root_q(), [[1.0, 0.0]])


@pytest.mark.parametrize("seed", range(5))
def test_search_bandit_finds_the_best_arm(seed):
    rng = np.random.default_rng(seed)
    arms = rng.permutation(np.linspace(0, 1, 16))
    for config in ({"rule": "puct"}, {"rule": "uct", "c": 0.5}, {"rule": "puct", "normalize": True}):
        trees = TreeBatch(1, 20, max_actions=16, **config)
        trees.set_roots([0.5], np.ones((1, 16)))
        for _ in range(400):
            leaves = trees.select()
            if leaves.status[0] == EVALUATE:
                trees.update(leaves, [0.0], rewards=[arms[leaves.action[0]]], terminal=[True])
        visits = trees.root_visits()[0]
        assert visits.sum() == 400
        assert visits.argmax() == arms.argmax()


def grid(size: int) -> dict[str, np.ndarray]:
    """A square; actions right, down, left, up; the reward 1 ends the episode in the far corner."""
    cells = size * size
    moves = [(1, 0), (0, 1), (-1, 0), (0, -1)]
    table = np.zeros((cells, 4), np.int32)
    for cell in range(cells):
        for action, (dx, dy) in enumerate(moves):
            x = min(max(cell % size + dx, 0), size - 1)
            y = min(max(cell // size + dy, 0), size - 1)
            table[cell, action] = y * size + x
    goal = table == cells - 1
    return {
        "actions": np.full(cells, 4),
        "next": table,
        "rewards": goal.astype(np.float32),
        "terminal": goal,
        "priors": np.ones((cells, 4), np.float32),
        "values": np.zeros(cells),
        "roots": [0],
    }


def test_search_corridor_known_simulations():
    """Three cells in a row, the last one the goal (reward 1, over); actions stay, forward; P = 1/2, c = 1, values 0.

    By hand, ties to the lower index: until the goal is seen every Q is 0, so the less visited action goes first, at the
    root 0 1 0 1 0 1. The sixth simulation is the third through `forward`; its child has tried staying (simulation 4),
    and goes on to the goal. The root's `forward` then has Q = 1/3 (own value, staying, goal) and scores
    1/3 + 0.5·√6/4 = 0.64 against 0.31 in the seventh: from there on it is the most visited.
    """
    trees = TreeBatch(1, 40, max_actions=2, c=1.0)
    goal = [[0, 0], [0, 1], [0, 0]]
    trees.set_tables(
        actions=[2, 2, 2], next=[[0, 1], [1, 2], [2, 2]], rewards=goal, terminal=np.array(goal, bool),
        priors=np.ones((3, 2)), values=[0.0, 0.0, 0.0], roots=[0],
    )  # fmt: skip
    visits, reached = [], []
    for _ in range(8):
        trees.search_tables(1)
        visits.append(trees.root_visits()[0].tolist())
        reached.append(bool((trees.view(0).reward == 1).any()))
    assert visits == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3], [3, 4], [3, 5]]
    assert reached == [False] * 5 + [True] * 3
    np.testing.assert_allclose(trees.root_q(), [[0.0, 3 / 5]])


def test_search_grid_walks_the_shortest_way():
    """3 × 3: within 600 simulations a move the search plays 4 steps, the fewest, keeping its subtree."""
    tables = grid(3)
    trees = TreeBatch(1, 4000, max_actions=4, discount=0.9)
    trees.set_tables(**tables)
    rewards, state = [], 0
    for _ in range(4):
        trees.search_tables(600)
        action = int(trees.root_visits()[0].argmax())
        reward, over = trees.advance_tables(0, action)
        state = int(tables["next"][state, action])
        rewards.append(reward)
    assert (rewards, over, state) == ([0, 0, 0, 1], True, 8)


def test_search_world_rollouts_estimate_the_value():
    """One state, one action, reward 1, never over: a rollout of 10 turns is worth Σ 0.9^t."""
    one = {
        "actions": [1],
        "next": [[0]],
        "rewards": [[1.0]],
        "terminal": [[False]],
        "priors": [[1.0]],
        "values": [0.0],
        "roots": [0],
    }
    trees = TreeBatch(1, 2, max_actions=1, discount=0.9)
    trees.set_tables(**one, rollout_depth=10)
    trees.search_tables(0)
    np.testing.assert_allclose(trees.root_values(), sum(0.9**t for t in range(10)))


@pytest.mark.parametrize("leaves", [1, 4])
def test_search_driven_equals_closed_for_any_thread_count(leaves):
    rng = np.random.default_rng(0)
    priors, values = rng.random((7, 200, 16), dtype=np.float32), rng.uniform(-1, 1, (7, 200))
    results = []
    for threads in (1, 2, 5):
        _C.set_num_threads(threads)
        closed = TreeBatch(200, 101, max_actions=16, discount=0.99)
        closed.search_given(100, priors, values, leaves=leaves)
        driven = TreeBatch(200, 101, max_actions=16, discount=0.99)
        driven.set_roots(values[0], priors[0])
        evaluations = np.ones(200, int)
        while (driven.simulations < 101).any():
            short = np.flatnonzero(driven.simulations < 101)
            rows = driven.select(leaves, trees=short)
            rows = rows[rows.status == EVALUATE]
            order = evaluations[rows.tree].copy()
            for i in range(1, len(rows)):  # the e-th evaluation of a tree takes the e-th answer
                if rows.tree[i] == rows.tree[i - 1]:
                    order[i] = order[i - 1] + 1
            np.add.at(evaluations, rows.tree, 1)
            driven.update(rows, values[order % 7, rows.tree], priors[order % 7, rows.tree])
        if leaves == 1:
            np.testing.assert_array_equal(closed.root_visits(), driven.root_visits())
            np.testing.assert_array_equal(closed.root_values(), driven.root_values())
            assert (closed.root_visits().sum(axis=1) == 100).all()
        results.append((closed.root_visits(), closed.root_values(), driven.root_visits()))
    for other in results[1:]:
        for mine, yours in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(mine, yours)


def test_search_hashed_visits_sum_to_the_simulations():
    trees = TreeBatch(9, 301, max_actions=7, gumbel_considered=4, gumbel_simulations=300)
    trees.search_hashed(300, 7, seed=5)
    assert (trees.root_visits().sum(axis=1) == 300).all()
    assert (trees.simulations == 301).all()


def ring(roots: list[int]) -> dict[str, np.ndarray]:
    """Three states in a ring, forwards or back, each turn worth 1."""
    return {
        "actions": np.full(3, 2),
        "next": np.array([[1, 2], [2, 0], [0, 1]]),
        "rewards": np.ones((3, 2)),
        "terminal": np.zeros((3, 2), bool),
        "priors": np.ones((3, 2)),
        "values": np.arange(3.0),
        "roots": np.array(roots),
    }


def test_search_a_tree_that_was_reset_searches_from_its_world_as_a_fresh_one():
    batches = [TreeBatch(2, 64, max_actions=2) for _ in range(2)]
    for batch in batches:
        batch.set_tables(**ring([0, 1]))
        batch.search_worlds(20)
    batches[0].reset(0)
    batches[0].search_worlds(20)
    batches[1].set_tables(**ring([0, 1]))
    batches[1].search_worlds(20)
    views = [batch.view(0) for batch in batches]
    for field in ("parent", "action", "visits", "q"):
        assert np.array_equal(getattr(views[0], field), getattr(views[1], field))


def test_search_worlds_are_made_for_nodes_that_were_expanded_by_hand():
    batch = TreeBatch(1, 64, max_actions=2)
    batch.set_tables(**ring([0]))
    batch.set_roots([0.0], np.ones((1, 2)))
    for _ in range(4):
        batch.update(batch.select(), [0.0], np.ones((1, 2)), rewards=[1.0])
    batch.search_worlds(20)
    assert batch.root_visits().sum() == 24
    view = batch.view(0)
    assert (view.reward[1:] == 1.0).all()  # every turn of the ring, whoever played it
    with pytest.raises(ValueError, match="tree 0 has a world, which only advance_world moves along"):
        batch.advance_root([0])


def test_search_an_action_that_the_world_lacks_is_told():
    batch = TreeBatch(1, 64, max_actions=3)
    batch.set_tables(**ring([0]))
    batch.set_roots([0.0], np.ones((1, 3)))
    with pytest.raises(ValueError, match="was reached by an action that its world does not have"):
        batch.search_worlds(9)
    assert batch.in_flight.tolist() == [0]

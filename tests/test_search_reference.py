"""The C++ engine against its specification: the same visits, values and priors, bit for bit, in any order of calls."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manus_fast import _C
from manus_fast.search import EVALUATE, Leaves, TreeBatch
from manus_fast.search import reference as ref

CONFIGS = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(["puct", "puct", "uct"]),
        "c": st.sampled_from([0.0, 0.5, 1.25, 4.0]),
        "discount": st.sampled_from([0.0, 0.5, 0.99, 1.0]),
        "normalize": st.booleans(),
        "gumbel_considered": st.sampled_from([0, 0, 0, 1, 4, 16]),
        "gumbel_simulations": st.integers(1, 40),
        "seed": st.integers(0, 2**64 - 1),
    }
)


class Pair:
    """One batch and one reference tree per tree of it, driven alike; every answer is compared on the way."""

    def __init__(self, config: dict, trees: int = 2, max_nodes: int = 400, max_edges: int = 4000):
        self.engine = TreeBatch(trees, max_nodes, max_edges=max_edges, **config)
        limits = {"max_nodes": max_nodes, "max_edges": max_edges}
        self.trees = [ref.Tree(ref.Config(**config, **limits), index) for index in range(trees)]
        self.flying: list[tuple[Leaves, ref.Node]] = []

    def select(self, leaves: int) -> None:
        rows = self.engine.select(leaves)
        views = [self.engine.view(tree) for tree in range(len(self.trees))]
        for i in range(len(rows)):
            status, node = self.trees[rows.tree[i]].select()
            assert status == rows.status[i]
            if node is not None:
                view = views[rows.tree[i]]
                actions = [int(view.action[id]) for id in view.path(rows.node[i])]
                assert actions == [n.action for n in node.path()][::-1]
            if status == EVALUATE:
                self.flying.append((rows[i], node))

    def answer(self, rng: np.random.Generator, count: int, widest: int, split: bool = False) -> None:
        """Answers the first `count` leaves in flight in one call."""
        batch, self.flying = self.flying[:count], self.flying[count:]
        if not batch:
            return
        n = len(batch)
        counts = rng.integers(0, widest + 1, n).astype(np.int32)
        priors = (rng.choice([0.0, 0.1, 1.0, 3.0], (n, widest)) * rng.random((n, widest))).astype(np.float32)
        priors[:, 0] += 0.25  # a positive sum
        values = rng.choice([-1.0, 0.0, 0.3, 1e9], n) * rng.random(n)
        rewards = rng.choice([0.0, -0.01, 1.0], n).astype(np.float32)
        terminal = rng.random(n) < 0.15
        leaves = Leaves(np.concatenate([row.rows for row, _ in batch], axis=1))
        extra = {"counts": counts, "rewards": rewards, "terminal": terminal}
        if split:
            self.engine.expand(leaves, priors, **extra)
            self.engine.backup(leaves, values)
        else:
            self.engine.update(leaves, values, priors, **extra)
        for i, (row, node) in enumerate(batch):
            tree = self.trees[row.tree[0]]
            tree.answer(node, priors[i, : counts[i]].tolist(), float(values[i]), float(rewards[i]), bool(terminal[i]))

    def drop(self, count: int, fail: bool) -> None:
        batch, self.flying = self.flying[:count], self.flying[count:]
        for row, node in batch:
            self.engine.drop(row, fail=fail)
            self.trees[row.tree[0]].drop(node, fail)

    def advance(self, rng: np.random.Generator) -> None:
        for index, tree in enumerate(self.trees):
            width = len(tree.root.priors or []) if tree.root.closed is None else 0
            action = int(rng.integers(-1, width)) if width else -1
            before = self.engine.view(index)
            kept = self.engine.advance_tree(index, action)
            after = self.engine.view(index)
            tree.advance_root(action)
            np.testing.assert_array_equal(before.visits[kept], after.visits[: len(kept)])

    def compare(self) -> None:
        gumbel = self.engine.gumbel_actions() if self.trees[0].config.gumbel_considered else None
        nodes, full = self.engine.num_nodes, self.engine.full
        for index, tree in enumerate(self.trees):
            view = self.engine.view(index)
            assert (nodes[index], full[index]) == (tree.nodes, tree.full)
            stack = [(0, tree.root)]
            while stack:
                id, node = stack.pop()
                assert (view.visits[id], view.in_flight[id]) == (node.n, node.flying)
                assert view.value[id] == (node.w / node.n if node.n else 0.0)
                assert view.reward[id] == node.reward
                assert bool(view.closed[id]) == (node.closed is not None)
                if node.closed is None and node.priors is not None:
                    assert view.priors[id].tolist() == node.priors
                    children = {int(view.action[child]): int(child) for child in view.children(id)}
                    assert sorted(children) == [a for a, child in enumerate(node.children) if child]
                    stack += [(child, node.children[a]) for a, child in children.items()]
            if gumbel is not None:
                if not tree.gumbel:
                    tree.begin_gumbel()
                choice = tree.gumbel_choice(final=True) if tree.gumbel else None
                assert gumbel[index] == (-1 if choice is None else choice)


@settings(max_examples=120, deadline=None)
@given(CONFIGS, st.integers(1, 16), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_search_visits_equal_the_reference(config, widest, leaves, seed):
    rng = np.random.default_rng(seed)
    pair = Pair(config)
    for _ in range(25):
        pair.select(leaves)
        pair.answer(rng, len(pair.flying), widest)
    pair.compare()
    pair.advance(rng)
    pair.compare()
    for _ in range(10):
        pair.select(leaves)
        pair.answer(rng, len(pair.flying), widest)
    pair.compare()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("select"), st.integers(1, 5)),
        st.tuples(st.just("answer"), st.integers(1, 8)),
        st.tuples(st.just("split"), st.integers(1, 8)),
        st.tuples(st.just("drop"), st.integers(1, 2)),
        st.tuples(st.just("fail"), st.integers(1, 2)),
        st.tuples(st.just("advance"), st.just(0)),
        st.tuples(st.just("noise"), st.sampled_from([0.03, 0.3, 1.0, 10.0])),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(CONFIGS, OPERATIONS, st.integers(1, 6), st.integers(1, 40), st.integers(0, 80), st.integers(0, 2**32 - 1))
def test_search_any_order_of_operations(config, operations, widest, max_nodes, max_edges, seed):
    """Leaves answered late and out of turn, dropped, failed; roots moved; budgets of nodes and edges that run out."""
    rng = np.random.default_rng(seed)
    pair = Pair(config, max_nodes=max_nodes, max_edges=max_edges)
    for name, value in operations:
        if name == "select":
            pair.select(value)
        elif name in ("answer", "split"):
            pair.flying = [pair.flying[i] for i in rng.permutation(len(pair.flying))]
            pair.answer(rng, value, widest, split=name == "split")
        elif name in ("drop", "fail"):
            pair.drop(value, name == "fail")
        elif name == "noise":
            pair.engine.add_root_noise(value, 0.25)
            for tree in pair.trees:
                if tree.root.priors is not None and tree.root.closed is None:
                    tree.add_root_noise(value, 0.25)
        else:
            pair.answer(rng, len(pair.flying), widest)
            pair.advance(rng)
        pair.compare()


@pytest.mark.parametrize("considered,simulations", [(1, 5), (2, 2), (3, 50), (16, 16), (16, 200), (7, 3), (64, 1000)])
def test_search_halving_schedule(considered, simulations):
    schedule = _C.halving_schedule(considered, simulations)
    assert schedule.tolist() == ref.halving_schedule(considered, simulations)
    assert len(schedule) == simulations
    if considered > 1:  # the first round visits every considered action once
        assert not schedule[:considered].any()
    assert set(np.diff(np.unique(schedule))) <= {1}  # and no count is skipped


def test_search_gumbel_halving_keeps_the_best_half():
    """16 considered, 64 simulations, 16 a phase: 16 × 1 visit, then 8 × 2, 4 × 4 and 2 × 8 more."""
    trees = TreeBatch(8, 100, max_actions=16, gumbel_considered=16, gumbel_simulations=64, seed=3)
    quality = np.random.default_rng(0).random((8, 16))
    trees.set_roots(np.zeros(8), np.ones((8, 16)))
    for _ in range(64):
        leaves = trees.select()
        trees.update(leaves, quality[leaves.tree, leaves.action], terminal=np.ones(8, bool))
    visits = trees.root_visits()
    assert (np.sort(visits, axis=1) == [1] * 8 + [3] * 4 + [7] * 2 + [15] * 2).all()
    chosen = trees.gumbel_actions()
    assert (np.take_along_axis(visits, chosen[:, None], 1) == 15).all()
    # sigma multiplies Q by more than 50, so the values decide once they are known.
    np.testing.assert_array_equal(chosen, quality.argmax(axis=1))


def test_search_gumbel_with_fewer_actions_than_it_considers():
    """No index beyond a root's own actions, whatever the width of the batch, after failed edges and after a move."""
    width = np.array([0, 1, 2, 3, 16])
    trees = TreeBatch(5, 64, max_actions=16, gumbel_considered=16, gumbel_simulations=20, seed=2)
    trees.set_roots(np.zeros(5), np.ones((5, 16)), counts=width)
    trees.drop(trees.select(trees=[2]), fail=True)  # one action of two is left
    for simulations in (20, 40):
        for _ in range(20):
            leaves = trees.select()
            waiting = leaves.status == EVALUATE
            assert (leaves.action[waiting] < 16).all() and not waiting[0]
            trees.update(leaves, np.zeros(5), np.ones((5, 16)), counts=np.full(5, 3))
        visits, chosen = trees.root_visits(), trees.gumbel_actions()
        assert chosen[0] == -1 and visits[0].sum() == 0  # no action: none is chosen
        assert (chosen[1:] >= 0).all() and (chosen[1:] < width[1:]).all()
        assert (visits[np.arange(16) >= width[:, None]] == 0).all()
        assert (visits[1:].sum(axis=1) == simulations).all() and visits[2].max() == simulations
    trees.advance_root(chosen)
    trees.select()
    visits, chosen = trees.root_visits(), trees.gumbel_actions()
    assert visits.shape[1] == 3 and (chosen[1:] < 3).all()


def test_search_root_noise_is_a_mixture():
    trees = TreeBatch(512, 4, max_actions=5, seed=1)
    priors = np.tile(np.array([0.1, 0.2, 0.3, 0.4, 0.0], np.float32), (512, 1))
    trees.set_roots(np.zeros(512), priors)
    trees.add_root_noise(alpha=0.5, fraction=0.25)
    mixed = trees.root_priors().astype(float)
    np.testing.assert_allclose(mixed.sum(axis=1), 1.0, atol=1e-6)
    noise = (mixed - 0.75 * priors) / 0.25
    assert noise.min() > -1e-6
    # Dirichlet(0.5) over 5: mean 1/5, variance (1/5 · 4/5) / (5 · 0.5 + 1).
    np.testing.assert_allclose(noise.mean(axis=0), 0.2, atol=0.04)
    np.testing.assert_allclose(noise.var(), 0.16 / 3.5, rtol=0.15)
    assert len(np.unique(mixed[:, 0])) == 512  # each tree has its own

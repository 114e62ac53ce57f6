"""Search strategies over a vault whose code is known, with a policy whose probabilities are known."""

import dataclasses
import json
import math
import re
from collections import deque

import numpy as np
import pytest

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.agent.protocol import Protocol
from manus_fast.agent.trajectory import build_rows
from manus_fast.envs.base import InlineEnvs, Task, failure
from manus_fast.modeling.tiny import make_tokenizer
from manus_fast.rewards.shaping import RewardConfig, make_shape
from manus_fast.rollout.engine import Completion
from manus_fast.rollout.scheduler import RolloutConfig
from manus_fast.rollout.seeds import uniforms
from manus_fast.search.base import Tree
from manus_fast.search.config import STRATEGIES, MCTSConfig, SearchConfig
from manus_fast.search.driver import Searcher
from manus_fast.search.got import _merge
from manus_fast.search.values import QUESTION

ACTIONS = ("turn left", "turn right", "wait")
CHANCES = (0.6, 0.3, 0.1)
REPLIES = [f"Think: on\nAct: {action}" for action in ACTIONS]


class Vaults:
    """An EnvBatch: turn by turn a path of L and R; solved where it equals task.data["code"], over at its length.
    Waiting changes nothing. `drift`: worlds that were reset before say something else; `broken`: paths that fail;
    `lost`: paths whose saved worlds cannot be restored."""

    def __init__(self, slots, drift=False, broken=(), lost=()):
        self.slots, self.drift, self.broken, self.lost = slots, drift, dict.fromkeys(broken, 2), lost
        self.worlds = [None] * slots
        self.resets = 0

    def _text(self, path):
        return f"path {' '.join(path)}" if path else "start"

    def reset(self, slots, tasks, seeds):
        for slot, task in zip(slots, tasks, strict=True):
            self.worlds[slot] = [task.data["code"], "", 0]
            self.resets += 1
        text = "elsewhere" if self.drift and self.resets > len(slots) else "start"
        return [text for _ in slots], [{"admissible": list(ACTIONS)} for _ in slots]

    def step(self, slots, actions):
        out = []
        for slot, action in zip(slots, actions, strict=True):
            world = self.worlds[slot]
            world[1] += {"turn left": "L", "turn right": "R"}.get(action, "")
            world[2] += 1
            code, path, steps = world
            if self.broken.get(path, 0) > 0:
                bad = failure("the vault broke")
                out.append((bad.observation, bad.reward, bad.terminated, bad.truncated, bad.info))
                continue
            won, over = path == code, len(path) >= len(code)
            info = {"admissible": list(ACTIONS), "success": won}
            out.append((self._text(path), float(won), over, not over and steps >= 8, info))
        columns = list(zip(*out, strict=True))
        return [list(columns[0]), *(np.asarray(c) for c in columns[1:4]), list(columns[4])]

    def save(self, slot):
        return json.dumps(self.worlds[slot]).encode()

    def restore(self, slot, state):
        if json.loads(state)[1] in self.lost:
            raise RuntimeError("the bytes are gone")
        self.worlds[slot] = json.loads(state)

    def state_hash(self, slot):
        return hash(tuple(self.worlds[slot][:2]))

    def close(self):
        pass


class Vault:
    name, splits, task_types, max_steps, instructions = "vault", ("train",), ("code",), 8, "Open the vault."

    def __init__(self, batch=True, **options):
        self.batch, self.options = batch, options

    def make_batch(self, slots):
        if not self.batch:
            raise ValueError("no batch")
        return Vaults(slots, **self.options)

    def make_async(self, slots):
        return InlineEnvs(Vaults(slots, **self.options))


TEXTS = [*REPLIES, "start path L R elsewhere", Protocol().system_prompt(Vault.instructions), QUESTION]
TOKENIZER = make_tokenizer(TEXTS)
FORMAT = ChatFormat(TOKENIZER)


class Dice:
    """An engine that draws a reply by the request's seed from CHANCES; greedy takes the first. Every token of a reply
    has log(chance), so that exp(sum log-prob / length) is the chance itself. Answers the latest request first."""

    version, max_length = 3, 512

    def __init__(self, chances=CHANCES, verdict=None, answers=2):
        self.chances, self.verdict, self.answers = chances, verdict, answers
        self.queue = deque()
        self.seeds = []

    def submit(self, request):
        self.queue.append(request)
        self.seeds.append(request.seed)

    def poll(self, timeout):
        done = []
        while self.queue and len(done) < self.answers:
            request = self.queue.pop()
            text = TOKENIZER.decode(request.prompt_ids.tolist())
            if "impossible" in text:
                ids, chance = FORMAT.reply(self.verdict), 1.0
            else:
                seed = np.array([request.seed], np.uint64)
                u = 0.0 if request.temperature == 0 else uniforms(seed, np.zeros(1, np.uint64))[0]
                number = int(np.searchsorted(np.cumsum(self.chances), u, side="right"))
                ids, chance = FORMAT.reply(REPLIES[number]), self.chances[number]
            cut = len(ids) > request.max_tokens
            ids = ids[: request.max_tokens].astype(np.int32)
            logs = np.full(len(ids), math.log(chance), np.float32)
            done.append(Completion(request.id, ids, logs, "length" if cut else "stop", self.version))
        return done

    def abort(self, id):
        self.queue = deque(r for r in self.queue if r.id != id)

    def end_session(self, session):
        pass


def tasks(*codes):
    return [Task(f"vault/{number}", "code", "train", {"code": code}) for number, code in enumerate(codes)]


def search(codes, environment=None, engine=None, score=None, judging=None, **options):
    options = {"temperature": 1.0, **options}
    rollout = RolloutConfig(max_turn_tokens=16)
    searcher = Searcher(
        engine or Dice(),
        environment or Vault(),
        Context(FORMAT),
        Protocol(),
        rollout,
        SearchConfig(**options),
        make_shape(RewardConfig(success_bonus=1.0)),
        score=score,
        judge=judging,
    )
    trees = searcher.run(tasks(*codes), list(range(7, 7 + len(codes))))
    return trees, searcher


def actions(tree):
    return [turn.action for turn in tree.trajectory().turns]


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "greedy"])
def test_every_strategy_opens_a_vault_that_greedy_does_not(strategy):
    (greedy,), _ = search(["RRL"], strategy="greedy")
    assert actions(greedy) == ["turn left"] * 3 and not greedy.played.success
    (tree,), searcher = search(["RRL"], strategy=strategy, budget_tokens=4000)
    assert tree.played.success and tree.solution is tree.played
    assert [a for a in actions(tree) if a != "wait"] == ["turn right", "turn right", "turn left"]
    assert tree.solved_at <= tree.tokens <= 4000 and tree.reserved == 0
    episode = tree.trajectory(env="vault")
    assert episode.success and episode.terminated and episode.valid
    waits = actions(tree).count("wait")
    assert episode.reward == pytest.approx(2 - 0.01 * (3 + waits))  # the vault's 1, the bonus of 1, steps
    assert searcher.stats.tokens == tree.tokens


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("budget", [0, 5, 40, 300])
def test_the_budget_is_never_exceeded(strategy, budget):
    (tree,), _ = search(["RRRRRR"], strategy=strategy, budget_tokens=budget, stop_on_success=False)
    assert tree.tokens <= budget and tree.reserved == 0
    if budget == 0:
        assert tree.played is tree.root and tree.trajectory().turns == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trees_do_not_depend_on_arrival_order_or_company(strategy):
    codes = ["RRL", "LRL", "RLRR"]
    shape = {"strategy": strategy, "budget_tokens": 600}
    alone = [search([code], **shape)[0][0] for code in codes[:1]]
    together, _ = search(codes, engine=Dice(answers=1), trees=2, **shape)
    again, _ = search(codes, engine=Dice(answers=50), trees=3, **shape)
    for one, other in zip([*alone, *together], [together[0], *again], strict=True):
        assert [(n.depth, n.proposal and n.proposal.action) for n in one.nodes] == [
            (n.depth, n.proposal and n.proposal.action) for n in other.nodes
        ]
        assert one.tokens == other.tokens and actions(one) == actions(other)


@pytest.mark.parametrize("strategy", ["dfsdt", "mcts"])
def test_replayed_worlds_give_the_same_trees_as_saved_ones(strategy):
    options = {"strategy": strategy, "budget_tokens": 600}
    (saved,), _ = search(["RRL"], prune_repeats=False, **options)
    (replayed,), searcher = search(["RRL"], Vault(batch=False), prune_repeats=False, **options)
    assert actions(saved) == actions(replayed) and saved.tokens == replayed.tokens
    assert searcher.stats.mismatches == 0
    with pytest.raises(ValueError, match=r"search\.state: expected replay for vault"):
        search(["RRL"], Vault(batch=False), state="save")


def test_a_world_that_plays_differently_again_fails_the_branch():
    (tree,), searcher = search(["RRL"], Vault(drift=True), state="replay", strategy="best_of_n", n=6)
    assert searcher.stats.mismatches == tree.failed > 0
    lost = [node for node in tree.nodes if node.error]
    assert lost and all("gave another observation" in node.error for node in lost)
    assert all(node.reward == 0 and not node.proposals for node in lost)


def test_a_branch_that_breaks_twice_is_left_and_the_rest_goes_on():
    (tree,), searcher = search(["RL"], Vault(broken=["L"]), strategy="mcts", value="reward", simulations=20)
    assert tree.played.success and actions(tree) == ["turn right", "turn left"]
    assert searcher.stats.failed == tree.failed == 1


def test_a_world_that_cannot_be_restored_ends_what_follows_it_alone():
    (tree,), _ = search(["RL"], Vault(lost=["L"]), strategy="mcts", value="reward", simulations=20)
    assert tree.played.success and actions(tree) == ["turn right", "turn left"]
    lost = [node for node in tree.nodes if node.error]
    assert lost and all(n.error.endswith("the bytes are gone") and "L" in n.parent.observation for n in lost)


def test_replies_with_the_same_action_are_merged_and_priors_are_shares_of_the_chances():
    (tree,), _ = search(["RRRR"], strategy="beam", proposals=40, breadth=1, widen=False)
    root = tree.root
    assert root.drawn == 40 and len(root.proposals) == 3 and sum(p.replies for p in root.proposals) == 40
    # Replies that say the same count once: what is left are the three chances, which sum to 1.
    assert {p.action: round(p.prior, 5) for p in root.proposals} == dict(zip(ACTIONS, CHANCES, strict=True))
    assert tree.merged == sum(n.drawn - len(n.proposals) for n in tree.nodes)


def test_beam_keeps_the_likeliest_paths_and_got_merges_what_is_the_same():
    (tree,), _ = search(["RRRR"], strategy="beam", proposals=30, breadth=2, widen=False, stop_on_success=False)
    expanded = [n for n in tree.nodes if n.drawn and n.depth == 2]
    ways = sorted("".join(n.proposal.action[5] for n in node.path) for node in expanded)
    assert ways == ["ll", "rl"] or ways == ["ll", "lr"]  # 0.36, and one of the two paths of 0.18
    (graph,), _ = search(["RRRR"], strategy="got", proposals=30, breadth=9, widen=False, value="reward")
    merged = [n for n in graph.nodes if n.merged_into is not None]
    assert merged and all(n.situation == n.merged_into.situation for n in merged)
    assert not any(n.proposals for n in merged if n.merged_into.depth <= n.depth and not n.repeats)


def test_mcts_statistics_come_from_the_engine_and_sum_to_the_simulations():
    (tree,), _ = search(
        ["RRRRRR"], strategy="mcts", value="reward", simulations=30, proposals=8, stop_on_success=False, widen=False
    )
    children = [p.child for p in tree.root.proposals if p.child is not None and not p.child.repeats]
    waits = sum(p.child is not None and p.child.repeats for p in tree.root.proposals)
    deeper = sum(n.repeats and n.depth > 1 for n in tree.nodes)
    assert tree.simulations == 30
    assert sum(c.visits for c in children) == 30 - waits - deeper  # a turn in a circle is a simulation but no visit
    assert tree.root.visits == 31 - waits - deeper


@pytest.mark.parametrize("options", [{"leaves": 3}, {"per_move": 20}, {"per_move": 4, "gumbel_considered": 2},
                                     {"noise_alpha": 0.5}, {"rule": "uct", "c": 0.5}, {"max_nodes": 4}])  # fmt: skip
def test_mcts_options_are_served(options):
    (tree,), _ = search(["RRL"], strategy="mcts", simulations=40, proposals=20, mcts=MCTSConfig(**options))
    if options != {"max_nodes": 4}:
        assert tree.played.success
    assert tree.simulations <= 40


def test_values_from_the_callable_lead_the_search_and_are_asked_for_in_batches():
    """V = 1 exactly where the path is a prefix of the code: tot with breadth 1 walks straight to it."""
    code, sizes = "RLRRLR", []

    def score(rows):
        sizes.append(len(rows))
        texts = [TOKENIZER.decode(row.token_ids.tolist()) for row in rows]
        paths = [re.findall(r"path((?: [LR])*)", text)[-1].replace(" ", "") if "path" in text else "" for text in texts]
        return np.array([float(code.startswith(path)) for path in paths], np.float32)

    trees, searcher = search(
        [code, code], strategy="tot", value="model", breadth=1, proposals=12, widen=False, score=score
    )
    assert all(tree.played.success for tree in trees)
    assert sum(sizes) == searcher.stats.scored > len(sizes)
    assert trees[0].trajectory().turns[1].value == 1.0
    for strategy in ("got", "mcts"):
        (tree,), _ = search([code], strategy=strategy, value="model", budget_tokens=3000, score=score)
        assert tree.played.success
    with pytest.raises(ValueError, match=r"search\.value: expected reward, rollout or verbal"):
        search([code], strategy="tot", value="model")
    with pytest.raises(ValueError, match=r"score: expected .* finite values"):
        search([code], strategy="tot", value="model", score=lambda rows: np.full(len(rows), np.nan))


def test_a_judge_chooses_among_episodes_and_is_not_told_which_is_solved():
    """All of n episodes are played, each distinct one is judged once by its whole row, and the highest score is
    played: here the one that turns left most, though another opened the vault."""
    seen = []

    def judge(rows):
        texts = [TOKENIZER.decode(row.token_ids[row.loss_mask].tolist()) for row in rows]
        seen.extend(texts)
        return np.asarray([text.count("turn left") for text in texts], np.float32)

    options = {"strategy": "best_of_n", "n": 12, "judge": "model"}
    (tree,), searcher = search(["RL"], judging=judge, **options)
    assert tree.solution is not None and tree.simulations == 12
    ends = [node for node in tree.nodes if node.closed]
    assert searcher.stats.scored == len(seen) == len(ends) > 1
    assert max(text.count("turn left") for text in seen) == actions(tree).count("turn left") > 1
    assert not tree.trajectory().success
    (told,), _ = search(["RL"], **options | {"judge": "environment"})
    assert told.trajectory().success
    with pytest.raises(ValueError, match=r"search.judge: expected environment without a reward model, got 'model'"):
        search(["RL"], **options)
    with pytest.raises(ValueError, match=r"search.strategy: expected best_of_n with search.judge model, got 'mcts'"):
        SearchConfig(strategy="mcts", judge="model")
    with pytest.raises(ValueError, match=r"judge: expected \d+ finite values"):
        search(["RL"], judging=lambda rows: np.full(len(rows), np.nan), **options)


def test_the_policys_own_word_is_a_value():
    engine = Dice(verdict="likely")
    (tree,), _ = search(["RRRRRR"], strategy="tot", value="verbal", breadth=1, widen=False, engine=engine)
    valued = [node.value for node in tree.nodes if node.value is not None]
    assert valued and set(valued) == {0.05}


def test_rollouts_value_a_node_by_the_discounted_return_from_there():
    (tree,), _ = search(["LLL"], strategy="mcts", simulations=1, stop_on_success=False, engine=Dice((1.0, 0.0, 0.0)))
    first = tree.root.proposals[0].child
    assert tree.root.value == pytest.approx(-0.01 - 0.01 * 0.99 + 1.99 * 0.99**2)
    assert first.value == pytest.approx(-0.01 + 1.99 * 0.99)


def test_trajectories_are_rows_of_what_was_sampled_and_share_node_ids():
    trees, _ = search(["RRL", "RRR"], strategy="best_of_n", n=8, stop_on_success=False)
    tree = trees[0]
    leaves = [n for n in tree.nodes if n.terminated][:3]
    episodes = [tree.trajectory(leaf, member=m) for m, leaf in enumerate(leaves)]
    for episode in episodes:
        (row,) = build_rows([episode])
        sampled = np.concatenate([turn.ids for turn in episode.turns])
        assert row.token_ids[row.loss_mask].tolist() == sampled.tolist()
        assert [t.node_id for t in episode.turns] == [n.id for n in leaves[episode.member].path]
    ids = [node.id for tree in trees for node in tree.nodes]
    assert len(set(ids)) == len(ids)


def test_a_config_that_cannot_be_served_says_what_it_expects():
    for options, message in (
        ({"breadth": 0}, r"search\.breadth: expected an integer >= 1, got 0"),
        ({"discount": 1.5}, r"search\.discount: expected a number in \[0, 1\]"),
        ({"mcts": MCTSConfig(gumbel_considered=4)}, r"search\.simulations: expected a number"),
    ):
        with pytest.raises(ValueError, match=message):
            SearchConfig(**options)
    with pytest.raises(ValueError, match=r"search\.mcts\.leaves"):
        MCTSConfig(leaves=0)
    assert dataclasses.asdict(SearchConfig())["strategy"] == "mcts"


def test_got_never_ends_a_path_for_what_follows_on_it():
    config = SearchConfig(strategy="got", prune_repeats=False)
    tree = Tree(0, tasks("L")[0], 0, config, max_steps=8)
    above = tree.add(tree.root, None)
    below, beside = tree.add(above, None), tree.add(tree.root, None)
    tree.root.situation, above.situation = 1, 2
    below.situation = beside.situation = 2
    below.reward = 1.0  # a turn back into the situation above that pays
    known = {1: tree.root, 2: above}
    assert _merge(tree, [below], known) == [below] and above.merged_into is None
    assert _merge(tree, [beside], known) == [] and beside.merged_into is below

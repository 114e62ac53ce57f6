"""What a tree teaches and how it is drawn, on the vault of test_search_strategies."""

import copy
import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from test_search_strategies import FORMAT, TOKENIZER, Dice, search
from transformers import LlamaConfig, LlamaForCausalLM

from manus_fast.agent.context import Context
from manus_fast.agent.trajectory import build_rows
from manus_fast.data.packing import pack
from manus_fast.data.preferences import fingerprint, preference, preference_rows
from manus_fast.learn.advantages import Episodes, estimate
from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy
from manus_fast.learn.update import PolicyGradientUpdate
from manus_fast.search.draw import draw
from manus_fast.search.targets import outcomes, preference_pairs, rows_once, sibling_episodes, sibling_groups


@pytest.fixture(scope="module")
def tree():
    """Every path of the vault RL, waits left out: solved once, after a right and a left turn."""
    options = {"strategy": "beam", "proposals": 30, "breadth": 9, "widen": False, "stop_on_success": False}
    (found,), _ = search(["RL"], engine=Dice((0.5, 0.5, 0.0)), discount=0.5, **options)
    assert len(found.nodes) == 7
    return found


def by_path(tree):
    return {"".join(n.proposal.action[5] for n in node.path): node for node in tree.nodes}


def test_outcomes_are_the_best_discounted_returns_beneath(tree):
    nodes, found = by_path(tree), outcomes(tree)
    assert found[nodes["rl"]] == (pytest.approx(1.99), True)  # 1 of the vault, bonus 1, step -0.01
    assert found[nodes["r"]] == (pytest.approx(-0.01 + 0.5 * 1.99), True)
    assert found[nodes["l"]] == (pytest.approx(-0.01 - 0.5 * 0.01), False)


def test_siblings_share_their_prompt_and_pairs_prefer_what_led_to_the_solution(tree):
    groups = sibling_groups(tree)
    assert [len(group) for group in groups] == [2, 2, 2]
    assert all(len({id(s.proposal.node) for s in group}) == 1 for group in groups)
    pairs = preference_pairs(tree, "Open.")
    assert [(p["chosen"][0]["content"], p["rejected"][0]["content"]) for p in pairs] == [
        ("Think: on\nAct: turn right", "Think: on\nAct: turn left"),
        ("Think: on\nAct: turn left", "Think: on\nAct: turn right"),
    ]
    first, second = pairs
    assert first["prompt"] == [{"role": "system", "content": "Open."}, {"role": "user", "content": "start"}]
    assert [m["role"] for m in second["prompt"]] == ["system", "user", "assistant", "user"]
    assert second["prompt"][-1]["content"] == "path R"
    assert first["level"] == "step" and first["margin"] == pytest.approx(0.5 * 2.0)
    assert preference_pairs(tree, "Open.", margin=1.5) == [second]  # 2 apart, discounted from its own turn on
    with pytest.raises(ValueError, match="margin, per_node"):
        preference_pairs(tree, "", margin=-1)
    json.dumps(pairs)


def test_pairs_are_read_by_tokens_or_by_text_with_what_was_sampled_trained(tree):
    """Both ways give the rows of a rollout: prompt and observations masked, the replies as sampled."""
    context = Context(FORMAT)
    name = fingerprint(TOKENIZER)
    for tokens in (name, "another tokenizer's"):
        records = json.loads(json.dumps(preference_pairs(tree, "Open.", tokenizer=tokens)))
        pairs = preference_rows([preference(record) for record in records], context)
        assert [pair.level for pair in pairs] == ["step", "step"] and pairs[0].outcome == (1.0, 0.0)
        (chosen,), (rejected,) = pairs[1].chosen, pairs[1].rejected
        for row, action in ((chosen, "left"), (rejected, "right")):
            assert TOKENIZER.decode(row.token_ids[row.loss_mask].tolist()).endswith(f"turn {action}<|end|>")
        if tokens == name:
            node = by_path(tree)["r"]
            proposal = next(p for p in node.proposals if p.action == "turn left")
            assert np.array_equal(chosen.token_ids, [*node.conversation.prompt(), *proposal.ids])
            assert chosen.turn_id[chosen.loss_mask].tolist() == [1] * len(proposal.ids)


def test_sibling_groups_are_a_collection_for_the_policy_gradient(tree):
    """One group a node, GRPO's advantages by hand; computed as a tree it is the same step for fewer operations."""
    episodes = sibling_episodes([tree, tree])
    assert [e.group for e in episodes] == [n for n in range(6) for _ in range(2)]
    assert [e.member for e in episodes] == [0, 1] * 6
    rows = build_rows(episodes)
    root = [(e.turns[0].action, e.reward) for e in episodes[:2]]
    assert sorted(root) == [("turn left", pytest.approx(-0.015)), ("turn right", pytest.approx(0.985))]
    for episode, row in zip(episodes, rows, strict=True):
        (turn,) = episode.turns
        assert row.loss_mask.sum() == len(turn.ids) and row.loss_mask[len(turn.prompt_ids) :].all()
        assert np.array_equal(row.log_prob[row.loss_mask], turn.log_probs)
        assert row.reward[-1] == pytest.approx(episode.reward)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), num_key_value_heads=1, **shape)).eval()
    moved = []
    for share in (False, True):
        config = PPOConfig(advantage="grpo", batch_size=12, share_prefixes=share)
        policy = Policy(copy.deepcopy(model))
        packed = pack(rows, share)
        advantage = estimate(packed, config, Episodes.of(episodes)).advantage
        # Two of a group are one deviation of sqrt(1/2) apart; where both failed alike there is nothing to choose.
        signs = {e.group: [] for e in episodes}
        for number, episode in enumerate(episodes):
            signs[episode.group].append(float(advantage[packed.row == number][-1]))
        assert sorted(signs[0]) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4)
        assert sum(values == [0.0, 0.0] for values in signs.values()) == 2
        update = PolicyGradientUpdate(policy, make_backend(policy, BackendConfig(), config.optimizer()), config)
        stats = update.run(rows, Episodes.of(episodes), iteration=0, progress=0.0, learning_rate=1e-3)
        moved.append(torch.cat([p.detach().flatten() for p in policy.parameters()]))
    assert torch.allclose(*moved, atol=2e-5) and stats["update/flops_ratio"] > 2


def test_greedy_replies_are_no_samples():
    (greedy,), _ = search(["RL"], strategy="greedy")
    assert [p.temperature for n in greedy.nodes for p in n.proposals] == [0.0, 0.0]
    assert sibling_groups(greedy) == []


def test_a_shared_turn_is_trained_on_once(tree):
    nodes = by_path(tree)
    episodes = [tree.trajectory(nodes[path]) for path in ("rl", "rr", "ll")]
    plain, once = build_rows(episodes), rows_once(episodes)
    trained = [row.turn_id[row.loss_mask] for row in once]
    assert [sorted(set(ids.tolist())) for ids in trained] == [[0, 1], [1], [0, 1]]
    turns = {n.id: len(n.proposal.ids) for path in ("rl", "rr", "ll") for n in nodes[path].path}
    assert sum(row.loss_mask.sum() for row in once) == sum(turns.values())
    for before, after in zip(plain, once, strict=True):
        assert np.array_equal(before.token_ids, after.token_ids)
        assert not after.reward[~after.loss_mask].any() and not after.log_prob[~after.loss_mask].any()
    rewards = sum(row.reward.sum() for row in once)
    assert rewards == pytest.approx(sum(n.reward for n in {m for p in ("rl", "rr", "ll") for m in nodes[p].path}))
    assert len(rows_once([episodes[0], episodes[0]])) == 1


def test_the_drawing_is_xml_with_every_node_and_marks_the_path(tree):
    root = ElementTree.fromstring(draw(tree))
    space = "{http://www.w3.org/2000/svg}"
    circles = list(root.iter(f"{space}circle"))
    ideas = sum(p.child is None for n in tree.nodes for p in n.proposals)
    assert len(circles) == len(tree.nodes) + ideas
    assert sum(c.get("stroke") == "#15803d" for c in circles) == 3  # the root and the two turns that are played
    assert any("solved after" in (t.text or "") for t in root.iter(f"{space}text"))
    heights = [float(c.get("cy")) for c in circles]
    assert heights == sorted(heights) and min(np.diff(heights)) >= 16  # a row each, parents before children
    words = [t.text or "" for t in root.iter(f"{space}text")]
    assert words.count("turn left") == words.count("turn right") == 3
    assert [w for w in words if w.startswith("solved")] == ["solved: path R L"]
    # Nothing is cut off: what begins a row ends before the next column, and every row is inside.
    width, height = float(root.get("width")), float(root.get("height"))
    assert max(heights) < height and all(float(t.get("x")) < width for t in root.iter(f"{space}text"))


def test_the_panels_plot_has_a_line_for_every_strategy():
    from benchmarks.search_plot import RESULTS, plot

    record = json.loads(RESULTS.read_text())
    root = ElementTree.fromstring(plot(record))
    names = {row["name"] for row in record["rows"]}
    labels = {(text.text or "").rpartition(" ")[0] for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert names <= labels and "greedy" in names and "MCTS" in names

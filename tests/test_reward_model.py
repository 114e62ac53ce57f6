"""The reward model: losses by hand, places by hand, gradients that don't depend on packing, and what is saved."""

import copy
import math

import numpy as np
import pytest
import torch
from learning import random_rows, tiny_model

from manus_fast.agent.trajectory import Row
from manus_fast.data.preferences import RowPair
from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.offline import train_offline
from manus_fast.learn.pairs import PackedPairs
from manus_fast.learn.reward_model import (
    RewardModelConfig,
    RewardObjective,
    StepScores,
    accuracy,
    bradley_terry,
    held_out,
    places,
)
from manus_fast.rewards.model import RewardModel

ROWS = random_rows(16, seed=7)
WON = (1.0, 0.0)
PAIRS = [
    RowPair(ROWS[0:1], ROWS[1:2], WON),
    RowPair(ROWS[2:3], ROWS[3:4], WON),
    RowPair(ROWS[4:6], ROWS[6:8]),
    RowPair(ROWS[8:9], ROWS[9:10], WON, "step"),
    RowPair(ROWS[10:11], ROWS[11:13], (0.75, 0.25)),
]


def row(text):
    """A row of one letter a token: letters of a word are context, A, B, … the tokens of turns 0, 1, …"""
    turn = np.asarray([ord(c) - ord("A") if c.isupper() else -1 for c in text], np.int32)
    zero = np.zeros(len(text), np.float32)
    return Row(np.arange(len(text)), turn >= 0, turn, zero, zero.copy(), 0)


def test_bradley_terry_by_hand():
    """−ln σ(2) = ln(1 + e^-2) = 0.1269280, −ln σ(-1) = ln(1 + e) = 1.3132617."""
    losses = bradley_terry(torch.tensor([[1.5, -0.5], [0.0, 1.0]]))
    assert losses.tolist() == pytest.approx([0.1269280, 1.3132617], abs=1e-6)


def test_places_by_hand():
    """ooAAooBo: replies end at 3 and 6, the second one begins after 5; the first begins after what both sides share."""
    pairs = PackedPairs([RowPair([row("ooAAooBo")], [row("oAB")]), RowPair([row("oA")], [row("oA"), row("ooB")])], "x")
    batch, _ = pairs.select(np.array([0, 1]))
    found = places(batch, 2)
    assert found.outcome.tolist() == [6, 8 + 2, 11 + 1, 13 + 2 + 2]
    got = sorted(zip(found.step.tolist(), found.side.tolist(), strict=True))
    # The rejected side of the first pair has two replies without a word between: the place between them counts twice.
    assert got == [(3, 0), (5, 0), (6, 0), (9, 1), (9, 1), (10, 1), (12, 2), (14, 3), (16, 3), (17, 3)]


def test_step_scores_by_hand():
    """Side means 1 and -0.5; with outcomes 1 and 0 the entropies are ln(1 + e^-s) and ln(1 + e^s), averaged."""
    scores = StepScores(torch.tensor([0.0, 2.0, -0.5]), torch.tensor([0, 0, 1]), 1)
    assert scores.mean.tolist() == [[1.0, -0.5]]
    expected = [(math.log(2) + math.log1p(math.exp(-2))) / 2, math.log1p(math.exp(-0.5))]
    assert scores.cross_entropy(torch.tensor([[1.0, 0.0]])).tolist() == [pytest.approx(expected)]


def fresh(seed=1):
    """A reward model whose heads prefer something."""
    model = RewardModel.of(tiny_model(), "a tokenizer")
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(2, 32, generator=torch.Generator().manual_seed(seed)))
    return model


def gradients(accumulation=1, order=None, pairs=PAIRS, **options):
    config = RewardModelConfig(batch_size=5, **options)
    model = fresh()
    backend = make_backend(model, BackendConfig(), config.optimizer())
    objective = RewardObjective(model, pairs, config, 1, accumulation)
    _, parts, _ = objective.accumulate(backend, np.arange(len(pairs)) if order is None else np.asarray(order))
    return model, backend.gradients(), objective.figures(parts.sum(0))


@pytest.mark.parametrize(
    ("accumulation", "options", "order"), [(5, {}, None), (1, {"max_tokens": 60}, None), (1, {}, [3, 0, 4, 1, 2])]
)
def test_the_gradient_does_not_depend_on_micro_batches_packing_or_order(accumulation, options, order):
    _, whole, figures = gradients()
    _, cut, same = gradients(accumulation, order, **options)
    assert same == pytest.approx(figures, rel=1e-4, abs=1e-5)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_loss_against_each_row_scored_alone_by_plain_transformers():
    model, _, figures = gradients()
    plain = copy.deepcopy(model.decoder)
    plain.set_attn_implementation("eager")

    def heads(one):
        hidden = plain(input_ids=torch.from_numpy(one.token_ids)[None]).last_hidden_state[0]
        return model.head(hidden).detach().double().numpy()

    def side(rows):
        """(outcome score, step scores) of one side."""
        steps, first = [], True
        for one in rows:
            scores = heads(one)
            for turn in sorted(set(one.turn_id[one.loss_mask].tolist())):
                at = np.flatnonzero(one.turn_id == turn)
                steps += [scores[at[-1], 1]] if first else [scores[at[0] - 1, 1], scores[at[-1], 1]]
                first = False
        return heads(rows[-1])[np.flatnonzero(rows[-1].loss_mask)[-1], 0], np.asarray(steps)

    def entropy(score, label):
        return np.mean(np.log1p(np.exp(score)) - label * score)

    total, right = 0.0, []
    for pair in PAIRS:
        (a, steps_a), (b, steps_b) = side(pair.chosen), side(pair.rejected)
        whole = pair.level == "trajectory"
        total += whole * math.log1p(math.exp(b - a)) + math.log1p(math.exp(steps_b.mean() - steps_a.mean()))
        if whole:
            right.append(a > b)
        if pair.outcome is not None:
            x, y = pair.outcome
            total += whole * (entropy(a, x) + entropy(b, y)) / 2 + (entropy(steps_a, x) + entropy(steps_b, y)) / 2
    assert figures["loss"] == pytest.approx(total / 5, rel=1e-4)
    assert figures["accuracy"] == pytest.approx(np.mean(right))
    assert accuracy(model, PAIRS)["outcome"] == pytest.approx(np.mean(right))


def test_training_orders_the_pairs_and_what_is_saved_scores_the_same(tmp_path):
    config = RewardModelConfig(batch_size=5, epochs=30, learning_rate=3e-3, patience=None)
    source = tiny_model()
    before = [p.clone() for p in source.parameters()]
    model = RewardModel.of(source, "a tokenizer")
    backend = make_backend(model, BackendConfig(), config.optimizer())
    result = train_offline(backend, RewardObjective(model, PAIRS, config, 1), config)
    assert result.steps == 30 and accuracy(model, PAIRS) == {"outcome": 1.0, "step": 1.0}
    assert all(torch.equal(a, b) for a, b in zip(before, source.parameters(), strict=True))
    model.save_pretrained(tmp_path / "model")
    again = RewardModel.load(tmp_path)  # a run's folder will do
    assert (again.heads, again.tokenizer) == (("outcome", "step"), "a tokenizer")
    ended = [pair.chosen[0] for pair in PAIRS[:2]] + [pair.rejected[0] for pair in PAIRS[:2]]
    for head in ("outcome", "step"):
        assert np.array_equal(again.score(ended, head), model.score(ended, head))
        # In packs of any size, each row as if alone.
        assert again.score(ended, head, max_tokens=1) == pytest.approx(again.score(ended, head), abs=1e-5)
    share = model.scorer("outcome", probability=True)(ended)
    assert share.dtype == np.float32 and (share[:2] > 0.5).all() and (share[2:] < 0.5).all()
    assert share == pytest.approx(1 / (1 + np.exp(-model.score(ended, "outcome"))), abs=1e-6)


def test_pairs_of_one_prompt_are_held_out_together():
    shared = RowPair([ROWS[0]], [ROWS[2]])
    train, rest = held_out([*PAIRS[:4], shared], 0.5)
    assert train == [PAIRS[0], shared, PAIRS[1]] and rest == PAIRS[2:4]
    assert held_out(PAIRS, 0.0) == (PAIRS, [])


def test_refusals(tmp_path):
    steps = [RowPair([ROWS[0]], [ROWS[1]], WON, "step")]
    config = RewardModelConfig(batch_size=1)
    model = RewardModel.of(tiny_model(), "a tokenizer")
    with pytest.raises(ValueError, match=r"reward model: expected a trained head \(none is\), got 'outcome'"):
        model.scorer("outcome")
    RewardObjective(model, steps, config, 1)
    assert model.heads == ("step",)  # single steps are no whole episodes
    with pytest.raises(ValueError, match=r"expected a trained head \(step\), got 'outcome'"):
        model.scorer("outcome")
    with pytest.raises(ValueError, match=r"reward_model.step_coef: expected a number above 0"):
        RewardObjective(model, steps, RewardModelConfig(batch_size=1, step_coef=0.0), 1)
    with pytest.raises(ValueError, match=r"reward_model.path: expected a folder that manus-fast reward-model wrote"):
        RewardModel.load(tmp_path)
    for name, value in (
        ("held_out", 1.0),
        ("step_coef", -1),
        ("outcome_coef", -1),
        ("pays", "rank"),
        ("max_length", 1),
    ):
        with pytest.raises(ValueError, match=f"reward_model.{name}: expected"):
            RewardModelConfig(**{name: value})

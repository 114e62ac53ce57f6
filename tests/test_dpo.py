"""DPO: losses worked out by hand, and gradients that don't depend on micro-batches or packing."""

import copy
import math

import numpy as np
import pytest
import torch
from learning import random_rows, tiny_model

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import pack
from manus_fast.data.preferences import RowPair
from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.dpo import (
    DPOConfig,
    DPOObjective,
    first_difference,
    preference_loss,
    reference_log_prob,
    train_dpo,
)
from manus_fast.learn.offline import OfflineState, train_offline
from manus_fast.learn.pairs import PackedPairs, by_side
from manus_fast.learn.policy import Policy

ROWS = random_rows(20, seed=4)
# Seven pairs; the third has two rows on each side, as a windowed context gives them, the fourth one against two.
PAIRS = [
    RowPair(ROWS[0:1], ROWS[1:2]),
    RowPair(ROWS[2:3], ROWS[3:4]),
    RowPair(ROWS[4:6], ROWS[6:8]),
    RowPair(ROWS[8:9], ROWS[9:11]),
    RowPair(ROWS[11:12], ROWS[12:13]),
    RowPair(ROWS[13:14], ROWS[14:15]),
    RowPair(ROWS[15:16], ROWS[16:17]),
]


def table(values):
    return torch.tensor(values, dtype=torch.float32)


# Log-ratios of the chosen and the rejected side: first pair 1 and -1 (h = 2), second -0.5 and 0.5 (h = -1).
POLICY, REFERENCE = table([[-4.0, -7.0], [-3.5, -2.5]]), table([[-5.0, -6.0], [-3.0, -3.0]])
LENGTHS = table([[2.0, 4.0], [1.0, 5.0]])


@pytest.mark.parametrize(
    ("options", "expected", "rewards"),
    [
        # -ln σ(0.5·2) = ln(1 + e^-1) = 0.3132617; -ln σ(-0.5) = ln(1 + e^0.5) = 0.9740770
        ({"beta": 0.5}, [0.3132617, 0.9740770], [[0.5, -0.5], [-0.25, 0.25]]),
        # 0.9 · 0.3132617 + 0.1 · ln(1 + e) = 0.1 · 1.3132617; 0.9 · 0.9740770 + 0.1 · ln(1 + e^-0.5) = 0.1 · 0.4740770
        ({"beta": 0.5, "label_smoothing": 0.1}, [0.4132617, 0.9240770], [[0.5, -0.5], [-0.25, 0.25]]),
        # (2 - 1)² and (-1 - 1)²
        ({"beta": 0.5, "loss": "ipo"}, [1.0, 4.0], [[0.5, -0.5], [-0.25, 0.25]]),
        # h = 1/2 + 1/4 = 0.75 and -0.5/1 - 0.5/5 = -0.6: ln(1 + e^-1.5) = 0.2014133, ln(1 + e^1.2) = 1.4632825
        ({"beta": 2.0, "loss": "length_normalised"}, [0.2014133, 1.4632825], [[1.0, -0.5], [-1.0, 0.2]]),
    ],
)
def test_losses_by_hand(options, expected, rewards):
    losses, implicit = preference_loss(POLICY, REFERENCE, LENGTHS, DPOConfig(**options))
    assert losses.tolist() == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(implicit, table(rewards))


def test_gradient_by_hand():
    """d/dx -ln σ(βx) = -β(1 - σ(βx)): at h = 0 the chosen side is pushed up with β/2 and the rejected down with it."""
    log_prob = torch.zeros(1, 2, requires_grad=True)
    losses, _ = preference_loss(log_prob, torch.zeros(1, 2), torch.ones(1, 2), DPOConfig(beta=0.3))
    losses.sum().backward()
    assert log_prob.grad.tolist() == [[pytest.approx(-0.15), pytest.approx(0.15)]]


def test_very_unlike_sides_keep_the_loss_finite():
    log_prob = table([[-1e4, 0.0], [0.0, -1e4]]).requires_grad_()
    for loss in ("sigmoid", "ipo", "length_normalised"):
        losses, _ = preference_loss(log_prob, torch.zeros(2, 2), torch.ones(2, 2), DPOConfig(loss=loss, beta=1.0))
        losses.sum().backward()
        assert torch.isfinite(losses).all() and torch.isfinite(log_prob.grad).all()


def gradients(config, accumulation=1, order=None, pairs=PAIRS, drift=True):
    """Gradients and figures of one mini-batch of all pairs, at weights that are no longer the reference's."""
    policy = Policy(tiny_model())
    backend = make_backend(policy, BackendConfig(), config.optimizer())
    objective = DPOObjective(policy, pairs, config, 1, accumulation)
    if drift:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.02)
    _, parts, _ = objective.accumulate(backend, np.arange(len(pairs)) if order is None else np.asarray(order))
    return backend.gradients(), objective.figures(parts.sum(0))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "length_normalised"])
@pytest.mark.parametrize(
    ("accumulation", "max_tokens", "order"), [(7, None, None), (1, 60, None), (1, None, [6, 2, 0, 5, 1, 4, 3])]
)
def test_the_gradient_does_not_depend_on_micro_batches_packing_or_order(loss, accumulation, max_tokens, order):
    options = {"loss": loss, "batch_size": 7, "beta": 0.2, "sft_coef": 0.3}
    whole, figures = gradients(DPOConfig(**options))
    cut, same = gradients(DPOConfig(**options, max_tokens=max_tokens), accumulation, order)
    assert same == pytest.approx(figures, rel=1e-4, abs=1e-5)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_against_each_side_scored_alone():
    """The loss of the batch is the mean over pairs of the loss of sums over rows that never met in a pack."""
    config = DPOConfig(batch_size=7, beta=0.2)
    _, figures = gradients(config)
    reference = Policy(tiny_model())
    policy = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.02)

    def total(model, rows):
        """Log-probability of the trainable tokens by transformers' own forward pass."""
        plain = copy.deepcopy(model.model)
        plain.set_attn_implementation("eager")
        value = 0.0
        for row in rows:
            ids = torch.from_numpy(row.token_ids)
            scores = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            value += float(scores.detach()[torch.from_numpy(row.loss_mask)[1:]].sum())
        return value

    losses = []
    for pair in PAIRS:
        h = sum(
            sign * (total(policy, rows) - total(reference, rows))
            for sign, rows in ((1, pair.chosen), (-1, pair.rejected))
        )
        losses.append(math.log1p(math.exp(-0.2 * h)))
    assert figures["loss"] == pytest.approx(sum(losses) / 7, rel=1e-4)
    assert figures["accuracy"] == pytest.approx(sum(loss < math.log(2) for loss in losses) / 7)


def test_prompt_and_observation_tokens_take_no_part():
    """What follows the last reply changes neither figures nor gradients."""
    row, other = copy.deepcopy(ROWS[0]), ROWS[1]
    end = int(np.flatnonzero(row.loss_mask)[-1]) + 1
    longer = Row(
        np.concatenate([row.token_ids[:end], [3, 4, 5]]),
        *(np.concatenate([x[:end], np.full(3, fill, x.dtype)]) for x, fill in (
            (row.loss_mask, False), (row.turn_id, -1), (row.log_prob, 0), (row.reward, 0))),
        episode=0,
    )  # fmt: skip
    config = DPOConfig(batch_size=1, beta=0.2, sft_coef=0.5)
    short, figures = gradients(config, pairs=[RowPair([row], [other])])
    extended, same = gradients(config, pairs=[RowPair([longer], [other])])
    assert same == pytest.approx(figures, rel=1e-5, abs=1e-5)  # differences of sums of some log-probs
    for name, gradient in short.items():
        torch.testing.assert_close(extended[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_without_a_step_the_margin_is_zero_and_without_a_reference_it_is_not():
    _, figures = gradients(DPOConfig(batch_size=7), drift=False)
    assert figures["loss"] == pytest.approx(math.log(2)) and figures["margin"] == pytest.approx(0, abs=1e-5)
    _, figures = gradients(DPOConfig(batch_size=7, reference_free=True), drift=False)
    assert abs(figures["margin"]) > 0.1


def test_sides_are_summed_over_their_rows():
    packed = PackedPairs(PAIRS, "dpo")
    batch, packs = packed.select(np.array([3, 2]), max_pairs=1)
    assert batch.episode.tolist() == [6, 7, 7, 4, 4, 5, 5] and sorted(map(list, packs)) == [[0, 1, 2], [3, 4, 5, 6]]
    counts = by_side(batch, torch.ones(batch.tokens))
    lengths = [len(row) for row in ROWS]
    # Pairs come in the order of their numbers.
    assert counts.tolist() == [[sum(lengths[4:6]), sum(lengths[6:8])], [lengths[8], sum(lengths[9:11])]]


def train(config, pairs=PAIRS, **options):
    policy = Policy(tiny_model())
    backend = make_backend(policy, BackendConfig(), config.optimizer())
    stats = []
    result = train_dpo(backend, pairs, config, on_step=lambda _, figures: stats.append(figures), **options)
    return policy, result, stats


def test_training_separates_the_sides():
    config = DPOConfig(batch_size=7, epochs=12, learning_rate=2e-3, beta=0.5, patience=None)
    _, result, stats = train(config)
    assert (result.steps, result.items, result.stopped) == (12, 7, "epochs")
    assert stats[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert stats[-1]["dpo/accuracy"] == 1.0 and stats[-1]["dpo/margin"] > 1.0
    assert stats[-1]["dpo/chosen_reward"] > stats[-1]["dpo/rejected_reward"]
    assert stats[-1]["dpo/chosen_log_prob"] < 0


def test_resume_goes_on_exactly():
    config = DPOConfig(batch_size=3, epochs=3, learning_rate=2e-3, beta=0.5, patience=None)
    _, _, whole = train(config, seed=5)
    policy = Policy(tiny_model())
    backend = make_backend(policy, BackendConfig(), config.optimizer())
    objective = DPOObjective(policy, PAIRS, config, 1)
    kept = {}

    class Stop(Exception):
        pass

    def stop(state, _):
        if state.step == 3:
            tensors = {n: t.clone() for n, t in backend.tensors().items()}
            kept.update(scalars=copy.deepcopy(state.scalars()), tensors=tensors)
            raise Stop

    with pytest.raises(Stop):
        train_offline(backend, objective, config, on_step=stop, seed=5)
    # A new process has the checkpoint's weights before it has read the pairs: the reference must be a cached one.
    policy = Policy(tiny_model(seed=8))
    backend = make_backend(policy, BackendConfig(), config.optimizer())
    backend.load(kept["tensors"])
    again, rest = DPOObjective(policy, PAIRS, config, 1, reference=objective.reference), []
    state = OfflineState.of(kept["scalars"], None)
    train_offline(backend, again, config, on_step=lambda _, figures: rest.append(figures), seed=5, state=state)
    assert [s["dpo/loss"] for s in rest] == [s["dpo/loss"] for s in whole[3:]]
    with pytest.raises(ValueError, match="expected the pairs that the checkpoint's run began with"):
        DPOObjective(policy, PAIRS[::-1], config, 1, reference=objective.reference)


def test_the_reference_is_the_policy_in_packs_of_any_size():
    policy = Policy(tiny_model())
    packed = PackedPairs(PAIRS, "dpo").packed
    whole = reference_log_prob(policy, packed)
    torch.testing.assert_close(reference_log_prob(policy, packed, max_rows=2), whole, rtol=1e-5, atol=1e-5)
    assert not whole.requires_grad and bool((whole[~packed.loss_mask] == 0).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge"}, "dpo.loss: expected one of sigmoid, ipo, length_normalised, got 'hinge'"),
        ({"beta": 0.0}, "dpo.beta: expected a number above 0"),
        ({"label_smoothing": 0.5}, r"dpo.label_smoothing: expected a number in \[0, 0.5\)"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "expected 0 with dpo.loss ipo"),
        ({"sft_coef": -1.0}, "dpo.sft_coef"),
        ({"max_length": 1}, "dpo.max_length"),
        ({"epochs": 0}, "dpo.epochs: expected an integer >= 1"),
    ],
)
def test_config_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        DPOConfig(**options)


def test_refusals():
    with pytest.raises(ValueError, match="dpo: expected at least one preference pair, got none"):
        train(DPOConfig(), pairs=[])
    masked = copy.deepcopy(ROWS[0])
    masked.loss_mask[:] = False
    with pytest.raises(ValueError, match=r"pairs\[0\].rejected: expected a trainable token, got none"):
        train(DPOConfig(), pairs=[RowPair([ROWS[0]], [masked])])
    with pytest.raises(ValueError, match=r"dpo.batch_size: expected at most the 7 pairs there are, got 8"):
        train(DPOConfig(batch_size=8))
    with pytest.raises(ValueError, match=r"dpo.batch_size: expected a multiple"):
        train(DPOConfig(batch_size=7), gradient_accumulation_steps=2)


def conversation(*turns, offset=0):
    """A row of turns (observation ids, reply ids); turn ids begin at `offset`."""
    ids, mask, numbers = [], [], []
    for number, (seen, said) in enumerate(turns, offset):
        ids += [*seen, *said]
        mask += [False] * len(seen) + [True] * len(said)
        numbers += [-1] * len(seen) + [number] * len(said)
    zeros = np.zeros(len(ids), np.float32)
    return Row(np.asarray(ids, np.int64), np.asarray(mask), np.asarray(numbers, np.int32), zeros, zeros, episode=0)


# Alike until the second reply; then one side goes on for a turn, the other for two.
BEGIN = ([1, 2, 3], [4, 5])
LONG = [
    RowPair(
        [conversation(BEGIN, ([6], [7, 8 + n, 9]), ([10], [11, 12]))],
        [conversation(BEGIN, ([6], [7, 20 + n]), ([13], [14]), ([15], [16, 17, 18]))],
    )
    for n in range(4)
]
# What the two say to the same conversation, alone.
REPLIES = [
    RowPair([conversation(BEGIN, ([6], [7, 8 + n, 9]))], [conversation(BEGIN, ([6], [7, 20 + n]))]) for n in range(4)
]
for pair in REPLIES:
    for row in (*pair.chosen, *pair.rejected):
        row.loss_mask[:6] = False  # the common beginning is prompt
FIRST = {"batch_size": 4, "beta": 0.3, "compare": "first_difference"}


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "length_normalised"])
def test_the_first_differing_reply_alone_is_compared(loss):
    """The same loss and gradient as of pairs that are cut to that reply by hand."""
    ours, figures = gradients(DPOConfig(loss=loss, **FIRST), pairs=LONG)
    theirs, expected = gradients(DPOConfig(loss=loss, **{**FIRST, "compare": "all"}), pairs=REPLIES)
    assert figures == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_likelihood_beside_it_is_that_of_the_whole_chosen_side():
    """The coefficient's part of the gradient is SFT's on the chosen rows, each with the same weight."""
    with_it, figures = gradients(DPOConfig(sft_coef=0.7, **FIRST), pairs=LONG)
    without, alone = gradients(DPOConfig(**FIRST), pairs=LONG)
    policy = Policy(tiny_model())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.02)
    rows = [pair.chosen[0] for pair in LONG]
    likelihood = torch.stack([policy.score(pack([row])).log_prob.sum() / row.loss_mask.sum() for row in rows]).mean()
    (-0.7 * likelihood).backward()
    assert figures["loss"] - alone["loss"] == pytest.approx(-0.7 * likelihood.item(), rel=1e-5)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(with_it[name] - without[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_windowed_rows_are_cut_at_the_row_that_differs():
    """A windowed context gives a row for each turn: those before the difference are the same and nothing to compare."""
    same, later = conversation(BEGIN), conversation(([13], [14]), offset=2)
    sides = [conversation(([6], [7, last]), offset=1) for last in (8, 20)]
    pair = RowPair([same, sides[0], later], [same, sides[1]])
    cut, compared = first_difference(pair, whole=True)
    assert [len(row) for row in cut.chosen] == [5, 3, 2] and [len(row) for row in cut.rejected] == [3]
    assert [row.tolist() for row in compared] == [[0] * 5, [0, 1, 1], [0, 0], [0, 1, 1]]
    cut, compared = first_difference(pair, whole=False)
    assert len(cut.chosen) == len(cut.rejected) == 1 and [row.tolist() for row in compared] == [[0, 1, 1]] * 2


def test_sides_that_were_told_different_things_are_left_out_and_counted():
    """What they said to different observations tells nothing of one decision."""
    told = RowPair([conversation(BEGIN, ([6], [7]))], [conversation(BEGIN, ([8], [9]))])
    assert first_difference(told, whole=True) is None
    policy = Policy(tiny_model())
    objective = DPOObjective(policy, [told, *LONG], DPOConfig(**FIRST), 1)
    assert objective.count == 4 and objective.dropped == 1
    with pytest.raises(ValueError, match=r"dpo: expected at least one preference pair, got none"):
        DPOObjective(policy, [told], DPOConfig(**FIRST), 1)
    with pytest.raises(ValueError, match=r"dpo.compare: expected one of all, first_difference, got 'last'"):
        DPOConfig(compare="last")

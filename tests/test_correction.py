import math

import pytest
import torch
from learning import random_rows

from manus_fast.data.packing import pack
from manus_fast.learn.correction import MODES, importance_weights, warn_of_truncated_sampling


def batch(ratios):
    """One row for each list of token ratios."""
    rows = random_rows(len(ratios))
    for row, tokens in zip(rows, ratios, strict=True):
        length = len(tokens) + 1
        for name in ("token_ids", "loss_mask", "turn_id", "log_prob", "reward"):
            setattr(row, name, getattr(row, name)[:length])
        assert len(row) == length
        row.loss_mask[:] = True
        row.loss_mask[0] = False
        row.log_prob[:] = -1.0
        row.log_prob[0] = 0.0
    packed = pack(rows)
    logs = [0.0 if t == 0 else math.log(tokens[t - 1]) - 1.0 for tokens in ratios for t in range(len(tokens) + 1)]
    packed.old_log_prob = torch.tensor(logs)
    return packed


# Row products: 2.0 · 0.25 = 0.5 and 4 · 1 = 4; geometric means sqrt(0.5) and 2.
RATIOS = [[2.0, 0.25], [4.0, 1.0]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", [1, 1, 1, 1]),
        ("token_truncate", [2, 0.25, 2, 1]),
        ("token_mask", [2, 0, 4, 1]),
        ("sequence_truncate", [0.5, 0.5, 2, 2]),
        ("sequence_mask", [0.5, 0.5, 0, 0]),
        ("geometric_mask", [0, 0, 0, 0]),
    ],
)
def test_weights_by_hand(mode, expected):
    packed = batch(RATIOS)
    weight, metrics = importance_weights(packed, mode)
    got = [1.0] * 4 if weight is None else weight[packed.trainable].tolist()
    assert got == pytest.approx(expected, rel=1e-5)
    # Ratios 2, 0.25, 4, 1: (7.25)² / (4 · 21.0625).
    assert metrics["correction/effective_share"] == pytest.approx(7.25**2 / (4 * 21.0625), rel=1e-5)
    assert metrics["correction/gap_max"] == pytest.approx(math.log(4), rel=1e-5)
    assert metrics["correction/ratio_p95"] == pytest.approx(4.0, rel=1e-5)


def test_the_geometric_mean_keeps_rows_that_agree():
    packed = batch([[1.2, 1 / 1.2], [1.1, 1.1]])
    weight, _ = importance_weights(packed, "geometric_mask")
    assert weight[packed.trainable].tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_sampled_log_prob_that_is_not_finite_gives_weight_zero(mode):
    packed = batch([[1.0, 1.0]])
    packed.rollout_log_prob[1] = math.nan
    weight, metrics = importance_weights(packed, mode)
    assert weight[packed.trainable].tolist() == [0.0, 1.0]
    assert metrics["correction/gap_mean"] == pytest.approx(0.0, abs=1e-6)


def test_agreement_needs_no_weight():
    packed = batch([[1.0, 1.0]])
    assert importance_weights(packed, "none")[0] is None
    assert importance_weights(packed, "token_truncate")[1]["correction/changed_share"] == 0.0


def test_truncated_sampling_is_warned_of(caplog):
    """A policy (0.5, 0.3, 0.2) at top_p 0.8 draws from (0.625, 0.375): every ratio is the kept mass."""
    packed = batch([[0.8, 0.8, 0.8]])
    measured = importance_weights(packed, "token_truncate")[1]["correction/ratio_mean"]
    assert measured == pytest.approx(0.8)
    assert warn_of_truncated_sampling("token_truncate", 0.8, 0, 0.0, measured)
    assert "by a mean ratio of 0.800 where 1 was expected" in caplog.text
    assert warn_of_truncated_sampling("token_truncate", 0.9, 0, 0.0)
    assert not warn_of_truncated_sampling("none", 0.9, 0, 0.0)
    assert not warn_of_truncated_sampling("token_truncate", 1.0, 0, 0.0)

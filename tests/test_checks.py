"""Wrong arguments of the ops: one sentence each, never a crash, a wrong number or an error from inside torch."""

import pytest
import torch

from manus_fast.ops import (
    PPOLossConfig,
    dispatch,
    gae,
    group_advantages,
    linear_logprob,
    logprob,
    loss_denominator,
    merge_loss_stats,
    ppo_loss,
)

N = 6
TOKENS = torch.linspace(-2, -1, N)
MASK = torch.ones(N, dtype=torch.bool)
ROWS = torch.tensor([0, 2, 6], dtype=torch.int32)
LOGITS, TARGET = torch.linspace(0, 1, 12).view(3, 4), torch.tensor([0, 3, -1])
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
OPS = {
    "logprob": (logprob, {"logits": LOGITS, "target": TARGET}),
    "linear_logprob": (linear_logprob, {"hidden": LOGITS, "weight": LOGITS, "target": TARGET.clamp(max=2)}),
    "gae": (gae, {"rewards": TOKENS, "values": TOKENS, "mask": MASK, "gamma": 0.9, "lam": 0.9, "cu_seqlens": ROWS}),
    "ppo_loss": (
        ppo_loss,
        {"log_prob": TOKENS, "old_log_prob": TOKENS, "advantages": TOKENS, "mask": MASK, "denominator": 6.0},
    ),
    "group_advantages": (group_advantages, {"rewards": TOKENS, "group": GROUP}),
}
TENSORS = [(op, name) for op, (_, given) in OPS.items() for name, x in given.items() if isinstance(x, torch.Tensor)]


def call(op, **changes):
    function, given = OPS[op]
    return function(**{**given, **changes})


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_a_tensor_is_a_tensor_and_on_the_device_of_the_others(op, name):
    call(op)  # which is right without the change
    for wrong in ([1, 2, 3], None):
        if (name, wrong) != ("cu_seqlens", None):
            with pytest.raises(ValueError, match=rf"^{name}: expected a tensor, got {type(wrong).__name__}$"):
                call(op, **{name: wrong})
    if name not in ("logits", "hidden", "log_prob", "rewards"):
        with pytest.raises(ValueError, match=rf"^{name}: .* on cpu, got .* on meta$"):
            call(op, **{name: OPS[op][1][name].to("meta")})


WRONG_ROWS = {
    "short": [0, 2, 5], "long": [0, 2, 7], "late": [1, 2, 6], "falling": [0, 4, 2, 6], "negative": [0, -1, 6],
    "empty": [], "flat": [[0, 6]],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_boundaries(wrong, dtype):
    """float64 takes the reference, which would follow wrong boundaries to wrong numbers."""
    rows, x = torch.tensor(WRONG_ROWS[wrong], dtype=torch.int32), TOKENS.to(dtype)
    config = PPOLossConfig(ratio="sequence")
    for run in (
        lambda cu: gae(x, x, MASK, 0.9, 0.9, cu_seqlens=cu),
        lambda cu: ppo_loss(x, x, x, MASK, denominator=6.0, cu_seqlens=cu, config=config),
        lambda cu: loss_denominator(MASK, cu, PPOLossConfig(aggregation="seq-mean-token-mean")),
    ):
        run(ROWS)
        for cu_seqlens in (rows, ROWS.long(), torch.stack([ROWS, ROWS], 1)[:, 0]):
            with pytest.raises(ValueError, match=r"^cu_seqlens: expected "):
                run(cu_seqlens)


def test_boundaries_beside_padded_rows_are_refused():
    """They were not looked at: a packed batch as [1, N] was one row."""
    mask, x = torch.ones(1, 6, dtype=torch.bool), torch.zeros(1, 6)
    cu_seqlens, config = torch.tensor([0, 2, 6], dtype=torch.int32), PPOLossConfig(aggregation="seq-mean-token-mean")
    message = r"^cu_seqlens: expected None with arrays \[B, T\], got boundaries with \[1, 6\]$"
    with pytest.raises(ValueError, match=message):
        ppo_loss(x, x, x, mask, denominator=2.0, cu_seqlens=cu_seqlens, config=config)
    with pytest.raises(ValueError, match=message):
        loss_denominator(mask, cu_seqlens, config)


def test_statistics_of_no_part_are_those_of_an_empty_batch():
    nothing = call(
        "ppo_loss", **{name: TOKENS[:0] for name in ("log_prob", "old_log_prob", "advantages")}, mask=MASK[:0]
    )
    assert torch.equal(merge_loss_stats(nothing[1][None][:0]), nothing[1])


@pytest.mark.parametrize("name", ["mean", "rstd", "denominator"])
def test_scalars_of_the_loss(name):
    assert torch.equal(call("ppo_loss", **{name: torch.tensor(2.0)})[0], call("ppo_loss", **{name: 2.0})[0])
    for wrong, got in ((torch.ones(2), r"\[2\]"), (torch.ones(0), r"\[0\]"), ("1", "str"), (None, "NoneType")):
        with pytest.raises(ValueError, match=rf"^{name}: expected a number or a scalar tensor, got {got}$"):
            call("ppo_loss", **{name: wrong})


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_denominator_is_a_count(wrong):
    """Such a one gave a loss of 0."""
    for given in (wrong, torch.tensor(wrong)):
        with pytest.raises(ValueError, match=r"^denominator: expected a finite count >= 0, got "):
            call("ppo_loss", denominator=given)


@pytest.mark.parametrize("op", ["logprob", "linear_logprob"])
def test_temperature(op):
    inf, nan = float("inf"), float("nan")
    for wrong in (0, -1, inf, nan, None, "1"):
        with pytest.raises(ValueError, match=rf"^temperature: expected a finite number above 0, got {wrong}$"):
            call(op, temperature=wrong)
    for wrong in (0.0, -1.0, inf, nan):
        with pytest.raises(ValueError, match=rf"^temperature: expected finite values above 0, got {wrong}$"):
            call(op, temperature=torch.tensor([1.0, wrong, 2.0]))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_nan_logits_give_nan_and_never_an_entropy_of_zero(backend):
    logits = LOGITS.clone()
    logits[1, 2] = float("nan")
    with dispatch.forced(backend):
        log_prob, entropy = logprob(logits, TARGET)
    assert log_prob.isnan().tolist() == [False, True, False] == entropy.isnan().tolist()


def test_gradient_in_place_needs_rows_of_their_own():
    expanded = torch.zeros(1, 4).expand(3, 4)
    logprob(expanded, TARGET)
    logprob(torch.zeros(1, 4), TARGET[:1], inplace_backward=True)
    with pytest.raises(ValueError, match=r"^logits: expected rows that do not overlap for inplace_backward, got"):
        logprob(expanded, TARGET, inplace_backward=True)


def test_other_arguments():
    for op, wrong, message in (
        ("linear_logprob", {"softcap": "x"}, "softcap: expected None or a finite number above 0, got x"),
        ("linear_logprob", {"keep_bytes": 1.5}, "keep_bytes: expected None or a count of bytes >= 0, got 1.5"),
        ("gae", {"gamma": None}, "gamma: expected a number from 0 to 1, got None"),
        ("ppo_loss", {"config": {}}, "config: expected a PPOLossConfig, got dict"),
        ("group_advantages", {"eps": float("nan")}, "eps: expected a finite number >= 0, got nan"),
    ):
        with pytest.raises(ValueError, match=rf"^{message}$"):
            call(op, **wrong)
    with pytest.raises(ValueError, match=r"^log_prob: expected shape \[N\] or \[B, T\], got \[\]$"):
        ppo_loss(*[TOKENS[0]] * 3, MASK[0], denominator=1.0)
    with pytest.raises(ValueError, match=r"^mask: expected bool \[N\] or \[B, T\], got torch.float32 \[6\]$"):
        loss_denominator(MASK.float(), None, PPOLossConfig())
    with pytest.raises(ValueError, match=r"^config: expected a PPOLossConfig, got dict$"):
        loss_denominator(MASK, None, {})
    with pytest.raises(ValueError, match=r"^vf_coef: expected a finite number, got nan$"):
        PPOLossConfig(vf_coef=float("nan"))
    with pytest.raises(ValueError, match=r"^stats: expected float64"):
        merge_loss_stats(torch.zeros(3))
    with dispatch.forced("cpu"), pytest.raises(ValueError, match=r"^rewards: expected float32 on backend 'cpu'"):
        call("group_advantages", rewards=TOKENS.double())


@pytest.mark.parametrize("op", OPS)
def test_the_default_device_is_none_of_an_ops_business(op):
    """Results and scratch lie where the arguments do; scratch elsewhere would be read at addresses that are not."""
    want = call(op)
    with torch.device("meta"):
        got = call(op)
    for a, b in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_an_ignored_row_of_hidden_holds_reaches_no_gradient(backend):
    hidden = LOGITS.clone()
    hidden[2] = float("nan")
    hidden.requires_grad_()
    weight = LOGITS.clone().requires_grad_()
    with dispatch.forced(backend):
        log_prob, entropy = linear_logprob(hidden, weight, torch.tensor([0, 1, -1]))
        (log_prob + entropy).sum().backward()
    assert not weight.grad.isnan().any() and hidden.grad[2].count_nonzero() == 0

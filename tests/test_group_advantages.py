"""Group-relative advantages: hand-worked values, properties, and each backend against the specification."""

import math

import pytest
import torch

from manus_fast.ops import discounted_returns, dispatch, gigpo_advantages, group_advantages, step_groups


def _params():
    here = "cuda" if torch.cuda.is_available() else "cpu"
    for backend in ("reference", "cpu", "triton", "cuda"):
        device = here if backend in ("triton", "cuda") else "cpu"
        marks = [pytest.mark.gpu] if backend == "cuda" or (backend == "triton" and here == "cuda") else []
        yield pytest.param((backend, device), id=backend, marks=marks)


@pytest.fixture(params=_params())
def on(request):
    """(backend, device); skips where the machine cannot run the backend, and says why."""
    backend, device = request.param
    if device == "cpu" and backend == "cuda":
        pytest.skip("no CUDA device")
    for op in ("group_advantages", "gae"):
        reason = dispatch.missing(op, backend, device)
        if reason:
            pytest.skip(reason)
    with dispatch.forced(backend):
        yield request.param


def run(on, rewards, group, **options):
    rewards = torch.as_tensor(rewards, dtype=torch.float32).to(on[1])
    options = {k: v.to(on[1]) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return group_advantages(rewards, torch.as_tensor(group).to(on[1]), **options).cpu()


def test_each_kind_by_hand(on):
    # Group 7: 0, 1, 2, mean 1, std 1. Group -3: 4 and 8, mean 6, std 2 sqrt 2. The members are interleaved.
    rewards, group = [0.0, 4.0, 1.0, 8.0, 2.0], [7, -3, 7, -3, 7]
    assert run(on, rewards, group, eps=0.0).tolist() == pytest.approx([-1, -(0.5**0.5), 0, 0.5**0.5, 1])
    assert run(on, rewards, group, kind="dr_grpo").tolist() == [-1, -2, 0, 2, 1]
    # RLOO: the reward less the mean of the others.
    assert run(on, rewards, group, kind="rloo").tolist() == pytest.approx([-1.5, -4, 0, 4, 1.5])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_give_exactly_zero(on, kind):
    assert run(on, [0.1] * 7 + [0.3] * 5, [1] * 7 + [2] * 5, kind=kind).tolist() == [0.0] * 12


def test_a_group_of_one_gives_zero_or_its_reward(on):
    assert run(on, [3.0, 1.0, 2.0], [0, 1, 1])[0] == 0
    assert run(on, [3.0, 1.0, 2.0], [0, 1, 1], singleton="raw")[0] == 3


def test_failed_members_enter_no_statistics(on):
    with_failures = run(on, [1.0, math.nan, 3.0, math.nan, 5.0], [0, 0, 0, 1, 1])
    assert with_failures[[0, 2]].tolist() == run(on, [1.0, 3.0], [0, 0]).tolist()
    assert with_failures[[1, 3, 4]].tolist() == [0, 0, 0]  # the failed, and the one left alone


def test_a_trajectory_counts_once_however_many_rows_it_has(on):
    rewards, group = torch.tensor([1.0, 1.0, 1.0, 3.0]), torch.zeros(4, dtype=torch.int64)
    trajectory = torch.tensor([5, 5, 5, 9])
    once = run(on, rewards, group, kind="dr_grpo", trajectory=trajectory)
    assert once.tolist() == [-1, -1, -1, 1]
    each = run(on, rewards, group, kind="dr_grpo", trajectory=trajectory, unit="step")
    assert each.tolist() == [-0.5, -0.5, -0.5, 1.5]


def test_the_order_of_entries_does_not_matter(on):
    g = torch.Generator().manual_seed(0)
    rewards, group = torch.randn(60, generator=g), torch.randint(0, 7, (60,), generator=g)
    shuffle = torch.randperm(60, generator=g)
    torch.testing.assert_close(run(on, rewards, group)[shuffle], run(on, rewards[shuffle], group[shuffle]))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("entries", [0, 1, 7, 129, 1025])
def test_against_float64(on, entries, kind):
    if on == ("triton", "cpu") and entries > 200:
        pytest.skip("slow in Triton's interpreter")
    g = torch.Generator().manual_seed(entries)
    rewards = torch.randn(entries, generator=g) * 3 + 100
    rewards[torch.rand(entries, generator=g) < 0.1] = math.nan
    group = torch.randint(0, max(1, entries // 8), (entries,), generator=g) * 1_000_000_007
    trajectory = torch.randint(0, max(1, entries // 2), (entries,), generator=g)
    got = run(on, rewards, group, kind=kind, trajectory=trajectory)
    want = group_advantages_f64(rewards, group, kind=kind, trajectory=trajectory)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


def group_advantages_f64(rewards, group, **options):
    with dispatch.forced("reference"):
        return group_advantages(rewards.double(), group, **options)


def test_one_large_group(on):
    if on == ("triton", "cpu"):
        pytest.skip("slow in Triton's interpreter")
    rewards = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    advantages = run(on, rewards, torch.zeros(5000, dtype=torch.int64))
    assert abs(advantages.mean().item()) < 1e-5 and advantages.std().item() == pytest.approx(1, abs=1e-4)


def test_step_groups_are_equal_pairs():
    group = torch.tensor([0, 0, 1, 1, 0, 1])
    anchor = torch.tensor([5, 6, 5, 5, 5, -2])
    ids = step_groups(group, anchor).tolist()
    pairs = list(zip(group.tolist(), anchor.tolist(), strict=True))
    assert [[a == b for b in ids] for a in ids] == [[p == q for q in pairs] for p in pairs]


def test_gigpo_by_hand(on):
    # Two episodes of one task, rewards 1 and 0: dr_grpo across them gives ±.5. Steps 0 and 2 share an anchor.
    device = on[1]
    args = [
        torch.tensor([1.0, 0.0]), torch.tensor([0.9, 1.0, 0.1, 0.0]), torch.tensor([4, 4]),
        torch.tensor([0, 0, 1, 1]), torch.tensor([11, 12, 11, 13]),
    ]  # fmt: skip
    got = gigpo_advantages(*[a.to(device) for a in args], step_weight=2.0, kind="dr_grpo").cpu()
    assert got.tolist() == pytest.approx([0.5 + 2 * 0.4, 0.5, -0.5 - 2 * 0.4, -0.5])


def test_gigpo_of_an_episode_alone_in_its_group(on):
    # Its two steps share an anchor: returns 0.9 and 0.1 give ±0.4, whatever the level of the episode says.
    args = [
        torch.tensor([7.0]), torch.tensor([0.9, 0.1]), torch.tensor([4]), torch.tensor([0, 0]), torch.tensor([11, 11]),
    ]  # fmt: skip
    got = [
        gigpo_advantages(*[a.to(on[1]) for a in args], kind="dr_grpo", singleton=singleton).cpu().tolist()
        for singleton in ("zero", "raw")
    ]
    assert got == [pytest.approx([0.4, -0.4]), pytest.approx([7.4, 6.6])]


def test_gigpo_leaves_a_failed_episode_out(on):
    args = [
        torch.tensor([1.0, 0.0, math.nan]), torch.tensor([0.9, 0.1, 7.0]), torch.tensor([4, 4, 4]),
        torch.tensor([0, 1, 2]), torch.tensor([11, 11, 11]),
    ]  # fmt: skip
    got = gigpo_advantages(*[a.to(on[1]) for a in args], kind="dr_grpo").cpu()
    assert got.tolist() == pytest.approx([0.5 + 0.4, -0.5 - 0.4, 0.0])


def test_discounted_returns_by_hand(on):
    rewards, cu_seqlens = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0]), torch.tensor([0, 3, 5], dtype=torch.int32)
    got = discounted_returns(rewards.to(on[1]), cu_seqlens.to(on[1]), 0.5).cpu()
    assert got.tolist() == pytest.approx([0.25, 0.5, 1.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": torch.zeros(2, 2)}, r"rewards: expected float32 \[E\]"),
        ({"group": torch.zeros(3)}, r"group: expected int64 \[3\]"),
        ({"kind": "mean"}, "kind: expected one of grpo, dr_grpo, rloo, got 'mean'"),
        ({"unit": "row"}, "unit: expected one of trajectory, step, got 'row'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    good = {"rewards": torch.zeros(3), "group": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        group_advantages(**{**good, **arguments})


def test_one_node_of_a_whole_graph():
    torch._dynamo.reset()
    rewards, group = torch.tensor([1.0, 2.0, 4.0, torch.nan, 3.0]), torch.tensor([0, 0, 1, 1, 1])
    episode, anchor = torch.tensor([0, 0, 1, 2, 4]), torch.tensor([7, 8, 7, 7, 7])

    def step(rewards):
        return gigpo_advantages(rewards * 2, rewards, group, episode, anchor) + 1

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")(rewards)
    assert torch.equal(whole, step(rewards))


def test_equal_rewards_give_exactly_zero_without_eps(on):
    assert run(on, [0.1] * 7 + [0.5, 0.5], [1] * 7 + [2] * 2, eps=0.0).tolist() == [0.0] * 9


STEPS = {
    "episode_rewards": torch.tensor([1.0, 0.0]), "step_returns": torch.tensor([0.9, 1.0, 0.1]),
    "group": torch.tensor([4, 4]), "episode": torch.tensor([0, 0, 1]), "anchor": torch.tensor([11, 12, 11]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        # Of these three a wrong number came: the last episode, one return for every step, a group of another batch.
        ({"episode": torch.tensor([0, 0, -1])}, "episode: expected indices from 0 to 1, got some from -1 to 0"),
        ({"step_returns": torch.tensor([1.0])}, r"episode: expected int64 \[1\], got torch.int64 \[3\]"),
        ({"group": torch.tensor([4, 4, 4])}, r"group: expected int64 \[2\], got torch.int64 \[3\]"),
        ({"episode": torch.tensor([0, 0, 2])}, "episode: expected indices from 0 to 1, got some from 0 to 2"),
        ({"episode": torch.tensor([0.0, 0.0, 1.0])}, r"episode: expected int64 \[3\], got torch.float32 \[3\]"),
        ({"anchor": torch.tensor([11])}, r"anchor: expected int64 \[3\], got torch.int64 \[1\]"),
        ({"anchor": [11, 12, 11]}, "anchor: expected a tensor, got list"),
        ({"step_returns": torch.zeros(3).double()}, "step_returns: expected float32 .S., as episode_rewards, got .*"),
        ({"step_weight": math.nan}, "step_weight: expected a finite number, got nan"),
    ],
)
def test_wrong_steps_are_named(wrong, message):
    gigpo_advantages(**STEPS)
    with pytest.raises(ValueError, match=rf"^{message}$"):
        gigpo_advantages(**{**STEPS, **wrong})


def test_wrong_arguments_of_the_parts_of_gigpo_are_named():
    with pytest.raises(ValueError, match=r"^anchor: expected int64 \[3\], got torch.int64 \[1\]$"):
        step_groups(torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^group: expected int64 \[S\], got torch.int64 \[1, 3\]$"):
        step_groups(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected a tensor, got NoneType$"):
        discounted_returns(torch.zeros(3), None, 0.9)
    with pytest.raises(ValueError, match=r"^rewards: expected a tensor, got list$"):
        discounted_returns([1.0], torch.tensor([0, 1], dtype=torch.int32), 0.9)

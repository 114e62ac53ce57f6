"""A critic that runs beside the policy: the same scores and gradients, threads given back, errors that come through."""

import pytest
import torch
from learning import random_rows, tiny_model

from manus_fast.data.packing import pack
from manus_fast.learn import beside
from manus_fast.learn.backend import SingleProcessBackend
from manus_fast.learn.policy import Policy


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)  # two for each
    yield
    torch.set_num_threads(before)


def scores_and_gradients(side_by_side, accumulate=2):
    policy = Policy(tiny_model(), critic="separate")
    torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(3))
    SingleProcessBackend(policy)
    assert policy.side_by_side
    policy.side_by_side = side_by_side
    packed = pack(random_rows(9, seed=1))
    for _ in range(accumulate):
        output = policy.score(packed, entropy=True, value=True, temperature=0.8)
        total = output.log_prob.sum() + output.entropy.square().sum()
        (total + output.value.square().sum() + 0.3 * output.last_value.sum()).backward()
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    return output, gradients, policy.score_all(packed, value=True)


def test_scores_and_gradients_are_those_of_one_after_the_other(four_threads):
    (together, gradients, scored), (plain, expected, one) = scores_and_gradients(True), scores_and_gradients(False)
    for name in ("log_prob", "entropy", "value", "last_value"):
        torch.testing.assert_close(getattr(together, name), getattr(plain, name))
    torch.testing.assert_close((scored.log_prob, scored.value), (one.log_prob, one.value))
    assert gradients.keys() == expected.keys() and all(g is not None for g in gradients.values())
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_repeating_it_repeats_every_digit(four_threads):
    (_, first, _), (_, second, _) = scores_and_gradients(True), scores_and_gradients(True)
    assert all(torch.equal(g, second[name]) for name, g in first.items())


def test_threads_are_shared_and_given_back(four_threads):
    seen, weight = [], torch.ones(2, requires_grad=True)

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.get_num_threads())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.get_num_threads())
            return grad

    other = torch.ones(2, requires_grad=True)
    first, (second,) = beside.both(lambda: Watch.apply(weight).sum(), lambda: (Watch.apply(other).sum(),))
    assert torch.get_num_threads() == 4
    (first * second).backward()
    assert seen == [2, 2, 2, 2] and torch.get_num_threads() == 4
    torch.testing.assert_close((weight.grad, other.grad), (torch.full((2,), 2.0), torch.full((2,), 2.0)))


def test_without_gradients_there_is_no_graph(four_threads):
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        first, (second,) = beside.both(lambda: weight * 2, lambda: (weight * 3,))
    assert not first.requires_grad and not second.requires_grad


@pytest.mark.parametrize("which", [0, 1])
def test_errors_of_either_are_raised_and_leave_the_threads(four_threads, which):
    def broken():
        raise RuntimeError("no memory")

    works = [lambda: (torch.zeros(1),), lambda: (torch.zeros(1),)]
    works[which] = broken
    with pytest.raises(RuntimeError, match="no memory"):
        beside.both(*works)
    assert torch.get_num_threads() == 4
    assert beside.both(lambda: 1, lambda: (torch.ones(1),))[0] == 1


def test_an_error_of_the_other_thread_in_backward_is_raised(four_threads):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no memory")

    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    first, (second,) = beside.both(lambda: x * 2, lambda: (Broken.apply(y),))
    with pytest.raises(RuntimeError, match="no memory"):
        (first + second).backward()
    assert torch.get_num_threads() == 4


def test_one_thread_is_not_shared():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert not beside.possible(torch.device("cpu"))
    finally:
        torch.set_num_threads(before)

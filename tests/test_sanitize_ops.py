"""What `make sanitize-triton` runs on a GPU, here on the CPU backend: legal inputs, right expectations."""

import pytest
import sanitize_ops

from manus_fast.ops import dispatch


@pytest.mark.parametrize("op", sanitize_ops.CHECKS)
def test_the_driver_on_the_cpu_backend(op):
    if dispatch.missing(op, "cpu", "cpu"):
        pytest.skip("manus_fast._C is not built")
    sanitize_ops.CHECKS[op]("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_driver_on_the_gpu(backend, capsys):
    sanitize_ops.main([backend])
    ran = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "every kernel ran" in line]
    assert ran == [op for op in sanitize_ops.CHECKS if backend in dispatch.TABLE[op]]


def test_a_wrong_result_is_reported(monkeypatch):
    monkeypatch.setattr(sanitize_ops, "gae", lambda **given: tuple(x + 1 for x in _gae(**given)))
    with pytest.raises(AssertionError, match=r"gae .* off by"):
        sanitize_ops.check_gae("cpu")


def _gae(**given):
    from manus_fast.ops import gae

    result = gae(**given)
    return result if dispatch.requested() != "reference" else tuple(x - 1 for x in result)

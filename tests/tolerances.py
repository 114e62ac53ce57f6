"""Tolerances and compilers shared by the op tests, and the measure of error that they use."""

import pytest
import torch

# Backends of torch.compile; inductor where it need not compile C++ for seconds a test.
COMPILERS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]

# dtype of the inputs → (rtol, atol) against a float64 reference fed the same rounded inputs, results in float32.
TOLERANCES = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (2e-2, 1e-2),
}

# dtype → bound on ‖out - ref‖ / ‖ref‖ for gradients returned in that dtype, where logits may have been rounded to it.
GRADIENT_ERROR = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 1e-2,
}


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out - reference‖ / ‖reference‖ in float64; NaN when either is; the numerator alone for a zero reference."""
    out, reference = out.double(), reference.double()
    norm = reference.norm()
    return float((out - reference).norm() / (norm if norm > 0 else 1.0))


def assert_close(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    """`torch.testing.assert_close` in float64 at the tolerance of `dtype`."""
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), reference.double(), rtol=rtol, atol=atol, equal_nan=False)

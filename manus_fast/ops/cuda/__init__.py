"""Implementations on the kernels of csrc/ops/*.cu, each where it beats Triton (margins in docs/kernels.md)."""

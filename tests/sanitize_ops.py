"""Runs every GPU kernel of the ops once on small odd shapes, to be watched by NVIDIA's compute-sanitizer.

    PYTHONPATH=. compute-sanitizer --tool memcheck python tests/sanitize_ops.py [cuda|triton]

`make sanitize-triton` runs it under each of the four tools; for the CUDA kernels `make sanitize` has a driver without
torch, csrc/tests/gpu/check_kernels.cpp, which takes seconds instead of minutes. Shapes are the smallest that reach
every branch: more than one tile and more than one block, ends inside a tile, rows that begin inside one, lengths that
do not allow 16-byte loads. Each result is compared with the specification in float64, so that a run under the tool
also says that the kernels worked. PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor an allocation of its own, which
is what memcheck can watch.
"""

import sys

import torch

from manus_fast.ops import PPOLossConfig, dispatch, gae, group_advantages, linear_logprob, logprob, ppo_loss


def _close(name, got, want, tolerance):
    """Raises AssertionError unless `got` is within `tolerance` of `want`, relative to its norm."""
    want = want.detach().double()
    error = float((got.detach().cpu().double() - want).norm() / want.norm().clamp(min=1e-30))
    if not error <= tolerance:
        raise AssertionError(f"{name}: off by {error:.2e}, more than {tolerance:.0e}")


def _both(backend, function, inputs, options, leaves=()):
    """Outputs and gradients of `function` on `backend` in the given precision, and of the reference in float64."""
    results = []
    for name_of_backend in (backend, "reference"):

        def move(x, name_of_backend=name_of_backend):
            if not isinstance(x, torch.Tensor):
                return x
            if name_of_backend == "reference":
                return x.double() if x.is_floating_point() else x
            return x.to("cpu" if name_of_backend == "cpu" else "cuda")

        given = {name: move(x) for name, x in inputs.items()}
        for name in leaves:
            given[name] = given[name].detach().requires_grad_()
        with dispatch.forced(name_of_backend):
            out = function(**given, **{name: move(x) for name, x in options.items()})
        out = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
        if leaves:
            # An upstream gradient other than 1, so that what scales by it has something to do.
            torch.autograd.backward([(x * 0.5).sum() for x in out if x.requires_grad])
        results.append([*out, *(given[name].grad for name in leaves)])
    return results


def check_gae(backend):
    """Token and turn level, padded and packed, over several tiles; and one tile at addresses that are not aligned."""
    g = torch.Generator().manual_seed(0)
    for tokens, rows in (((3, 4099), None), ((5, 7), None), ((9001,), [0, 1, 1, 4096, 4100, 8999, 9001])):
        mask = torch.rand(tokens, generator=g) < 0.7
        rewards = torch.where(mask, torch.randn(tokens, generator=g), 0.0)
        inputs = {"rewards": rewards, "values": torch.randn(tokens, generator=g), "mask": mask}
        options = {"bootstrap": torch.randn(tokens[0] if rows is None else len(rows) - 1, generator=g)}
        if rows is not None:
            options["cu_seqlens"] = torch.tensor(rows, dtype=torch.int32)
        for turns in (False, True):
            if turns:
                options["turn_id"] = (torch.rand(tokens, generator=g) < 0.1).cumsum(-1).int()

            def call(**given):
                return gae(gamma=0.97, lam=0.9, **given)

            for got, want in zip(*_both(backend, call, inputs, options), strict=True):
                _close(f"gae {tokens} turns={turns}", got, want, 1e-5)


def check_ppo_loss(backend):
    """The usual configuration, one without its terms, a ratio by row; sizes that end inside a step, and one token."""
    g = torch.Generator().manual_seed(1)
    usual = PPOLossConfig(kl_coef=0.1, ent_coef=0.01)
    by_row = PPOLossConfig(kl="k3+", ratio="sequence", aggregation="seq-mean-token-mean", kl_coef=0.1, ent_coef=0.01)
    for shape, config in (((2, 1603), usual), ((1, 1), usual), ((3, 129), by_row), ((1, 1027), None)):
        log_prob, values = -torch.rand(shape, generator=g), torch.randn(shape, generator=g)
        inputs = {
            "log_prob": log_prob, "old_log_prob": log_prob + 0.1 * torch.randn(shape, generator=g),
            "advantages": torch.randn(shape, generator=g), "mask": torch.ones(shape, dtype=torch.bool),
        }  # fmt: skip
        inputs["mask"][0, 1:5] = False
        leaves = ["log_prob"]
        if config is not None:
            inputs.update(
                values=values, old_values=values + 0.2, returns=values + 0.5, entropy=torch.rand(shape, generator=g),
                weights=torch.rand(shape, generator=g), ref_log_prob=log_prob - 0.05,
            )  # fmt: skip
            leaves += ["values", "entropy"]
        options = {"mean": torch.tensor(0.1), "rstd": 0.9, "denominator": torch.tensor(float(inputs["mask"].sum()))}
        options["config"] = config or PPOLossConfig(clip="cispo")
        for got, want in zip(*_both(backend, ppo_loss, inputs, options, leaves), strict=True):
            _close(f"ppo_loss {shape}", got, want, 1e-4)


def check_linear_logprob(backend):
    """Three token tiles, four of the vocabulary, eight steps of H; recomputed and kept; an ignored token."""
    g = torch.Generator().manual_seed(2)
    rows, width, words = 261, 456, 787
    inputs = {
        "hidden": torch.randn(rows, width, generator=g).bfloat16(),
        "weight": (torch.randn(words, width, generator=g) / width**0.5).bfloat16(),
        "target": torch.randint(0, words, (rows,), generator=g),
    }
    inputs["target"][5] = -1
    for mode, temperature in (("recompute", 0.8), ("keep", torch.rand(rows, generator=g) + 0.5)):
        options = {"temperature": temperature, "mode": mode}
        got, want = _both(backend, linear_logprob, inputs, options, ["hidden", "weight"])
        for name, a, b in zip(("log_prob", "entropy", "dX", "dW"), got, want, strict=True):
            _close(f"linear_logprob {mode} {name}", a, b, 1e-2)


def check_logprob(backend):
    """A row of several steps and a rest, a short one, an ignored one."""
    g = torch.Generator().manual_seed(3)
    for rows, words in ((3, 9001), (5, 7)):
        inputs = {
            "logits": torch.randn(rows, words, generator=g).bfloat16(),
            "target": torch.randint(0, words, (rows,), generator=g),
        }
        inputs["target"][1] = -1
        for temperature in (0.7, torch.rand(rows, generator=g) + 0.5):
            got, want = _both(backend, logprob, inputs, {"temperature": temperature}, ["logits"])
            for a, b in zip(got, want, strict=True):
                _close(f"logprob {rows}x{words}", a, b, 1e-2)


def check_group_advantages(backend):
    """Groups of one, of many, and one longer than a block; a failed entry."""
    g = torch.Generator().manual_seed(4)
    group = torch.tensor([3] * 300 + [1] + [7] * 5 + [-2] * 3)[torch.randperm(309, generator=g)]
    rewards = torch.randn(309, generator=g)
    rewards[7] = torch.nan
    for kind in ("grpo", "rloo"):
        inputs = {"rewards": rewards, "group": group}
        for got, want in zip(*_both(backend, group_advantages, inputs, {"kind": kind}), strict=True):
            _close(f"group_advantages {kind}", got, want, 1e-5)


CHECKS = {
    "gae": check_gae,
    "ppo_loss": check_ppo_loss,
    "linear_logprob": check_linear_logprob,
    "logprob": check_logprob,
    "group_advantages": check_group_advantages,
}


def main(backends: list[str]) -> None:
    """Runs the checks of every op on each of `backends`; the tool's reports stand between the lines printed."""
    for backend in backends or ("cuda", "triton"):
        for op, check in CHECKS.items():
            if backend not in dispatch.TABLE[op]:
                continue
            reason = dispatch.missing(op, backend, "cpu" if backend == "cpu" else "cuda")
            if reason is not None:
                raise SystemExit(f"{op}: backend '{backend}' cannot run: {reason}")
            check(backend)
            if backend != "cpu":
                torch.cuda.synchronize()
            print(f"-- {op} {backend}: every kernel ran, results right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

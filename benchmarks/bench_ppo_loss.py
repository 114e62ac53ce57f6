"""`ppo_loss`, loss, gradient and statistics, against PyTorch eager and torch.compile, each also under a CUDA graph.

    python -m benchmarks.bench_ppo_loss --json benchmarks/results/h200.json

Policy clip, dual clip, value clip, entropy, KL (k3), correction weights. Bytes: 49 a token (nine float32 arrays and the
mask read, three gradients written). Error: the worst relative error of the loss and the gradients against float64.
"""

import torch

from benchmarks import harness
from manus_fast.ops import PPOLossConfig, dispatch, ppo_loss, reference

CONFIG = PPOLossConfig(kl_coef=0.01, ent_coef=0.001)
BYTES = 9 * 4 + 1 + 3 * 4
LEAVES = ("log_prob", "values", "entropy")


def make(n, device, seed=0):
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(scale=1.0):
        return torch.randn(n, generator=g, device=device) * scale

    log_prob, values = -normal().abs(), normal()
    arrays = {
        "log_prob": log_prob, "old_log_prob": log_prob + normal(0.1), "advantages": normal(), "weights": normal().abs(),
        "mask": torch.rand(n, generator=g, device=device) < 0.7, "values": values, "old_values": values + normal(0.3),
        "returns": values + normal(), "ref_log_prob": log_prob + normal(0.1), "entropy": normal().abs(),
    }  # fmt: skip
    scalars = {
        "mean": torch.tensor(0.1, device=device, dtype=torch.float64),
        "rstd": torch.tensor(0.9, device=device, dtype=torch.float64),
        "denominator": arrays["mask"].sum(dtype=torch.float64),
    }
    return {**arrays, **{name: arrays[name].requires_grad_() for name in LEAVES}}, scalars


def eager(arrays, scalars):
    """What trainers write: one tensor expression a term, and the usual statistics."""
    m, share = arrays["mask"], arrays["mask"] / scalars["denominator"].float()
    advantage = (arrays["advantages"] - scalars["mean"].float()) * scalars["rstd"].float()
    log_ratio = (arrays["log_prob"] - arrays["old_log_prob"]).clamp(-20, 20)
    ratio = log_ratio.exp()
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)
    policy = torch.maximum(plain, clipped)
    policy = torch.where(advantage < 0, torch.minimum(policy, -advantage * 3), policy) * arrays["weights"]
    values, old_values, returns = arrays["values"], arrays["old_values"], arrays["returns"]
    near = torch.minimum(torch.maximum(values, old_values - 0.5), old_values + 0.5)
    value = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    d = (arrays["ref_log_prob"] - arrays["log_prob"]).clamp(-20, 20)
    kl = (d.exp() - d - 1).clamp(-10, 10)
    total = policy + CONFIG.vf_coef * value + CONFIG.kl_coef * kl - CONFIG.ent_coef * arrays["entropy"]
    loss = (total * share).sum()
    with torch.no_grad():
        stats = torch.stack([
            (share * policy).sum(), (share * value).sum(), (share * kl).sum(), (share * arrays["entropy"]).sum(),
            (share * ((clipped > plain) & (ratio < 1))).sum(), (share * ((clipped > plain) & (ratio > 1))).sum(),
            (share * -log_ratio).sum(), (share * (ratio - 1 - log_ratio)).sum(), (share * ratio).sum(),
            torch.where(m, ratio, 0.0).max(), (share * returns).sum(), (share * returns**2).sum(),
            (share * (returns - values)).sum(), (share * (returns - values) ** 2).sum(),
        ])  # fmt: skip
    return loss, stats


def step(function, arrays, scalars):
    """Forward and gradients."""
    loss, stats = function(arrays, scalars)
    return loss, stats, torch.autograd.grad(loss, [arrays[name] for name in LEAVES])


def functions(device):
    for name in dispatch.TABLE["ppo_loss"]:
        if name == "reference" or dispatch.missing("ppo_loss", name, device):
            continue

        def call(arrays, scalars, name=name):
            with dispatch.forced(name):
                return ppo_loss(**arrays, **scalars, config=CONFIG)

        yield f"manus_fast {name}", call
    yield "torch eager", eager
    if device == "cuda":
        yield "torch.compile", torch.compile(eager, dynamic=False)


def check(function, device):
    arrays, scalars = make(100_003, device, seed=1)
    wide = {n: a.detach().double() if a.is_floating_point() else a for n, a in arrays.items()}
    wide = {n: a.requires_grad_() if n in LEAVES else a for n, a in wide.items()}

    def spec(given, scalars):
        return reference.ppo_loss(**given, **scalars, scale=None, sequence_log_ratio=None, config=CONFIG)

    got, want = step(function, arrays, scalars), step(spec, wide, scalars)
    pairs = [(got[0].detach(), want[0].detach()), *zip(got[2], want[2], strict=True)]
    return max(harness.relative_error(a, b) for a, b in pairs)


def main(argv=None) -> list[dict]:
    """Runs the benchmark; returns its rows."""
    arguments = harness.parse(argv, "ppo_loss")
    report = harness.open_report(arguments, "ppo_loss")
    device = arguments.device
    sizes = [2**22, 2**24] if device == "cuda" else [64 * 2048]
    if arguments.quick:
        sizes = [4096]
    errors = {}
    for n in sizes:
        arrays, scalars = make(n, device)
        case = f"{n >> 20}M tokens" if n >= 2**20 else f"{n} tokens"
        for name, function in functions(device):
            if arguments.only not in name:
                continue
            error = errors[name] = errors.get(name) or check(function, device)

            def call(function=function):
                return step(function, arrays, scalars)  # noqa: B023 (called within this turn of the loop)

            variants = [(name, call)]
            if device == "cuda":
                variants.append((f"{name}, graph", harness.graphed(call)))
            for label, timed in variants:
                ms = harness.time_ms(timed, device=device, repeats=50)
                peak = harness.peak_mib(timed) if device == "cuda" and timed is call else None
                report.add(case, label, "fwd+bwd", ms, nbytes=BYTES * n, peak_mib=peak, error=error)
        torch.compiler.reset()
    return report.rows


if __name__ == "__main__":
    main()

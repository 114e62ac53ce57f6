"""`linear_logprob` against PyTorch, torch.compile, Liger and cut-cross-entropy at a language model's head, bf16.

    python -m benchmarks.bench_linear_logprob --json benchmarks/results/h200.json

N tokens × H hidden × V words. FLOPs counted: one product 2·N·H·V forward, three forward and backward ("keep") or four
("recompute", and for whoever recomputes); bytes are not the limit. Extra memory includes the gradients. Error columns:
"fwd": worst |Δ| of log-prob and entropy in nats; "fwd+bwd": relative error of the gradients of hidden and weight,
worst; both against float64 on the first 256 tokens.
"""

import importlib.util

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks import harness
from manus_fast.ops import dispatch, linear_logprob, reference


def eager(hidden, weight, target, entropy=True):
    """Logits whole, float32 log-softmax, gather, p·log p."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    log_prob = log_p.gather(1, target[:, None])[:, 0]
    return log_prob, -(log_p.exp() * log_p).sum(-1) if entropy else None


def chunked(function, size=2048):
    """`function` on chunks of tokens, each recomputed in the backward."""

    def call(hidden, weight, target):
        parts = [
            checkpoint(function, h, weight, t, use_reentrant=False)
            for h, t in zip(hidden.split(size), target.split(size), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    return call


def liger_scaled_cross_entropy():
    """Liger's fused kernel of log-prob and entropy (CuTe on Hopper), None where it cannot be imported."""
    if importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("cutlass") is None:
        return None
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    def call(hidden, weight, target):
        nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, target, 1.0, -100, 1, True)
        return -nll, entropy

    return call


def liger_chunked():
    """What Liger runs where its CuTe kernel does not: 512 tokens at a time, recomputed; None without Liger."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger

    def call(hidden, weight, target):
        nll, entropy = liger._FusedLinearPPOFallbackFunction.apply(hidden, weight, target, 1.0, -100, True)
        return -nll, entropy

    return call


def cce():
    """Apple's cut cross-entropy, log-prob only, without its gradient filter; None where it cannot be imported."""
    if importlib.util.find_spec("cut_cross_entropy") is None:
        return None
    from cut_cross_entropy import linear_cross_entropy

    def call(hidden, weight, target):
        return -linear_cross_entropy(hidden, weight, target, reduction="none", filter_eps=None), None

    return call


def entries(device: str):
    """(name, GEMMs forward and backward, function(hidden, weight, target) → (log_prob, entropy or None))."""
    for name in dispatch.TABLE["linear_logprob"]:
        if name == "reference" or dispatch.missing("linear_logprob", name, device, torch.bfloat16):
            continue
        for mode, products in (("recompute", 4), ("keep", 3)):

            def call(hidden, weight, target, name=name, mode=mode):
                with dispatch.forced(name):
                    return linear_logprob(hidden, weight, target, mode=mode)

            yield f"manus_fast {name} {mode}", products, call
    yield "torch eager", 3, eager
    if device == "cuda":
        yield "torch.compile", 3, torch.compile(eager, dynamic=False)
        yield "torch.compile chunked", 4, chunked(torch.compile(eager, dynamic=False))
        peers = {"liger sm90": liger_scaled_cross_entropy, "cut-cross-entropy": cce, "liger chunked": liger_chunked}
        for name, make in peers.items():
            function = make()
            if function is not None:
                yield name, 4, function


def gradients(outputs, upstream, hidden, weight):
    """Gradients of hidden and weight."""
    used = [i for i in (0, 1) if outputs[i] is not None]
    return torch.autograd.grad(
        [outputs[i] for i in used], [hidden, weight], [upstream[i].to(outputs[i].dtype) for i in used]
    )


def errors(function, hidden, weight, target, upstream) -> tuple[float, float]:
    """Worst |Δ| of the values and worst relative error of the gradients on the first 256 tokens."""
    h, t, g = hidden.detach()[:256].requires_grad_(), target[:256], upstream[:, :256]
    w = weight.detach().requires_grad_()
    out = function(h, w, t)
    wide_h, wide_w = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    want = reference.linear_logprob(wide_h, wide_w, t, entropy=out[1] is not None)
    values = max(float((a.double() - b).detach().abs().max()) for a, b in zip(out, want, strict=True) if a is not None)
    grads = zip(gradients(out, g, h, w), gradients(want, g, wide_h, wide_w), strict=True)
    return float(f"{values:.3e}"), max(harness.relative_error(a, b) for a, b in grads)


def measure(report, case, name, products, function, data, device) -> None:
    """Adds the rows of one function."""
    hidden, weight, target, upstream = data
    value_error, gradient_error = errors(function, hidden, weight, target, upstream)
    product = 2 * hidden.shape[0] * weight.numel()

    def forward():
        with torch.no_grad():
            return function(hidden, weight, target)

    def step():
        return gradients(function(hidden, weight, target), upstream, hidden, weight)

    timing = {"device": device, "budget_s": 1.0, "repeats": 15}
    ms, peak = harness.time_ms(forward, **timing), harness.peak_mib(forward)
    report.add(case, name, "fwd", ms, flops=product, peak_mib=peak, error=value_error)
    ms, peak = harness.time_ms(step, **timing), harness.peak_mib(step)
    report.add(case, name, "fwd+bwd", ms, flops=products * product, peak_mib=peak, error=gradient_error)


def main(argv=None) -> list[dict]:
    """Runs the benchmark; returns its rows."""
    arguments = harness.parse(argv, "linear_logprob")
    device = arguments.device
    cuda = device == "cuda"
    shapes = [(8192, 1536, 151936), (8192, 3584, 151936)] if cuda else [(512, 576, 49152)]
    if arguments.quick:
        shapes = [(256, 64, 4096)]
    n, h, v = shapes[0]
    report = harness.open_report(arguments, "linear_logprob", (n, v, h))
    for n, h, v in shapes:
        dtype = torch.bfloat16 if cuda else torch.float32
        hidden = torch.randn(n, h, device=device, dtype=dtype).requires_grad_()
        weight = (torch.randn(v, h, device=device, dtype=dtype) * (1.5 / h**0.5)).requires_grad_()
        target = torch.randint(0, v, (n,), device=device)
        upstream = torch.randn(2, n, device=device)
        case = f"N{n} H{h} V{v} {str(dtype)[6:]}"
        report.ceilings = harness.measure_ceilings(device, (n, v, h))
        print(f"{case}: product {report.ceilings.tflops:.0f} TFLOP/s", flush=True)
        for name, products, function in entries(device):
            if arguments.only not in name:
                continue
            try:
                measure(report, case, name, products, function, (hidden, weight, target, upstream), device)
            except (RuntimeError, ImportError, NotImplementedError) as error:
                # A peer that cannot run this case has no row; our own backends must run.
                if name.startswith("manus_fast"):
                    raise
                print(f"{name} on {case}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            if cuda:
                torch.cuda.empty_cache()
    return report.rows


if __name__ == "__main__":
    main()

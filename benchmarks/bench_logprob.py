"""`logprob` against PyTorch eager, torch.compile, flash-attn's and Liger's kernels: [8192, 151936] bf16, and 4× that.

    python -m benchmarks.bench_logprob --json benchmarks/results/h200.json

Error: the worst of log-prob, entropy (absolute, in nats) and gradient (relative) against float64 on the first 64 rows.
"""

import importlib.util

import torch

from benchmarks import harness
from manus_fast.ops import dispatch, logprob, reference


def eager(logits, target, entropy):
    """What trainers write: float32 log-softmax, gather, and p·log p."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    log_prob = log_p.gather(1, target[:, None])[:, 0]
    return log_prob, -(log_p.exp() * log_p).sum(-1) if entropy else None


def peers(entropy: bool, device: str):
    """(name, function(logits, target) → (log_prob, entropy or None)) of everything that can be imported."""
    yield "torch eager", lambda z, t: eager(z, t, entropy)
    if device == "cuda":
        compiled = torch.compile(eager, dynamic=False)
        yield "torch.compile", lambda z, t: compiled(z, t, entropy)
    if entropy or device != "cuda":
        return
    if importlib.util.find_spec("flash_attn"):
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

        yield "flash-attn", lambda z, t: (-cross_entropy_loss(z, t)[0], None)
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
        from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

        def selective(z, t):
            rows = z[None]  # its last position predicts nothing and is left out
            return fused_selective_log_softmax(rows, t[None, :-1], temperature=1.0)[0], None

        def cross_entropy(z, t):
            given = z.view_as(z)  # it writes the gradient over the logits
            return -LigerCrossEntropyFunction.apply(given, t, None, -100, 0.0, 0.0, "none")[0], None

        yield "liger selective (no gradient)", selective
        yield "liger cross-entropy in place", cross_entropy


def ours(device: str, inplace: bool):
    """The same for each of our backends that can run here."""
    for name in dispatch.TABLE["logprob"]:
        if name == "reference" or dispatch.missing("logprob", name, device):
            continue

        def call(z, t, entropy, name=name):
            with dispatch.forced(name):
                return logprob(z, t, entropy=entropy, inplace_backward=inplace)

        yield f"manus_fast {name}" + (" in place" if inplace else ""), call


def backward(outputs, upstream, logits):
    """The gradient of the logits for the outputs that there are."""
    used = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o is not None]
    torch.autograd.grad([o for o, _ in used], [logits], [u for _, u in used])


def check(function, logits, target, upstream) -> float:
    """Worst error on the first 64 rows; of the values alone where the function has no gradient."""
    z, t, g = logits.detach()[:64].clone().requires_grad_(), target[:64], upstream[:, :64]
    wide = z.detach().double().requires_grad_()
    out = function(z, t)
    want = reference.logprob(wide, t, entropy=out[1] is not None)
    used = [i for i in (0, 1) if out[i] is not None]
    worst = max(float((out[i].double() - want[i][: len(out[i])]).detach().abs().max()) for i in used)
    if not out[0].requires_grad:
        return float(f"{worst:.3e}")
    grad = torch.autograd.grad([out[i] for i in used], [z], [g[i].to(out[i].dtype) for i in used])[0]
    grad_want = torch.autograd.grad([want[i] for i in used], [wide], [g[i].double() for i in used])[0]
    return float(f"{max(worst, harness.relative_error(grad, grad_want)):.3e}")


def measure(report, case, name, function, data, device) -> None:
    """Adds the rows of one function."""
    logits, target, upstream = data
    error = check(function, logits, target, upstream)
    cuda = device == "cuda"

    def forward():
        with torch.no_grad():
            return function(logits, target)

    def step():
        z = logits.detach().requires_grad_()
        backward(function(z, target), upstream, z)

    size = logits.nbytes
    if "in place" not in name:
        ms = harness.time_ms(forward, device=device)
        report.add(
            case, name, "fwd", ms, nbytes=size, peak_mib=harness.peak_mib(forward) if cuda else None, error=error
        )
    if "no gradient" in name:
        return
    ms = harness.time_ms(step, device=device)
    report.add(
        case, name, "fwd+bwd", ms, nbytes=3 * size, peak_mib=harness.peak_mib(step) if cuda else None, error=error
    )


def fill(logits) -> None:
    """Fresh logits; a backward in place leaves gradients there."""
    for rows in logits.split(4096):
        rows.normal_(std=2.0)


def main(argv=None) -> list[dict]:
    """Runs the benchmark; returns its rows."""
    arguments = harness.parse(argv, "logprob")
    report = harness.open_report(arguments, "logprob")
    device = arguments.device
    shapes = [(8192, 151936), (32768, 151936)] if device == "cuda" else [(256, 32000)]
    if arguments.quick:
        shapes = [(64, 4096)]
    for n, v in shapes:
        logits = torch.empty(n, v, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
        target = torch.randint(0, v, (n,), device=device)
        upstream = torch.randn(2, n, device=device)
        for entropy in (True, False):
            entries = []
            for inplace in (False, True):
                entries += [(name, lambda z, t, f=f, e=entropy: f(z, t, e)) for name, f in ours(device, inplace)]
            entries += [(name, f) for name, f in peers(entropy, device) if n <= 8192]
            case = f"[{n}, {v}] {str(logits.dtype)[6:]} " + ("log-prob + entropy" if entropy else "log-prob")
            for name, function in entries:
                if arguments.only in name:
                    fill(logits)
                    measure(report, case, name, function, (logits, target, upstream), device)
    return report.rows


if __name__ == "__main__":
    main()

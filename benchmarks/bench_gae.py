"""`gae` with statistics against the loop over time, torch.compile of an associative scan, TorchRL, PufferLib.

    python -m benchmarks.bench_gae --json benchmarks/results/h200.json

float32, a mask that carries (70 % of the tokens); advantages, returns and statistics of the masked ones. Bytes: 17
a token (21 at turn level). TorchRL and PufferLib know no mask and give no statistics: they do less.
Error: the worst of advantages, returns, mean and squared deviations against float64, relative, on at most 64 rows.
"""

import importlib.util

import torch

from benchmarks import harness
from manus_fast.ops import dispatch, gae, reference

GAMMA, LAM = 0.99, 0.95
LOOP_TOKENS = 2**23  # the loop over time takes seconds beyond


def make(shape, device, seed=0):
    g = torch.Generator(device=device).manual_seed(seed)
    mask = torch.rand(shape, generator=g, device=device) < 0.7
    rewards = torch.where(mask, torch.randn(shape, generator=g, device=device), 0.0)
    return rewards, torch.randn(shape, generator=g, device=device), mask


def loop(rewards, values, mask):
    """What trainers write: one step of Python a time step, then masked statistics."""
    return reference.gae(rewards, values, mask, GAMMA, LAM)


def whiten_inputs(advantages, mask):
    count = mask.sum()
    mean = (advantages * mask).sum() / count
    return torch.stack([count, mean, (((advantages - mean) * mask) ** 2).sum()])


def scan(rewards, values, mask):
    """The same recurrence as an associative scan of affine maps, for torch.compile."""
    from torch._higher_order_ops.associative_scan import associative_scan

    m = torch.where(mask, GAMMA * LAM, 1.0)
    b = torch.where(mask, GAMMA * LAM * rewards + GAMMA * (1 - LAM) * values, 0.0)

    def after(right, left):
        return left[0] * right[0], left[0] * right[1] + left[1]

    flipped = (m.flip(1), b.flip(1))
    _, x = associative_scan(after, flipped, dim=1, combine_mode="pointwise")
    x = torch.nn.functional.pad(x.flip(1)[:, 1:], (0, 1))
    advantages = torch.where(mask, rewards - values + x, 0.0)
    return advantages, torch.where(mask, rewards + x, 0.0), whiten_inputs(advantages, mask)


def torchrl_estimate():
    """TorchRL's function; None where it is not installed, or was built for another torch."""
    if importlib.util.find_spec("torchrl") is None:
        return None
    try:
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate
    except ImportError as error:
        print(f"torchrl: {error}", flush=True)
        return None
    return vec_generalized_advantage_estimate


def peers(device, shape):
    if shape[0] * shape[1] <= LOOP_TOKENS and shape[1] <= 8192:
        yield "python loop", loop
    if device == "cuda":
        yield "compile + associative_scan", torch.compile(scan, dynamic=False)
    vec_generalized_advantage_estimate = torchrl_estimate()
    if vec_generalized_advantage_estimate is not None:

        def torchrl(rewards, values, mask):
            done = torch.zeros_like(mask)[..., None]
            following = torch.nn.functional.pad(values[:, 1:], (0, 1))[..., None]
            args = GAMMA, LAM, values[..., None], following, rewards[..., None], done
            return (*vec_generalized_advantage_estimate(*args), None)

        yield "torchrl (no mask)", torchrl


def wide(inputs):
    return [x.double() if x.is_floating_point() else x for x in inputs]


def error_of(got, want):
    pairs = [(a.double(), b) for a, b in zip(got[:2], want[:2], strict=True)]
    pairs += [(got[2][k].double(), want[2][k]) for k in (1, 2)]
    return max(harness.relative_error(a, b) for a, b in pairs)


def ours(device):
    for name in dispatch.TABLE["gae"]:
        if name == "reference" or dispatch.missing("gae", name, device):
            continue

        def call(*inputs, name=name, **options):
            with dispatch.forced(name):
                return gae(*inputs, GAMMA, LAM, **options)

        yield f"manus_fast {name}", call


def entries_of_ours(shape, device):
    """(name, function, options) of each of our backends: padded, packed, at turn level."""
    rows, length = shape
    cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
    turns = (torch.arange(length, dtype=torch.int32, device=device) // 50).expand(shape).contiguous()
    for name, function in ours(device):
        yield name, function, {}
        yield f"{name} packed", function, {"cu_seqlens": cu_seqlens}
        yield f"{name} turn level", function, {"turn_id": turns}


def entries_of_peers(shape, device):
    """The same of what others offer."""
    for name, function in peers(device, shape):
        yield name, function, {}


def measure(report, case, name, function, inputs, options, small, device):
    """Adds a row; `small` holds inputs for the check of the error, None for a function that solves another task."""
    nbytes = inputs[0].numel() * (21 if "turn_id" in options else 17)
    error = None
    if small is not None:
        spec = {k: v for k, v in options.items() if k != "cu_seqlens"}
        spec = {k: v[:64].contiguous() if k == "turn_id" else v for k, v in spec.items()}
        error = error_of(function(*small, **spec), reference.gae(*wide(small), GAMMA, LAM, **spec))

    def call():
        return function(*inputs, **options)

    ms = harness.time_ms(call, device=device, repeats=50)
    peak = harness.peak_mib(call) if device == "cuda" else None
    report.add(case, name, "fwd", ms, nbytes=nbytes, peak_mib=peak, error=error)


def main(argv=None) -> list[dict]:
    """Runs the benchmark; returns its rows."""
    arguments = harness.parse(argv, "gae")
    report = harness.open_report(arguments, "gae")
    device = arguments.device
    shapes = [(1024, 4096), (65536, 512), (64, 8192), (64, 131072)] if device == "cuda" else [(64, 2048), (4096, 512)]
    if arguments.quick:
        shapes = [(16, 128)]
    for whose in (entries_of_ours, entries_of_peers):  # ours first: a run cut short has them
        for shape in shapes:
            inputs = make(shape, device)
            small = [x[:64, :2048].contiguous() for x in inputs]
            for name, function, options in whose(shape, device):
                if arguments.only not in name:
                    continue
                given = [x.view(-1) for x in inputs] if "cu_seqlens" in options else inputs
                check = None if options or "no mask" in name else small
                measure(report, f"[{shape[0]}, {shape[1]}]", name, function, given, options, check, device)
            torch.compiler.reset()
    return report.rows


if __name__ == "__main__":
    main()

"""Times ops: medians of CUDA events with the L2 flushed, peak memory, error against float64, share of the ceilings.

A row is one measurement, as benchmarks/results/*.json holds them:
    op, case, backend, pass     what ran ("fwd", "bwd", "fwd+bwd")
    ms                          median time of one call
    gbs, tflops                 bytes and operations that the task needs at least, over that time; null if not counted
    pct_of_limit                the floor (the larger of bytes and operations over this run's ceilings) over the time
    peak_mib                    device memory in use at the peak of a call, less what was in use before it
    error                       ‖out - ref‖ / ‖ref‖ against a float64 reference, as each benchmark defines it
    device, torch, triton, commit
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.arguments import Parser, output_file

# Larger than any L2, and long enough (0.1 ms) for the host to get ahead of the device before the timed region begins.
FLUSH_BYTES = 512 << 20

# What tells one row of a file from another.
KEY = ("op", "device", "case", "backend", "pass")


@dataclass
class Ceilings:
    """Rates measured in this run: device copy (bytes read and written) in GB/s, matrix product in TFLOP/s."""

    gbs: float
    tflops: float


@dataclass
class Report:
    """Collects the rows of one op, prints each as it comes, and writes it to `path` at once: what a run that is cut
    short has measured is kept."""

    op: str
    device: str
    ceilings: Ceilings
    commit: str = ""
    path: str | None = None
    rows: list[dict] = field(default_factory=list)

    def add(self, case, backend, pass_, ms, *, nbytes=None, flops=None, peak_mib=None, error=None) -> dict:
        """Adds a row; `nbytes` and `flops` are the least that the task needs."""
        seconds = ms * 1e-3
        floor = max((nbytes or 0) / (self.ceilings.gbs * 1e9), (flops or 0) / (self.ceilings.tflops * 1e12))
        row = {
            "op": self.op,
            "case": case,
            "backend": backend,
            "pass": pass_,
            "ms": round(ms, 5),
            "gbs": round(nbytes / seconds * 1e-9, 1) if nbytes else None,
            "tflops": round(flops / seconds * 1e-12, 1) if flops else None,
            "pct_of_limit": round(100 * floor / seconds, 1) if floor else None,
            "peak_mib": None if peak_mib is None else round(peak_mib, 1),
            "error": error,
            "device": self.device,
            "torch": torch.__version__,
            "triton": triton_version(),
            "commit": self.commit,
        }
        self.rows.append(row)
        print(format_row(row), flush=True)
        if self.path is not None:
            merge(self.path, [row])
        return row

    def save(self, path: str | None) -> None:
        """Writes the rows to `path`, in place of all rows of this op and device that stand there."""
        if path is None:
            return
        file = Path(path)
        old = json.loads(file.read_text()) if file.exists() else []
        _write(file, [row for row in old if (row["op"], row["device"]) != (self.op, self.device)] + self.rows)


def merge(path: str | Path, rows: Iterable[dict]) -> None:
    """Writes `rows` into the file, each in the place of its like (KEY), new ones after the last of their op.

    For a record made elsewhere: harness.merge("benchmarks/results/h200.json", json.load(open("ops.json"))).
    """
    file = Path(path)
    kept = json.loads(file.read_text()) if file.exists() else []
    for row in rows:
        here = [i for i, other in enumerate(kept) if all(other[name] == row[name] for name in KEY)]
        if here:
            kept[here[0]] = row
            continue
        after = [i for i, other in enumerate(kept) if other["op"] == row["op"]]
        kept.insert(after[-1] + 1 if after else len(kept), row)
    _write(file, kept)


def _write(file: Path, rows: list[dict]) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    file.write_text(f"[\n{lines}\n]\n")


def format_row(row: dict) -> str:
    """One line for a terminal."""
    parts = [f"{row['op']:<16} {row['case']:<34} {row['backend']:<26} {row['pass']:<8} {row['ms']:>10.4f} ms"]
    for key, unit, form in (
        ("gbs", "GB/s", ">8.1f"),
        ("tflops", "TFLOP/s", ">7.1f"),
        ("pct_of_limit", "% of limit", ">6.1f"),
        ("peak_mib", "MiB", ">9.1f"),
        ("error", "error", ".2e"),
    ):
        if row[key] is not None:
            parts.append(f"{row[key]:{form}} {unit}")
    return "  ".join(parts)


def triton_version() -> str | None:
    """The version of triton, None where it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def device_name(device: str) -> str:
    """The name that stands in the rows."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{model[0].split(':')[1].strip() if model else 'CPU'}, {torch.get_num_threads()} threads"


def commit_name() -> str:
    """The short hash of the commit that runs, with + for local changes; "" outside a checkout."""
    root = Path(__file__).parent
    try:
        sha = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return sha.stdout.strip() + ("+" if dirty.stdout.strip() else "") if sha.returncode == 0 else ""


def time_ms(function: Callable[[], object], *, device="cuda", repeats=20, warmup=3, budget_s=2.0) -> float:
    """Median time of a call in ms: `repeats` calls, fewer if they would take longer than `budget_s` together."""
    for _ in range(warmup):
        function()
    times = []
    started = time.perf_counter()
    if device != "cuda":
        while len(times) < repeats and (len(times) < 3 or time.perf_counter() - started < budget_s):
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    while len(times) < repeats and (len(times) < 3 or time.perf_counter() - started < budget_s):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def peak_mib(function: Callable[[], object]) -> float | None:
    """MiB of device memory that one call adds at its peak, its results included; None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def graphed(function: Callable[[], object]) -> Callable[[], object]:
    """The same work as a CUDA graph, to take the host's launch time out of a comparison."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out - reference‖ / ‖reference‖ in float64."""
    out, reference = out.double(), reference.double()
    return float(f"{float((out - reference).norm().detach() / reference.norm().detach()):.3e}")


def measure_ceilings(device: str, shape: tuple[int, int, int] = (8192, 8192, 8192)) -> Ceilings:
    """Copy bandwidth, and the rate of one [M, K] · [K, N] product, shape (M, N, K): bf16 on CUDA, float32 on a CPU."""
    if device == "cuda":
        source = torch.empty(2 << 30, dtype=torch.int8, device=device).random_()
        m, n, k = shape
        dtype = torch.bfloat16
    else:
        source = torch.empty(256 << 20, dtype=torch.int8)
        m, n, k, dtype = 1024, 1024, 1024, torch.float32
    target = torch.empty_like(source)
    copy_ms = time_ms(lambda: target.copy_(source), device=device, budget_s=0.5)
    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(n, k, device=device, dtype=dtype)
    product_ms = time_ms(lambda: a @ b.T, device=device, budget_s=0.5)
    return Ceilings(gbs=2 * source.nbytes / copy_ms * 1e-6, tflops=2 * m * n * k / product_ms * 1e-9)


def parse(argv: Sequence[str] | None, op: str) -> argparse.Namespace:
    """The arguments every benchmark takes."""
    parser = Parser(op, None)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write each row there at once, in place of the one before"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--only", default="", help="only backends whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one small case, for a check that it runs")
    parser.add_argument("--commit", default=None, help="the commit to name in the rows, where git cannot tell")
    return parser.parse_args(argv)


def open_report(arguments: argparse.Namespace, op: str, shape=(8192, 8192, 8192), at_once=True) -> Report:
    """Measures the ceilings and starts a report that writes its rows at once, or only when `save` is called."""
    ceilings = measure_ceilings(arguments.device, shape)
    commit = commit_name() if arguments.commit is None else arguments.commit
    report = Report(op, device_name(arguments.device), ceilings, commit, arguments.json if at_once else None)
    print(f"{report.device}: copy {ceilings.gbs:.0f} GB/s, product {ceilings.tflops:.0f} TFLOP/s", flush=True)
    return report

"""`group_advantages` against the loop over groups that trainers write.

    python -m benchmarks.bench_group_advantages --json benchmarks/results/h200.json

Error: relative, against float64.
"""

import torch

from benchmarks import harness
from manus_fast.ops import dispatch, group_advantages


def main(argv=None) -> list[dict]:
    """Runs the benchmark; returns its rows."""
    arguments = harness.parse(argv, "group_advantages")
    report = harness.open_report(arguments, "group_advantages")
    device = arguments.device
    for entries, size in [(64, 4)] if arguments.quick else [(4096, 8), (100_000, 10)]:
        g = torch.Generator(device=device).manual_seed(0)
        rewards = torch.randn(entries, generator=g, device=device)
        group = torch.randperm(entries, generator=g, device=device) // size
        with dispatch.forced("reference"):
            want = group_advantages(rewards.double(), group)
        for name in dispatch.TABLE["group_advantages"]:
            if dispatch.missing("group_advantages", name, device) or arguments.only not in name:
                continue

            def call(name=name):
                with dispatch.forced(name):
                    return group_advantages(rewards, group)  # noqa: B023 (called within this turn of the loop)

            error = harness.relative_error(call(), want)
            few = {"repeats": 3, "warmup": 1} if name == "reference" else {}
            ms = harness.time_ms(call, device=device, **few)
            label = "python loop" if name == "reference" else f"manus_fast {name}"
            report.add(f"{entries} in groups of {size}", label, "fwd", ms, error=error)
    return report.rows


if __name__ == "__main__":
    main()

"""What it saves to compute common beginnings of rows once: operations, tokens and time of forward and backward passes.

    python -m benchmarks.bench_prefixes --model runs/demo/sft/model --json benchmarks/results/prefixes.json

The policy searches tasks of the household world and plays groups of episodes; what these teach is packed twice,
row by row and with `share_prefixes`, and a mini-batch's gradient is computed both ways, in turn, the best of several
counting. `ratio` is of operations (modeling/flops.py says what counts), `error` the largest difference of a gradient's
entry, as a share of the largest entry of its parameter. The rows:

- solved: up to four solved episodes a task, each turn trained on once (`rows_once`), from best-of-n;
- siblings: sibling groups of whole mcts trees as groups of GRPO (`sibling_episodes`);
- groups: 8 sampled episodes a task, the same prompt and no more by construction: GRPO without a tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.arguments import Parser, output_file
from manus_fast.agent.trajectory import Row, build_rows
from manus_fast.commands.common import find_config, prepare
from manus_fast.data.packing import pack
from manus_fast.finetune import training_tasks
from manus_fast.learn.expert_iteration import imitation_rows, solved_episodes
from manus_fast.learn.minibatch import mini_batches
from manus_fast.learn.policy import Policy
from manus_fast.modeling.load import load_model
from manus_fast.player import Player
from manus_fast.run_config import Config
from manus_fast.search.config import SearchConfig
from manus_fast.search.targets import sibling_episodes


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Runs the benchmark; returns its rows."""
    parser = Parser("prefixes", __doc__)
    parser.add_argument("--model", required=True, help="folder of the policy")
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--budget_tokens", type=int, default=1000, help="of a task's search")
    parser.add_argument("--batch_size", type=int, default=32, help="rows of a mini-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--json", type=output_file, default=None, help="write the rows there, in place of this op's on this device"
    )
    parser.add_argument("overrides", nargs="*", default=[], help="of configs/expert_household.yaml, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    prepare()
    torch.set_num_threads(1)
    config = Config.load(find_config(None, "expert_household"), arguments.overrides)
    model, tokenizer = load_model(arguments.model)
    player = Player(config, model, tokenizer)
    name = harness.device_name("cpu").rsplit(",", 1)[0]
    report = harness.Report("prefixes", name, harness.Ceilings(gbs=1, tflops=1), harness.commit_name())
    policy = Policy(model)
    for case, rows in collections(player, arguments.tasks, arguments.budget_tokens).items():
        if not rows:
            raise SystemExit(f"--tasks: expected some that teach something, got no {case} of {arguments.tasks}")
        measure(report, policy, case, rows, arguments.batch_size, arguments.repeats)
    report.save(arguments.json)
    return report.rows


def collections(player: Player, count: int, budget: int) -> dict[str, list[Row]]:
    """Rows by the name of their case."""
    tasks = training_tasks(player.environment.tasks("train"), count, seed=5)

    def searched(strategy: str, **options: Any):
        keys = {"strategy": strategy, "budget_tokens": budget, "temperature": 1.0, "stop_on_success": False}
        return player.search(tasks, 5, SearchConfig(**{**keys, **options}))

    return {
        "solved": imitation_rows([solved_episodes(searched("best_of_n"), keep=4)]),
        "siblings": build_rows(sibling_episodes(searched("mcts", value="reward"))),
        "groups": build_rows(player.collect(tasks, 0, 8)),
    }


def measure(report: harness.Report, policy: Policy, case: str, rows: list[Row], size: int, repeats: int) -> None:
    """Adds a row for each way of packing."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    gradients: dict[bool, dict[str, torch.Tensor]] = {}
    # The same mini-batches for both: those that keep groups together.
    packed = {share: pack(rows, share) for share in (False, True)}
    batches = mini_batches(len(rows), min(size, len(rows)), 0, groups=packed[True].groups)
    for _ in range(repeats):
        for share in (False, True):
            policy.zero_grad()
            began = time.perf_counter()
            for index in batches:
                batch = packed[share].select(index)
                (-policy.score(batch).log_prob.sum() / batch.trainable_tokens).backward()
            taken[share].append(time.perf_counter() - began)
            gradients[share] = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    work = policy.work.take()
    error = max(
        float((gradients[True][n] - g).abs().max() / g.abs().max().clamp(min=1e-12))
        for n, g in gradients[False].items()
    )
    tokens = sum(map(len, rows))
    name = f"{case}: {len(rows)} rows, {tokens} tokens, {len(batches)} mini-batches"
    for share, backend in ((False, "row by row"), (True, "common beginnings once")):
        row = report.add(name, backend, "fwd+bwd", 1e3 * min(taken[share]), error=error if share else None)
        row["speedup"] = round(min(taken[False]) / min(taken[share]), 2)
        row["tokens"] = round(tokens * (1 - work["tokens_shared"])) if share else tokens
        row["ratio"] = round(work["flops_ratio"], 2) if share else 1.0
        print(f"{'':<16} {row['tokens']} tokens computed, ratio {row['ratio']}, {row['speedup']}x", flush=True)


if __name__ == "__main__":
    main()

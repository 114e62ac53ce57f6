"""Expert iteration: a policy searches training tasks, is fine-tuned on the episodes that search solved, and again.

    python -m benchmarks.bench_expert_iteration --model runs/demo/sft/model --json expert_iteration.json

Nothing but the policy's own sampled replies is imitated. After each round the policy plays all of valid_unseen
greedily; its success is compared with that of the policy which the run began with, task by task (paired bootstrap).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from manus_fast.commands.common import find_config, prepare
from manus_fast.evaluate import Report, compare, evaluate, make_panel
from manus_fast.finetune import FineTune, training_tasks
from manus_fast.modeling.load import load_model
from manus_fast.player import Player
from manus_fast.run_config import Config
from manus_fast.search.config import SearchConfig
from manus_fast.search.targets import rows_once
from manus_fast.versions import git_commit


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the policy to begin with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=400, help="training tasks searched in a round")
    parser.add_argument("--panel", type=int, default=None, help="tasks of valid_unseen; default: all")
    parser.add_argument("--strategy", default="mcts")
    parser.add_argument("--budget_tokens", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--output_dir", default="runs/expert_iteration")
    parser.add_argument("--json", default=None, help="where the rows go")
    parser.add_argument("overrides", nargs="*", default=[], help="of configs/demo_household.yaml, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    prepare()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    first: Report | None = None
    for seed in arguments.seeds:
        folder = Path(arguments.output_dir) / f"seed{seed}"
        config = Config.load(
            find_config(None, "demo_household"),
            [f"training.seed={seed}", f"training.output_dir={folder}", "evaluation.tasks=20", *arguments.overrides],
        )
        model, tokenizer = load_model(arguments.model)
        trainable = iterate(config, model, tokenizer, arguments)
        if first is None:
            first = next(trainable)["report"]
            print(f"before: {first.summary.success.rate:.4f}", flush=True)
        else:
            next(trainable)
        for row in trainable:
            report = row.pop("report")
            row |= {"seed": seed, "before": first.summary.success.rate, "after": report.summary.success.rate}
            row["comparison"] = dataclasses.asdict(compare(first, report))
            rows.append(row)
            print(json.dumps({k: v for k, v in row.items() if k != "comparison"}), flush=True)
            low, high = row["comparison"]["low"], row["comparison"]["high"]
            print(f"  difference {row['comparison']['difference']:+.4f} (95 % {low:+.4f} to {high:+.4f})", flush=True)
            if arguments.json:
                record = {
                    "command": f"python -m benchmarks.bench_expert_iteration --model MODEL --tasks {arguments.tasks} "
                    f"--strategy {arguments.strategy} --budget_tokens {arguments.budget_tokens} "
                    f"--epochs {arguments.epochs} --learning_rate {arguments.learning_rate} "
                    f"--rounds {arguments.rounds} "
                    f"--seeds {' '.join(map(str, arguments.seeds))}",
                    "commit": git_commit(),
                    "torch": torch.__version__,
                    "cpus": os.cpu_count(),
                    "rows": rows,
                }
                Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


def iterate(config: Config, model: Any, tokenizer: Any, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields {"report": …} of the policy as it comes, then a row after each round."""
    player = Player(config, model, tokenizer)
    panel = make_panel(player.environment, "valid_unseen", arguments.panel)
    yield {"report": measured(player, panel)}
    seed, split = config.training.seed, player.environment.tasks("train")
    chosen = training_tasks(split, arguments.rounds * arguments.tasks, seed)
    settings = SearchConfig(strategy=arguments.strategy, budget_tokens=arguments.budget_tokens, temperature=1.0)
    found = []
    for number in range(arguments.rounds):
        began = time.perf_counter()
        tasks = chosen[number * arguments.tasks : (number + 1) * arguments.tasks]
        trees = player.search(tasks, seed=1 + seed * arguments.rounds + number, config=settings)
        searched = time.perf_counter() - began
        found += [tree.trajectory() for tree in trees if tree.solution is not None]
        # Earlier rounds stay in: they are solved episodes all the same.
        own = dataclasses.replace(
            config,
            sft=dataclasses.replace(
                config.sft, epochs=arguments.epochs, learning_rate=arguments.learning_rate, patience=None,
                eval_every=1_000_000,
            ),
            training=dataclasses.replace(config.training, output_dir=f"{config.training.output_dir}/round{number + 1}"),
        )  # fmt: skip
        trained = FineTune(own, model, tokenizer, player.environment).run(rows_once(found))
        player = Player(config, model, tokenizer, player.environment)
        yield {
            "report": measured(player, panel),
            "round": number + 1,
            "searched": len(tasks),
            "solved": sum(tree.solution is not None for tree in trees),
            "search_tokens": sum(tree.tokens for tree in trees),
            "rows": len(found),
            "sft_steps": trained.result.steps,
            "search_seconds": round(searched, 1),
            "seconds": round(time.perf_counter() - began, 1),
        }


def measured(player: Player, panel: Any) -> Report:
    return evaluate(panel, lambda tasks: player.play(tasks, 0.0), "policy")


if __name__ == "__main__":
    main()

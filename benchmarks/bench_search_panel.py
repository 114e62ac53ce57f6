"""Search strategies on the household panel at equal generated tokens, with the demo's SFT policy.

    python -m benchmarks.bench_search_panel --model runs/demo/sft/model --json benchmarks/results/search_panel.json

Every task of the panel is searched once by each strategy with the same limit of generated tokens. A search that solves
its task ends there, so one run says what every smaller limit would have given: a task counts at a limit when it was
solved within it. Greedy has nothing to spend a second episode on; its figure is one episode's. The value model is
fitted beforehand on searched training tasks (`--value_tasks`), which no budget counts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser, output_file
from manus_fast.commands.common import find_config, prepare
from manus_fast.evaluate import make_panel
from manus_fast.evaluate.metrics import wilson
from manus_fast.finetune import training_tasks
from manus_fast.learn.policy import Policy
from manus_fast.learn.search_values import fit_values
from manus_fast.modeling.load import load_model
from manus_fast.player import Player
from manus_fast.run_config import Config
from manus_fast.search.config import SearchConfig
from manus_fast.versions import git_commit

# Name in the table → keys of the `search` block.
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"strategy": "greedy"},
    "best of n": {"strategy": "best_of_n"},
    "beam": {"strategy": "beam"},
    "ToT": {"strategy": "tot", "value": "reward"},
    "ToT, rollouts": {"strategy": "tot", "value": "rollout"},
    "GoT": {"strategy": "got", "value": "reward"},
    "DFSDT": {"strategy": "dfsdt"},
    "MCTS": {"strategy": "mcts", "value": "reward"},
    "MCTS, rollouts": {"strategy": "mcts", "value": "rollout"},
    "ToT, value model": {"strategy": "tot", "value": "model"},
    "GoT, value model": {"strategy": "got", "value": "model"},
    "MCTS, value model": {"strategy": "mcts", "value": "model"},
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("search_panel", __doc__)
    parser.add_argument("--model", default=None, help="folder of the policy")
    parser.add_argument("--merge", nargs="+", default=None, help="join the rows of these files, and search nothing")
    parser.add_argument("--split", default="valid_unseen")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--budgets", type=int, nargs="+", default=[125, 250, 500, 1000], help="generated tokens a task")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0])
    parser.add_argument("--only", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--value_tasks", type=int, default=150, help="training tasks that the value model learns from")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--json", type=output_file, default=None, help="where the rows go")
    parser.add_argument("overrides", nargs="*", default=[], help="of configs/search_household.yaml, as KEY=VALUE")
    arguments = parser.parse_args(argv)
    if arguments.merge:
        merge(arguments.merge, arguments.json)
        return
    if arguments.model is None:
        parser.error("--model: expected the folder of a policy, got none")
    prepare()
    torch.set_num_threads(1)
    config = Config.load(find_config(None, "search_household"), arguments.overrides)
    model, tokenizer = load_model(arguments.model)
    player = Player(config, model, tokenizer)
    panel = make_panel(player.environment, arguments.split, arguments.tasks)
    rows: list[dict[str, Any]] = []
    if arguments.append:
        rows = json.loads(Path(arguments.json).read_text())["rows"]
    score = None
    if any(STRATEGIES[name].get("value") == "model" for name in arguments.only):
        score = value_model(player, model, arguments.value_tasks).value_of()
    for temperature in arguments.temperatures:
        for name in arguments.only:
            if name == "greedy" and temperature != arguments.temperatures[0]:
                continue  # takes none
            keys = {**STRATEGIES[name], "budget_tokens": max(arguments.budgets), "temperature": temperature}
            began = time.perf_counter()
            trees = player.search(panel.tasks, config=SearchConfig(**keys), score=score)
            seconds = time.perf_counter() - began
            solved = {
                str(budget): sum(tree.solution is not None and tree.solved_at <= budget for tree in trees)
                for budget in arguments.budgets
            }
            rows.append(
                {
                    "name": name,
                    "search": keys,
                    "tasks": len(trees),
                    "solved": solved,
                    "success": {budget: count / len(trees) for budget, count in solved.items()},
                    "interval": {budget: wilson(count, len(trees)) for budget, count in solved.items()},
                    "mean_tokens": sum(tree.tokens for tree in trees) / len(trees),
                    "mean_steps": sum(tree.steps for tree in trees) / len(trees),
                    "merged_share": player.search_stats.merged / max(1, player.search_stats.replies),
                    "failed": sum(tree.error is not None for tree in trees),
                    "seconds": round(seconds, 1),
                }
            )
            print(line(rows[-1], arguments.budgets), flush=True)
            record = {
                "command": f"python -m benchmarks.bench_search_panel --model MODEL --split {arguments.split} "
                f"--tasks {arguments.tasks} --budgets {' '.join(map(str, arguments.budgets))} "
                f"--temperatures {' '.join(map(str, arguments.temperatures))}",
                "split": arguments.split,
                "commit": git_commit(),
                "torch": torch.__version__,
                "cpus": os.cpu_count(),
                "rows": rows,
            }
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


def merge(files: Sequence[str], target: str | None) -> None:
    """Joins the records of runs that searched the same panel, each with some of the strategies.

    Raises:
        SystemExit: they searched another split, number of tasks or budgets.
    """
    records = [json.loads(Path(file).read_text()) for file in files]
    rows = [row for record in records for row in record["rows"]]
    commits = {record["commit"] for record in records}  # with "+" where files differed from it
    if len({(record["split"], (record["commit"] or "").rstrip("+")) for record in records}) > 1 or any(
        (row["tasks"], list(row["solved"])) != (rows[0]["tasks"], list(rows[0]["solved"])) for row in rows
    ):
        raise SystemExit("--merge: expected runs of one commit, split, number of tasks and budgets, got several")
    names = list(STRATEGIES)
    greedy = [row for row in rows if row["name"] == "greedy"][:1]
    rest = [row for row in rows if row["name"] != "greedy"]
    rest.sort(key=lambda row: (row["search"]["temperature"], names.index(row["name"])))
    record = {**records[0], "commit": max(commits, key=lambda commit: commit or ""), "rows": greedy + rest}
    for row in record["rows"]:
        print(line(row, [int(budget) for budget in row["solved"]]))
    if target:
        Path(target).write_text(json.dumps(record, indent=1) + "\n")


def value_model(player: Player, model: Any, tasks: int) -> Policy:
    """Fitted on sampled episodes of training tasks, those after a solution included."""
    config = SearchConfig(strategy="best_of_n", budget_tokens=600, temperature=1.0, stop_on_success=False)
    # Not seed 0, whose tasks the demo's policy was shown.
    trees = player.search(training_tasks(player.environment.tasks("train"), tasks, seed=1), seed=1, config=config)
    began = time.perf_counter()
    policy = fit_values(model, trees)
    nodes, solved = sum(len(tree.nodes) for tree in trees), sum(tree.solution is not None for tree in trees)
    print(
        f"value model: {nodes} nodes of {tasks} tasks, {solved} solved, {time.perf_counter() - began:.0f} s", flush=True
    )
    return policy


def line(row: dict[str, Any], budgets: Sequence[int]) -> str:
    """A row of the table in Markdown: per cent solved within each number of generated tokens."""
    figures = " | ".join(f"{100 * row['success'][str(budget)]:.1f}" for budget in budgets)
    temperature = "–" if row["name"] == "greedy" else f"{row['search']['temperature']:g}"
    return f"| {row['name']} | {temperature} | {figures} | {row['mean_tokens']:.0f} | {row['mean_steps']:.1f} |"


if __name__ == "__main__":
    main()

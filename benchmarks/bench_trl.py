"""TRL as a peer: GRPO on the same model, games, prompts and rewards, with vLLM colocated, for a fixed window of time.

    python -m benchmarks.bench_trl --data GAMES --model runs/alfworld_h200/sft/model --out runs/trl --seconds 90

TRL's trainer plays through its `rollout_func`: the episodes are those that `bench_alfworld_training` plays (the same
config, native worlds, chat format and rewards), and every turn of all of them is one call of TRL's own `generate`, as
its tool loop calls it. What is TRL's is what is compared: its engine calls, its padded batches, its update and its
hand-over of weights. The settings of the update are those of configs/alfworld_h200.yaml, as far as TRL has them.

Writes OUT/alfworld_trl.json in the form of `bench_alfworld_training`. Needs trl, datasets, accelerate and vllm.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.alfworld_tables import REACHED
from benchmarks.arguments import Parser
from benchmarks.bench_alfworld_training import memory, panel_figures, reached
from benchmarks.rollout_setting import Lockstep
from manus_fast.agent.trajectory import Row, build_rows
from manus_fast.commands.common import find_config, prepare
from manus_fast.envs.base import Environment, Task
from manus_fast.evaluate import evaluate, make_panel
from manus_fast.learn.schedules import schedule
from manus_fast.player import Player, make_environment
from manus_fast.rewards.episode import EpisodeRewards
from manus_fast.rollout.engine import Completion, Request
from manus_fast.rollout.seeds import derive
from manus_fast.run_config import Config
from manus_fast.versions import git_commit, versions

FILE = "alfworld_trl.json"


class BatchEngine:
    """The contract of engines over a call that answers a batch of prompts at once, as TRL's `generate` does.

    Args:
        generate: prompts (lists of ids), tokens a reply and temperature → ids and log-probabilities of each reply.
        end_ids: of a reply that ended by itself.
        max_length: tokens of a prompt and its reply together.
    """

    def __init__(self, generate: Callable[..., Any], end_ids: Sequence[int], max_length: int):
        self._generate, self._ends, self.max_length = generate, frozenset(end_ids), max_length
        self.version = 0
        self.seconds = 0.0
        """Spent in `generate`."""
        self._waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def poll(self, timeout: float) -> list[Completion]:
        """Answers everything that waits, in one call."""
        asked, self._waiting = self._waiting, []
        if not asked:
            return []
        began = time.monotonic()
        prompts = [request.prompt_ids.tolist() for request in asked]
        replies = self._generate(prompts, max(r.max_tokens for r in asked), asked[0].temperature)
        self.seconds += time.monotonic() - began
        completions = []
        for request, (ids, log_probs) in zip(asked, replies, strict=True):
            ids, log_probs = ids[: request.max_tokens], log_probs[: request.max_tokens]
            reason = "stop" if ids and ids[-1] in self._ends else "length"
            found = (np.asarray(ids, np.int32), np.asarray(log_probs, np.float32))
            completions.append(Completion(request.id, *found, reason, self.version))
        return completions

    def abort(self, id: int) -> None:
        self._waiting = [request for request in self._waiting if request.id != id]

    def end_session(self, session: int) -> None:
        """Nothing to do."""

    def forget(self) -> None:
        """What TRL's engine caches stays: it begins every iteration with new weights."""

    def wake(self) -> None:
        """Nothing to do."""

    def load(self, tensors: Any, version: int) -> None:
        """TRL hands its weights over by itself."""
        self.version = version


def trl_fields(rows: Sequence[Row], rewards: Sequence[float]) -> dict[str, list[Any]]:
    """What `rollout_func` has to return: each episode's ids up to its first sampled token, and from there on.

    Raises:
        ValueError: an episode that is not one row.
    """
    if [row.episode for row in rows] != list(range(len(rewards))):
        raise ValueError(f"rows: expected one for each of {len(rewards)} episodes, got {len(rows)}")
    fields: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    for row in rows:
        sampled = np.flatnonzero(row.loss_mask)
        first, end = sampled[0], sampled[-1] + 1
        fields["prompt_ids"].append(row.token_ids[:first].tolist())
        fields["completion_ids"].append(row.token_ids[first:end].tolist())
        fields["logprobs"].append(row.log_prob[first:end].tolist())
        fields["env_mask"].append(row.loss_mask[first:end].astype(int).tolist())
    return fields | {"episode_reward": list(rewards)}


class Peer:
    """TRL's trainer over our worlds, and what it took."""

    def __init__(self, config: Config, environment: Environment, seconds: float):
        self.config, self.environment, self.seconds = config, environment, seconds
        rounds = config.curriculum.resolved()
        self.played_in = make_environment(config, max_steps=rounds[0].max_steps) if rounds else environment
        self.tasks = {task.id: task for task in self.played_in.tasks(config.environment.split)}
        self.rewards = EpisodeRewards(config.rewards, None, None)
        self.player: Player | None = None
        self.began: list[float] = []
        """When each collection began."""
        self.curve: list[dict[str, float]] = []
        self.totals = {"generation": 0.0, "environment": 0.0, "collection": 0.0, "hand_over": 0.0}
        self.sampled = self.played = self.turns = 0

    def prompts(self, count: int) -> list[list[dict[str, str]]]:
        """Of TRL's dataset: each names the task of a group, as the trainer draws them."""
        names, seed = list(self.tasks), self.config.training.seed
        drawn = (names[derive(seed, number) % len(names)] for number in range(count))
        return [[{"role": "user", "content": name}] for name in drawn]

    def open(self, trainer: Any) -> None:
        """Once TRL has its engine: a player that asks it."""
        engine = trainer.vllm_generation

        def generate(prompts: list[list[int]], tokens: int, temperature: float) -> list[tuple[list[int], list[float]]]:
            engine.max_completion_length, engine.temperature = tokens, temperature
            _, ids, log_probs, _ = engine.generate(prompts, None, 1)
            return [(list(i), [x[0] for x in p]) for i, p in zip(ids, log_probs, strict=True)]

        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        batch = BatchEngine(generate, [tokenizer.eos_token_id], self.config.rollout.max_length)
        self.player = Player(self.config, model, tokenizer, self.environment, engine=batch)
        self.player.rollout_kind = Lockstep
        whole = engine.sync_weights

        def sync_weights() -> None:
            began = time.monotonic()
            whole()
            self.totals["hand_over"] += time.monotonic() - began

        engine.sync_weights = sync_weights

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`."""
        self.began.append(time.monotonic())
        if len(self.began) == 2:  # the first iteration warms up
            self.totals = dict.fromkeys(self.totals, 0.0)
            self.sampled = self.played = self.turns = 0
        members = self.config.training.group_size
        tasks = [self.tasks[prompt[-1]["content"]] for prompt in prompts[::members]]
        before = self.player.engine.seconds
        episodes = self.player.collect(tasks, len(self.began) - 1, members, environment=self.played_in)
        self.rewards(episodes)
        stats = self.player.stats
        self.totals["generation"] += self.player.engine.seconds - before
        self.totals["environment"] += stats.env_seconds
        self.totals["collection"] += time.monotonic() - self.began[-1]
        self.sampled += stats.sampled_tokens
        self.played += len(episodes)
        self.turns += stats.turns
        found = {"success": float(np.mean([e.success for e in episodes])), "turns": stats.turns / len(episodes)}
        self.curve.append({"seconds": time.monotonic() - self.began[0], "tokens": self.sampled, **found})
        print(f"[{self.curve[-1]['seconds']:6.1f} s] {json.dumps(found)}", flush=True)
        return trl_fields(build_rows(episodes), [e.reward for e in episodes])

    @property
    def over(self) -> bool:
        """Whether the window has passed, seen from the end of an update."""
        return len(self.began) > 1 and time.monotonic() - self.began[1] >= self.seconds

    def figures(self, ended: float) -> dict[str, Any]:
        """Shares and rates of the window, from the second collection to `ended`."""
        spent = ended - self.began[1]
        shares = {name: self.totals[name] / spent for name in ("generation", "environment", "hand_over")}
        shares["other"] = self.totals["collection"] / spent - shares["generation"] - shares["environment"]
        shares["update"] = 1.0 - sum(shares.values())
        return {
            "algorithm": "grpo",
            "variant": "TRL",
            "iterations": len(self.began) - 1,
            "episodes": self.played,
            "steps": self.turns,
            "tokens": self.sampled,
            "seconds": spent,
            "shares": shares,
            "idle_share": shares["environment"] + shares["other"],
            "trajectories_per_hour": 3600 * self.played / spent,
            "sampled_tokens_per_s": self.sampled / self.totals["generation"],
            "rollout_tokens_per_s": self.sampled / self.totals["collection"],
            "hand_over_ms": 1e3 * self.totals["hand_over"] / (len(self.began) - 1),
            "seconds_to": {str(REACHED): reached(self.curve, REACHED)},
            "curve": self.curve,
            **memory(),
        }


def arguments_of(config: Config, out: Path, rows: int) -> Any:
    """TRL's GRPOConfig with the settings of ours; `rows` is a micro-batch."""
    from trl import GRPOConfig

    ppo, rollout, training = config.ppo, config.rollout, config.training
    cuda = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(out),
        learning_rate=schedule(training.learning_rate, "training.learning_rate").start,
        lr_scheduler_type="constant",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=ppo.batch_size // rows,
        steps_per_generation=training.num_rollouts // rows,
        num_generations=training.group_size,
        max_completion_length=rollout.max_length,
        temperature=rollout.temperature,
        beta=0.0,
        epsilon=ppo.clip_range,
        epsilon_high=ppo.clip_range_high or ppo.clip_range,
        loss_type="grpo",
        scale_rewards="group" if ppo.group_std else "none",
        max_grad_norm=ppo.max_grad_norm,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=rollout.max_length,
        vllm_gpu_memory_utilization=0.3,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        max_steps=1_000_000,
        logging_steps=1_000_000,
        save_strategy="no",
        report_to="none",
        seed=training.seed,
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = Parser("trl", __doc__)
    parser.add_argument("--config", default="alfworld_h200", help="a YAML file, or the name of a shipped one")
    parser.add_argument("--data", help="folder of the games")
    parser.add_argument("--model", required=True, help="folder of the policy to begin with")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seconds", type=float, default=90.0, help="the window, from the second collection on")
    parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch, padded to the longest")
    parser.add_argument("--tasks", type=int, help="so many of the panel, spread; default: all")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of the config")
    given = parser.parse_args(argv)
    prepare()
    import pyarrow
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer
    from trl import __version__ as trl_version

    own = ["algorithm=grpo", f"model.path={given.model}", f"training.output_dir={given.out}"]
    own += [f"environment.options.data_path={given.data}"] if given.data else []
    config = Config.load(find_config(given.config, given.config), [*own, *given.overrides])
    environment = make_environment(config)
    peer = Peer(config, environment, given.seconds)

    class Window(TrainerCallback):
        """Ends the run once the window has passed."""

        def on_step_end(self, args, state, control, **_):
            per_collection = config.training.num_rollouts // config.ppo.batch_size
            if state.global_step % per_collection == 0 and peer.over:
                control.should_training_stop = True

    def reward(prompts, completions, episode_reward, **_):
        return episode_reward

    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=reward,
        args=arguments_of(config, given.out, given.rows),
        # With a name of its own: datasets cannot hash tables of every version of pyarrow.
        train_dataset=Dataset(pyarrow.table({"prompt": peer.prompts(100_000)}), fingerprint="tasks"),
        rollout_func=peer.rollout,
        callbacks=[Window()],
    )
    peer.open(trainer)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found = peer.figures(time.monotonic())
    record = {
        "schema": 1,
        "command": f"python -m benchmarks.bench_trl --seconds {given.seconds:g}",
        "commit": git_commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {name: v for name, v in versions().items() if v is not None} | {"trl": trl_version},
        "parts": {"trl": found},
    }
    file = given.out / FILE
    file.write_text(json.dumps(record, indent=1) + "\n")
    trainer.vllm_generation.sync_weights()
    panel = make_panel(environment, "valid_unseen", given.tasks)

    def play(tasks: Sequence[Task]) -> Any:
        return peer.player.play(tasks, 0.0)

    began = time.monotonic()
    report = evaluate(panel, play, "trl")
    found["panel"] = panel_figures(report, time.monotonic() - began)
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"trl: {found['trajectories_per_hour']:,.0f} trajectories an hour, panel {found['panel']['success']:.3f}")
    return record


if __name__ == "__main__":
    main()

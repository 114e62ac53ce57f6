"""The main job in a few minutes on a CPU: make a small policy, imitate an expert, improve by PPO, measure.

manus-fast demo                     # SFT, PPO, evaluation before and after
manus-fast demo --control           # and a control that goes on with SFT for PPO's wall time
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manus_fast.agent.protocol import Protocol
from manus_fast.data.demonstrations import demonstrate
from manus_fast.envs.base import Environment
from manus_fast.evaluate import Report, evaluate, make_panel
from manus_fast.finetune import FineTune, training_tasks
from manus_fast.learn.schedules import Schedule
from manus_fast.modeling.load import load_model
from manus_fast.modeling.tiny import make_policy
from manus_fast.player import Player, make_environment
from manus_fast.run_config import Config
from manus_fast.run_folder import Lock, prepare_folder
from manus_fast.tracking import METRICS_FILE, read_metrics
from manus_fast.trainer import Trainer

# Layers, width and heads of the small policy, and the scale of its initial weights.
SHAPE = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 1, "intermediate": 256, "initializer_range": 0.04}


@dataclass
class Stage:
    """A trained policy: where it is, how long its training took, and how it does on the panel."""

    name: str
    folder: Path
    seconds: float
    report: Report


class Demo:
    """The stages of one seed's demo, each in a folder of its own under `folder`.

    Args:
        config_file: a YAML of this schema (configs/demo_household.yaml, configs/demo_webshop.yaml).
        folder: made when missing.
        seed: of the initial weights, the demonstrations, and all sampling.
        overrides: dotted overrides of the config.
        shape: of the policy, over SHAPE.
    """

    def __init__(
        self,
        config_file: Path,
        folder: str | Path,
        seed: int = 0,
        overrides: Sequence[str] = (),
        shape: Mapping[str, float] | None = None,
    ):
        self.root = prepare_folder(folder)
        self._file, self._seed, self._overrides, self._shape = config_file, seed, overrides, shape
        self.environment = make_environment(self.config("untrained"))

    def config(self, stage: str, start: str = "untrained") -> Config:
        """The config of a stage that begins with the policy in the folder `start`."""
        model = self.root / start if start == "untrained" else self.root / start / "model"
        own = (f"training.seed={self._seed}", f"training.output_dir={self.root / stage}", f"model.path={model}")
        return Config.load(self._file, (*own, *self._overrides))

    def imitate(self) -> Stage:
        """A new policy imitates the expert. Whatever an earlier demo left in the folder goes."""
        for name in ("untrained", "sft", "ppo", "control"):
            self._empty(name)
        config = self.config("sft")
        make_small_policy(config, self.environment, self.root / "untrained", self._seed, self._shape)
        began = time.monotonic()
        FineTune(config, environment=self.environment).run()
        return self._measure("SFT", "sft", time.monotonic() - began)

    def improve(self) -> Stage:
        """The imitating policy goes on with PPO, in place of an earlier one that did."""
        self._empty("ppo")
        began = time.monotonic()
        Trainer(self.config("ppo", "sft"), environment=self.environment).run()
        return self._measure("PPO", "ppo", time.monotonic() - began)

    def imitate_on(self, seconds: float) -> Stage:
        """The control: the imitating policy goes on with SFT for `seconds`, at the learning rate where it had stopped.

        It is measured at its best check, of which its start is the first: going on may be of no use, but does no harm.
        """
        self._empty("control")
        began = time.monotonic()
        config = self.config("control", "sft")
        *_, last = (row for row in read_metrics(self.root / "sft" / METRICS_FILE) if "sft/learning_rate" in row)
        # Enough epochs that only the time ends it: the warm-up is a share of them.
        rate = Schedule(last["sft/learning_rate"], warmup=0.002)
        more = {"epochs": 1000, "patience": None, "stop_at": None, "time_limit": seconds, "learning_rate": rate}
        more["check_start"] = True
        config.sft = dataclasses.replace(config.sft, **more)
        FineTune(config, environment=self.environment).run()
        return self._measure("SFT continued", "control", time.monotonic() - began)

    def _empty(self, stage: str) -> None:
        shutil.rmtree(self.root / stage, ignore_errors=True)

    def _measure(self, name: str, stage: str, seconds: float) -> Stage:
        folder = self.root / stage
        return Stage(name, folder, seconds, measured(self.config(stage), folder / "model", self.environment))


def run(
    config_file: Path,
    folder: str | Path,
    *,
    seed: int = 0,
    control: bool = False,
    overrides: Sequence[str] = (),
    shape: Mapping[str, float] | None = None,
) -> list[Stage]:
    """Trains and measures; everything is written under `folder`.

    Args:
        config_file: a YAML of this schema (configs/demo_household.yaml, configs/demo_webshop.yaml).
        folder: made when missing; an earlier demo in it is replaced.
        seed: of the initial weights, the demonstrations, and all sampling.
        control: add a policy that goes on with SFT for as long as PPO took.
        overrides: dotted overrides of the config.
        shape: of the policy, over SHAPE.

    Returns:
        The stages "SFT", "PPO" and, with control, "SFT continued", each measured on all of the environment's last
        split (household: valid_unseen, webshop: test).
    """
    demo = Demo(config_file, folder, seed, overrides, shape)
    lock = Lock(demo.root)  # before the earlier demo goes, which may not be over
    stages = [demo.imitate(), demo.improve()]
    if control:
        stages.append(demo.imitate_on(stages[-1].seconds))
    lock.release()
    return stages


def measured(config: Config, model: Path, environment: Environment) -> Report:
    """A model's report on every task of the environment's last split, at the config's evaluation temperature."""
    net, tokenizer = load_model(model)
    player = Player(config, net, tokenizer, environment)
    panel = make_panel(environment, environment.splits[-1])
    report = evaluate(panel, lambda tasks: player.play(tasks, config.evaluation.temperature), model.parent.name)
    report.settings = {"temperature": config.evaluation.temperature, **getattr(environment, "settings", {})}
    report.save(model.parent / "eval_unseen.json")
    return report


def make_small_policy(
    config: Config,
    environment: Environment,
    folder: str | Path,
    seed: int = 0,
    shape: Mapping[str, float] | None = None,
) -> Path:
    """Writes an untrained policy whose vocabulary is what experts of the training split see and say.

    Args:
        config: its agent, data and rollout.max_length are used.
        environment: one with an expert.
        folder: new or empty.
        seed: of the weights; the vocabulary does not depend on it.
        shape: of the policy, over SHAPE.
    """
    protocol = Protocol(config.agent.style, config.agent.show_admissible)
    instructions = config.agent.instructions
    texts = [protocol.system_prompt(environment.instructions if instructions is None else instructions)]
    texts.append("Nothing happens.")
    split = environment.tasks("train")
    tasks = training_tasks(split, min(4000, len(split)), seed=0)
    for episode in demonstrate(environment, tasks, [0] * len(tasks), config.data.expert):
        for step in episode.steps:
            texts += (step.observation, protocol.render(step.thought, step.action))
    return make_policy(folder, texts, seed=seed, max_length=config.rollout.max_length, **{**SHAPE, **(shape or {})})

"""DPO on the policy's own episodes: play training tasks → pairs → DPO → measure, round after round.

config = Config.load("configs/dpo_household.yaml", ["model.path=runs/sft/model", "dpo.rounds=2"])
for done in PreferenceRounds(config).rounds():
    print(done.number, done.pairs, done.before, done.success, done.kept)

Pairs of a fixed set grow stale as the policy moves off what sampled them; here each round's come from the policy as it
is, and its reference is the policy as the round began (Xu et al., "Some things are more CRINGE than others", 2023;
Xiong et al., "Iterative Preference Learning from Human Feedback", ICML 2024). A round after which the evaluation panel
is played worse than before is taken back, and the next one plays other tasks.

A round leaves a folder `round<n>` with its pairs and the training's own records; after it comes a checkpoint, from
which `training.resume=true` goes on. A round that was cut off goes on from its pairs, where those were all written.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manus_fast.data.preferences import Preference, fingerprint, load_preferences, save_preferences
from manus_fast.data.rollout_pairs import episode_pairs
from manus_fast.envs.base import Environment
from manus_fast.files import write_text
from manus_fast.finetune import warn_of_skipped
from manus_fast.preference import PreferenceTune
from manus_fast.rounds import RoundsRun
from manus_fast.run_config import Config
from manus_fast.run_folder import prepare_folder

# Keeps the tasks and seeds of these rounds apart from those of demonstrations and of search.
_PLAY = 1 << 42


@dataclass
class PreferenceRound:
    """What one round did."""

    number: int
    """From 1."""
    episodes: int
    sampled_success: float
    """Of these episodes, which play at rollout.temperature."""
    pairs: int
    dpo_steps: int
    before: float
    """Success on the evaluation panel as the round began."""
    success: float
    """After its training."""
    kept: bool
    """Whether that is no less, so that the next round begins from it."""
    play_seconds: float
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Named figures for tracking."""
        return {
            "train/success": self.sampled_success,
            "dpo/pairs": self.pairs,
            "dpo/steps": self.dpo_steps,
            "eval/success": self.success if self.kept else self.before,
            "eval/trained_success": self.success,
            "eval/kept": float(self.kept),
            "time/play_seconds": self.play_seconds,
            "time/seconds": self.seconds,
        }


class PreferenceRounds(RoundsRun[PreferenceRound]):
    """One run, in one process.

    Args:
        config: besides what `RoundsRun` uses, its dpo and rollout blocks; `dpo.rounds` is set, `data.name` is not.
        model, tokenizer, environment: as `RoundsRun` takes them.

    Raises:
        ValueError: whatever in the config cannot be served, before anything is played.
    """

    block, record, salt = "dpo", PreferenceRound, _PLAY

    def __init__(
        self, config: Config, model: Any = None, tokenizer: Any = None, environment: Environment | None = None
    ):
        self.settings = config.dpo
        if self.settings.rounds is None:
            raise ValueError("dpo.rounds: expected an integer >= 1 to play for pairs, got null")
        if config.data.name is not None:
            raise ValueError(
                f"data.name: expected null with dpo.rounds, whose pairs are the policy's own, got {config.data.name!r}"
            )
        super().__init__(config, self.settings.rounds, self.settings.tasks, model, tokenizer, environment)

    def _round(self, number: int) -> PreferenceRound:
        began = time.perf_counter()
        folder = prepare_folder(self._folder(number))
        if self.report is None:
            self.report = self.evaluate()
        before = self.report
        played, pairs = self._pairs(number, folder)
        if not pairs:
            raise ValueError(
                f"dpo.tasks: expected at least one task with a success and a failure, got none of {self.settings.tasks}"
            )
        # The panel has just been played as the round begins.
        dpo, training = dataclasses.replace(self.config.dpo, check_start=False), self.config.training
        if len(pairs) < dpo.batch_size:  # how many there will be is not known beforehand
            dpo = dataclasses.replace(dpo, batch_size=len(pairs))
            training = dataclasses.replace(training, gradient_accumulation_steps=1)
        start = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        own = self._own(number, training, dpo=dpo)
        tune = PreferenceTune(own, self.model, self.tokenizer, self.environment, self.player.engine)
        tuned = tune.run(pairs)
        self._merge()
        self.player = tune.player
        rates = [report.summary.success.rate for report in (before, tuned.report)]
        kept = rates[1] >= rates[0]
        if not kept:
            self.model.load_state_dict(start)
        self.report = tuned.report if kept else before
        self.player.load(self.model.named_parameters(), self.player.engine.version + 1)
        return PreferenceRound(
            number=number,
            episodes=played["episodes"],
            sampled_success=played["success"],
            pairs=len(pairs),
            dpo_steps=tuned.result.steps,
            before=rates[0],
            success=rates[1],
            kept=kept,
            play_seconds=played["seconds"],
            seconds=round(time.perf_counter() - began, 1),
        )

    def _pairs(self, number: int, folder: Path) -> tuple[dict[str, Any], list[Preference]]:
        """Plays a round's tasks and writes the pairs; `played.json` comes last and says that they are whole."""
        record, file = folder / "played.json", folder / "preferences.jsonl"
        if not (self.config.training.resume and record.is_file()):
            record.unlink(missing_ok=True)
            began = time.perf_counter()
            episodes = self.player.collect(self.tasks_of(number), number - 1, self.settings.members)
            dropped: Counter[str] = Counter()
            pairs = episode_pairs(
                [episode for episode in episodes if episode.valid and episode.sampled_tokens],
                fingerprint(self.tokenizer),
                per_task=self.settings.per_task,
                seed=self.config.training.seed,
                dropped=dropped,
            )
            save_preferences(pairs, file)
            found = {
                "episodes": len(episodes),
                "failed": sum(not episode.valid for episode in episodes),
                "success": sum(episode.success for episode in episodes) / len(episodes),
                "seconds": round(time.perf_counter() - began, 1),
                "pairs": len(pairs),
                "dropped": dict(dropped),
            }
            write_text(record, json.dumps(found) + "\n")
        dropped = Counter()
        pairs = list(load_preferences(str(file), dropped))
        warn_of_skipped(dropped)
        return json.loads(record.read_text()), pairs

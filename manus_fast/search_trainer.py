"""Policy-gradient training on what search found: search → siblings against each other → update → evaluate → save.

config = Config.load("configs/expert_household.yaml", ["algorithm=grpo", "training.collect=search", …])
make_trainer(config).run()

An iteration searches `num_rollouts / group_size` tasks. The proposals that were sampled and played at one node are a
group: one prompt, one situation, different actions, each worth the best return that search found beneath it
(`search.targets.sibling_episodes`). Everything else is the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manus_fast.agent.trajectory import Trajectory
from manus_fast.envs.base import Task
from manus_fast.learn.advantages import GROUP_KINDS
from manus_fast.learn.curriculum import Curriculum
from manus_fast.learn.filters import Selection
from manus_fast.ranks import connect
from manus_fast.rewards.shaping import TURN_PARTS
from manus_fast.rollout.scheduler import RolloutStats
from manus_fast.rollout.seeds import derive
from manus_fast.run_config import Config
from manus_fast.search.base import Tree
from manus_fast.search.targets import sibling_episodes
from manus_fast.trainer import Trainer


def make_trainer(config: Config, *arguments: Any, **options: Any) -> Trainer:
    """The trainer that `training.collect` asks for; arguments are those of `Trainer`."""
    kind = SearchTrainer if config.training.collect == "search" else Trainer
    return kind(config, *arguments, **options)


class SearchTrainer(Trainer):
    """See the module's docstring; arguments are those of `Trainer`.

    `train/…` figures are of the episodes that the searches play (`train/success`: tasks that search solved), the
    counters of all turns and tokens that searching took.

    Raises:
        ValueError: besides what `Trainer` refuses, an advantage without groups, rewards of whole episodes, a
            curriculum, dynamic sampling, values from a model, or proposals of another temperature than the update's,
            or several ranks.
    """

    collects = "search"

    def __init__(self, config: Config, *arguments: Any, **options: Any):
        _check(config)
        ranks = connect().size
        if ranks > 1:
            raise ValueError(f"training.collect: expected rollout with {ranks} ranks, got 'search'")
        self.trees: list[Tree] = []
        """Of the latest iteration."""
        super().__init__(config, *arguments, **options)

    def play(self, tasks: Sequence[Task], first: int) -> list[Trajectory]:
        """Siblings of the tasks' trees, a group a node."""
        with self.phases("search"):
            self.trees = self.player.search(tasks, derive(self.config.training.seed, self.counters.iteration))
        stats = self.player.search_stats
        self.player.stats = RolloutStats(
            sampled_tokens=stats.tokens, seconds=stats.seconds, engine_seconds=stats.engine_seconds
        )
        return sibling_episodes(self.trees)

    def count(self, trajectories: Sequence[Trajectory]) -> None:
        """Adds what was searched to the counters."""
        stats, counters = self.player.search_stats, self.counters
        counters.steps += stats.steps
        counters.episodes += len(self.trees)
        counters.tokens += stats.tokens
        counters.failed += sum(tree.error is not None for tree in self.trees)

    def describe(self, played: Selection) -> tuple[list[Trajectory], dict[str, float]]:
        """The episodes that the searches play, and figures of the searches."""
        siblings = played.trajectories
        figures = {
            "search/siblings": float(len(siblings)),
            "search/groups": float(len({sibling.group for sibling in siblings})),
            "search/solved_rate": sum(tree.solution is not None for tree in self.trees) / max(1, len(self.trees)),
            **self.player.search_stats.metrics(),
        }
        name = self.environment.name
        return [tree.trajectory(env=name) for tree in self.trees], figures


def _check(config: Config) -> None:
    ppo, search, ranks = config.ppo, config.search, connect().size
    temperature = config.rollout.temperature
    stages = len(Curriculum(config.curriculum).stages)
    whole = sorted(set(config.rewards) - set(TURN_PARTS))
    for name, wrong, expected, got in (
        ("ppo.advantage", ppo.advantage not in GROUP_KINDS, f"one of {', '.join(GROUP_KINDS)}", repr(ppo.advantage)),
        ("ppo.dynamic_sampling", ppo.dynamic_sampling, "false", "true"),
        ("ppo.overlong_buffer", ppo.overlong_buffer > 0, "0", f"{ppo.overlong_buffer}"),
        ("rewards", bool(whole), "parts of turns alone", ", ".join(whole)),
        ("curriculum", stages > 0, "no stages", f"{stages}"),
        ("ranks", ranks > 1, "one process", f"{ranks}"),
        ("search.strategy", search.strategy == "greedy", "one that samples", "'greedy'"),
        ("search.value", search.value == "model", "reward, rollout or verbal", "'model'"),
        (
            "search.temperature",
            search.temperature not in (None, temperature),
            f"rollout.temperature ({temperature}) or null",
            f"{search.temperature}",
        ),
    ):
        if wrong:
            raise ValueError(f"{name}: expected {expected} with training.collect search, got {got}")

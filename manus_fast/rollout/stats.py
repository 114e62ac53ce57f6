"""What a collection of episodes took, in counts and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class RolloutStats:
    """What one `collect` took and met. Counts are of episodes unless the name says otherwise."""

    episodes: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """Tokens sent as prompts, counted anew each turn."""
    seconds: float = 0.0
    engine_seconds: float = 0.0
    """Time inside `engine.poll` while the engine had requests."""
    idle_seconds: float = 0.0
    """Time in which the engine had no request."""
    env_seconds: float = 0.0
    """Time inside `envs.poll`."""
    truncated: int = 0
    invalid: int = 0
    """Masked, never a reward of zero: given up after a second failure, with tokens older than the staleness allows
    (`too_old`), or with a first prompt that the engine cannot hold."""
    failed: int = 0
    """Failures of an environment or the engine, attempts that were repeated included."""
    retried: int = 0
    cut_turns: int = 0
    """Turns that a token limit ended."""
    carried: int = 0
    """Begun by an earlier call, under earlier weights."""
    too_old: int = 0
    """Given up because a token lags more versions behind than `rollout.staleness`: masked."""
    dropped: int = 0
    """Begun ahead by an earlier call, and neither asked for by this one nor ahead of it: given up, and counted by the
    call that gave them up. Their slots are free at once, or when their world has answered."""
    given_tokens: int = 0
    """Sampled tokens of the episodes that were given back; `sampled_tokens` are those that the call sampled."""
    stale_tokens: int = 0
    """Of these, sampled by an earlier version than the present one."""

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """Of two calls together: everything is a sum."""
        return RolloutStats(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    @classmethod
    def joined(cls, parts: Sequence[RolloutStats]) -> RolloutStats:
        """Of collections made at the same time: counts added, the longest time, the mean of other times."""
        total = cls()
        for name, default in vars(cls()).items():
            values = [getattr(part, name) for part in parts]
            joined = sum(values) if isinstance(default, int) else sum(values) / len(values)
            setattr(total, name, max(values) if name == "seconds" else joined)
        return total

    @property
    def tokens_per_second(self) -> float:
        return self.sampled_tokens / self.seconds if self.seconds else 0.0

    def metrics(self) -> dict[str, float]:
        """Named figures for tracking."""
        numbers = {f"rollout/{name}": float(value) for name, value in vars(self).items()}
        numbers["rollout/stale_share"] = self.stale_tokens / max(1, self.given_tokens)
        numbers |= {"rollout/idle_share": self.idle_share, "rollout/host_share": self.host_share}
        return {**numbers, "rollout/tokens_per_second": self.tokens_per_second}

    @property
    def idle_share(self) -> float:
        """Share of the time in which the engine had no request at all."""
        return self.idle_seconds / self.seconds if self.seconds else 0.0

    @property
    def host_share(self) -> float:
        """Share of the time outside the engine's `poll`: worlds, prompts, parsing. An engine that has its next step
        under way already (vLLM on a GPU) computes meanwhile."""
        return 1.0 - self.engine_seconds / self.seconds if self.seconds else 0.0

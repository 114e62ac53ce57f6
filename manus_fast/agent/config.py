"""Config of the agent: how it talks and how much of an episode it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class AgentConfig:
    """The config's `agent` block.

    Raises:
        ValueError: a window below 1.
    """

    context: Literal["full", "window"] = "full"
    """full: every prompt holds the whole episode; window: the head and the last `window` turns."""
    window: int = 8
    """Turns that a `window` context shows."""
    style: Literal["react", "tags", "act"] = "react"
    """react: Think:/Act: lines; tags: <think>/<act>; act: no thought."""
    instructions: str | None = None
    """What the system prompt says before the reply format; null: the environment's own instructions."""
    show_admissible: bool = False
    """List the admissible actions under each observation."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"agent.window: expected an integer >= 1, got {self.window}")

"""Episodes as lists of turns, and the rows of tokens that a model is trained on.

Token in, token out: a turn keeps the ids that were sent to the engine and the ids that were sampled, and rows are
built from those alone. Nothing is decoded and encoded again, so what was sampled is what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SCHEMA = "manus_fast.trajectory.v1"


@dataclass
class Turn:
    """One reply of the agent and what came of it."""

    prompt_ids: np.ndarray
    """int32 [P]: everything that was sent to the engine for this turn."""
    ids: np.ndarray
    """int32 [S]: what was sampled, the end token included."""
    log_probs: np.ndarray
    """float32 [S]: log-probabilities of `ids` under the sampling policy (temperature applied)."""
    finish_reason: str
    """stop | length | abort | error."""
    observation: str = ""
    """What the agent saw before this reply (without prompt decoration): the anchor of GiGPO's step groups."""
    version: int = 0
    """Policy version that sampled the first of `ids`."""
    versions: np.ndarray | None = None
    """int32 [S]: the version of each of them, where they differ; None: all of `version`."""
    text: str = ""
    thought: str = ""
    action: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    format_ok: bool = True
    admissible: bool = True
    value: float | None = None
    advantage: float | None = None
    node_id: int | None = None
    """Node of a search tree that this turn belongs to; shared prefixes carry equal ids."""
    messages: list[dict[str, str]] | None = None
    """Of a reply that came as text: the messages that its prompt showed for the first time. None: ids tell it all."""
    tokens: int | None = None
    """Sampled tokens of such a reply, as the endpoint counted them."""

    @property
    def sampled_tokens(self) -> int:
        return len(self.ids) if self.tokens is None else self.tokens

    def tokens_before(self, version: int) -> int:
        """How many of the ids an earlier policy version sampled."""
        if self.versions is not None:
            return int((self.versions < version).sum())
        return len(self.ids) if self.version < version else 0

    @property
    def reply(self) -> np.ndarray | str:
        """The reply as the engine gave it: ids, or text."""
        return self.ids if self.messages is None else self.text


@dataclass
class Trajectory:
    """One episode. `valid` is False when the environment or the engine failed: it is counted, and kept out of
    statistics and loss."""

    id: str
    env: str
    task: str
    task_type: str
    split: str
    seed: int
    group: int
    member: int
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    score: float | None = None
    """What the environment itself gives the episode as it stands; None: it knows success alone."""
    terminated: bool = False
    truncated: bool = False
    error: str | None = None
    final_observation: str = ""

    @property
    def valid(self) -> bool:
        return self.error is None

    @property
    def reward(self) -> float:
        """Undiscounted sum of turn rewards; nan for an invalid episode."""
        return math.nan if self.error is not None else float(sum(turn.reward for turn in self.turns))

    @property
    def reward_parts(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for turn in self.turns:
            for name, value in turn.reward_parts.items():
                total[name] = total.get(name, 0.0) + value
        return total

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.sampled_tokens for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """The record of trajectories.jsonl (CONTRACTS: Files)."""
        turns = []
        for turn in self.turns:
            record = dict(turn.__dict__)
            for name in ("prompt_ids", "ids"):
                record[name] = [int(i) for i in record[name]]
            record["log_probs"] = [round(float(x), 6) for x in record["log_probs"]]
            record["versions"] = None if turn.versions is None else turn.versions.tolist()
            turns.append(record)
        return {
            "schema": SCHEMA,
            "id": self.id,
            "env": self.env,
            "task": self.task,
            "task_type": self.task_type,
            "split": self.split,
            "seed": self.seed,
            "group": self.group,
            "member": self.member,
            "valid": self.valid,
            "success": self.success,
            "score": self.score,
            "reward": None if self.error is not None else self.reward,
            "reward_parts": self.reward_parts,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "error": self.error,
            "final_observation": self.final_observation,
            "turns": turns,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Trajectory:
        """Reads what `to_json` wrote. Raises ValueError on another schema."""
        if record.get("schema") != SCHEMA:
            raise ValueError(f"trajectory.schema: expected {SCHEMA!r}, got {record.get('schema')!r}")
        turns = []
        for item in record["turns"]:
            item = dict(item)
            item["prompt_ids"] = np.asarray(item["prompt_ids"], np.int32)
            item["ids"] = np.asarray(item["ids"], np.int32)
            item["log_probs"] = np.asarray(item["log_probs"], np.float32)
            if item.get("versions") is not None:
                item["versions"] = np.asarray(item["versions"], np.int32)
            turns.append(Turn(**item))
        derived = {"schema", "valid", "reward", "reward_parts", "turns"}
        return cls(turns=turns, **{k: v for k, v in record.items() if k not in derived})


@dataclass
class Row:
    """One sequence that a model scores. Entry t of every array describes token t, predicted from position t-1;
    entry 0 is 0 / False."""

    token_ids: np.ndarray
    """int64 [T]."""
    loss_mask: np.ndarray
    """bool [T]: True on sampled tokens only."""
    turn_id: np.ndarray
    """int32 [T]: index of the turn within the episode, -1 off turns."""
    log_prob: np.ndarray
    """float32 [T]: sampled log-probabilities, 0 where the mask is False."""
    reward: np.ndarray
    """float32 [T]: rewards, each on the last trainable token of its turn."""
    episode: int
    """Index of the episode in the list that the rows were built from."""
    terminated: bool = True
    """False when the row was cut by a limit: V after its last token may be bootstrapped."""
    group: int | None = None
    """Of the episode: rows of one group are likely to begin alike. None: the row is a group of its own."""

    def __len__(self) -> int:
        return len(self.token_ids)


def build_rows(trajectories: Sequence[Trajectory]) -> list[Row]:
    """Rows of all valid episodes, in order.

    Consecutive turns share a row as long as the next prompt starts with the previous prompt plus its sampled ids;
    where that fails (a window, a summary, a template that rewrites history) the row forks and a new one starts.
    Turns without sampled tokens contribute nothing; their reward moves to the previous sampled token.
    """
    rows: list[Row] = []
    for index, trajectory in enumerate(trajectories):
        if not trajectory.valid:
            continue
        chain: list[tuple[int, Turn]] = []
        parts: list[list[tuple[int, Turn]]] = []
        history: np.ndarray | None = None
        carried: dict[int, float] = {}
        last_trainable: int | None = None
        for number, turn in enumerate(trajectory.turns):
            if len(turn.ids) == 0:
                if last_trainable is not None:
                    carried[last_trainable] = carried.get(last_trainable, 0.0) + turn.reward
                continue
            last_trainable = number
            extends = (
                history is not None
                and len(turn.prompt_ids) >= len(history)
                and np.array_equal(turn.prompt_ids[: len(history)], history)
            )
            if not extends:
                chain = []
                parts.append(chain)
            chain.append((number, turn))
            history = np.concatenate([turn.prompt_ids, turn.ids])
        for position, part in enumerate(parts):
            ended = trajectory.terminated if position == len(parts) - 1 else True
            rows.append(_row(part, carried, index, ended, trajectory.group))
    return rows


def _row(part: list[tuple[int, Turn]], carried: dict[int, float], episode: int, terminated: bool, group: int) -> Row:
    last = part[-1][1]
    token_ids = np.concatenate([last.prompt_ids, last.ids]).astype(np.int64)
    length = len(token_ids)
    row = Row(
        token_ids=token_ids,
        loss_mask=np.zeros(length, bool),
        turn_id=np.full(length, -1, np.int32),
        log_prob=np.zeros(length, np.float32),
        reward=np.zeros(length, np.float32),
        episode=episode,
        terminated=terminated,
        group=group,
    )
    for number, turn in part:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.ids)
        row.loss_mask[start:end] = True
        row.turn_id[start:end] = number
        row.log_prob[start:end] = turn.log_probs
        row.reward[end - 1] = turn.reward + carried.get(number, 0.0)
    return row

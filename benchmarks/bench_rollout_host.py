"""Host time of a rollout: what the loop does between an engine's answer and the next request, without an engine.

    python -m benchmarks.bench_rollout_host                              # word tokenizer, household worlds
    python -m benchmarks.bench_rollout_host --tokenizer FOLDER           # a Hugging Face tokenizer, its chat template
    options: --profile (the functions that take longest), --slots N, --episodes N, --ready N, --repeats N

An engine that computes nothing answers the oldest --ready requests of at most --slots at each poll, with a reply in
ReAct form of some 25 tokens; worlds get commands as bench_rollout scripts them. Everything else is the loop's own. The
seconds inside the engine and inside the script are left out.

    turn     microseconds a turn: prompts (chat format, tokenizer), requests, parsing, worlds, rewards
    worlds   the part of it inside the worlds
    rows     rows of the collected episodes and the batch that the update takes, a turn
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import deque

import numpy as np

from benchmarks.arguments import Parser
from benchmarks.rollout_games import Case, Games
from manus_fast.agent.trajectory import build_rows
from manus_fast.data.packing import pack
from manus_fast.rollout.engine import Completion, Request
from manus_fast.rollout.scheduler import Rollout
from manus_fast.rollout.seeds import derive


class Instant:
    """An engine whose replies are there at once, by names: a thought of a few words, then a command."""

    version = 0

    def __init__(self, games: Games, ready: int):
        words = sorted({word for word in games.words if word.isalpha()})
        self.max_length, self._ready = games.case.max_length, ready
        self._replies = []
        for number in range(256):
            drawn = [words[derive(number, n) % len(words)] for n in range(8 + derive(number, 99) % 24)]
            reply = games.chat.reply(games.protocol.render(" ".join(drawn), "go to " + drawn[0] + " 1"))
            self._replies.append((reply, np.full(len(reply), -0.5, np.float32)))
        self._waiting: deque[Request] = deque()

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def poll(self, timeout: float) -> list[Completion]:
        done = []
        for _ in range(min(self._ready, len(self._waiting))):
            request = self._waiting.popleft()
            ids, log_probs = self._replies[request.seed % len(self._replies)]
            ids, log_probs = ids[: request.max_tokens], log_probs[: request.max_tokens]
            reason = "stop" if len(ids) < request.max_tokens else "length"
            done.append(Completion(request.id, ids, log_probs, reason, self.version))
        return done

    def abort(self, id: int) -> None: ...

    def end_session(self, session: int) -> None: ...


def measure(games: Games, ready: int) -> dict[str, float]:
    """Microseconds a turn of one collection, and of its rows; nothing that was said before is remembered."""
    games.chat.forget()
    rollout = games.rollout(Instant(games, ready), Rollout)
    trajectories = rollout.collect(games.specs())
    rollout.envs.close()
    stats = rollout.stats
    begin = time.perf_counter()
    packed = pack(build_rows(trajectories))
    rows = time.perf_counter() - begin
    assert packed.trainable_tokens == stats.sampled_tokens
    spent = stats.seconds - stats.engine_seconds - rollout.envs.script_seconds
    per_turn = 1e6 / stats.turns
    return {
        "turn": spent * per_turn,
        "worlds": (stats.env_seconds - rollout.envs.script_seconds) * per_turn,
        "rows": rows * per_turn,
    }


def main(argv=None) -> dict[str, float]:
    """Runs the benchmark; returns the medians."""
    parser = Parser("rollout_host", __doc__)
    parser.add_argument("--tokenizer")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--ready", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    games = Games(Case(arguments.slots, arguments.episodes, 24, 8192), tokenizer_of(arguments.tokenizer))
    found = [measure(games, arguments.ready) for _ in range(1 + arguments.repeats)][1:]
    figures = {name: float(np.median([one[name] for one in found])) for name in found[0]}
    print(
        ", ".join(f"{name} {value:.1f} µs" for name, value in figures.items()), f"(median of {len(found)})", flush=True
    )
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, games, arguments.ready)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return figures


def tokenizer_of(folder: str | None):
    if folder is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    main()

"""What the terminal shows of a run: a bar with figures and time left, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """What the terminal shows of a run: a bar with figures and time left, or plain lines where there is no terminal.

        with Progress("ppo", total=200_000, unit="steps") as progress:
            progress.update(4_000, reward=0.31, success=0.42, tokens_per_second=5200)

    Args:
        title: what is running.
        total: how much there is to do, in `unit`.
        unit: the word after the count.
        interval: seconds between plain lines.
        terminal: True or False forces one of the two; None asks standard error.
        max_seconds: wall time that ends the run, where something may end it before `total`.
        seconds: how much of it was spent before, by a run that is resumed.
        silent: show nothing: for every rank but the first.
    """

    def __init__(
        self,
        title: str,
        total: int,
        unit: str = "steps",
        interval: float = 10.0,
        terminal: bool | None = None,
        max_seconds: float | None = None,
        seconds: float = 0.0,
        silent: bool = False,
    ):
        self.title, self.total, self.unit, self.interval = title, total, unit, interval
        self.max_seconds, self.seconds = max_seconds, seconds
        self._terminal = not silent and (sys.stderr.isatty() if terminal is None else terminal)
        self._silent = silent
        self._bar: Any = None
        self._task: Any = None
        self._start = self._printed = time.monotonic()
        self._first: int | None = None
        self._counted: float | None = None

    def __enter__(self) -> Progress:
        self._start = self._printed = time.monotonic()
        if self._terminal:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[count]}  {task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(self.title, total=1.0, count="", figures="", left="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, *, spent: float | None = None, **figures: float | str) -> None:
        """Shows `done` of the total; figures named success, *_rate or *_fraction are shown as per cent.

        Args:
            done: in `unit`.
            spent: seconds that count towards `max_seconds`, where not all of this object's life does.
        """
        now = time.monotonic()
        self._counted = spent
        if self._first is None:
            self._first = done  # a resumed run begins beyond 0: its pace counts from here
            self._paced = now
        left = self._left(done, now)
        share = self._share(done, now)
        text = " · ".join(_figure(name, value) for name, value in figures.items())
        timed = self._timed(done, now)
        if self._bar is not None:
            count = f"{done:,} {self.unit}" if timed else f"{done:,}/{self.total:,} {self.unit}"
            self._bar.update(self._task, completed=share, count=count, figures=text, left=left)
        elif share >= 1.0 or now - self._printed >= self.interval:
            self._printed = now
            count = f"{done:,}" if timed else f"{done:,} of {self.total:,}"
            self.say(f"{self.title}: {count} {self.unit}{' · ' if text else ''}{text} · {left}")

    def say(self, line: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._silent:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def _spent(self, now: float) -> float:
        return self.seconds + now - self._start if self._counted is None else self._counted

    def _timed(self, done: int, now: float) -> bool:
        """Whether it is the time that will end the run: then nobody knows how many steps it will have."""
        return self.max_seconds is not None and self._spent(now) / self.max_seconds > done / self.total

    def _share(self, done: int, now: float) -> float:
        return min(1.0, self._spent(now) / self.max_seconds if self._timed(done, now) else done / self.total)

    def _left(self, done: int, now: float) -> str:
        if self._share(done, now) >= 1.0:
            return f"done in {_duration(now - self._start)}"
        if self._timed(done, now):
            return f"{_duration(self.max_seconds - self._spent(now))} left"
        advanced = done - (self._first or 0)
        if advanced <= 0:
            return "time left unknown"
        return f"{_duration((now - self._paced) * (self.total - done) / advanced)} left"


def _figure(name: str, value: float | str) -> str:
    word = name.replace("_", " ")
    if isinstance(value, str):
        return f"{word} {value}"
    if name == "success" or name.endswith(("_rate", "_fraction")):
        return f"{word.removesuffix(' rate').removesuffix(' fraction')} {100 * value:.1f} %"
    if name == "tokens_per_second":
        return f"{value:,.0f} tok/s"
    return f"{word} {value:,.0f}" if abs(value) >= 1000 else f"{word} {value:.3g}"


def _duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

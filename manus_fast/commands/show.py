"""Reports, comparisons and demo stages as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manus_fast.agent.trajectory import Trajectory
    from manus_fast.demo import Stage
    from manus_fast.evaluate import Comparison, Report


def _percent(rate: Any) -> str:
    return f"{100 * rate.rate:.1f} % ({rate.k}/{rate.n}, 95 % {100 * rate.low:.1f} to {100 * rate.high:.1f})"


def report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    summary = report.summary
    table = Table(box=None, show_header=False, title=f"{report.model} on {report.suite}/{report.split}")
    table.add_row("success", _percent(summary.success))
    for kind, rate in summary.per_type.items():
        table.add_row(f"  {kind}", _percent(rate))
    solved = f" (solved tasks {summary.mean_steps_success:.1f})" if summary.success.k else ""
    if any(record.score not in (None, float(bool(record.success))) for record in report.tasks):
        table.add_row("score", f"{summary.score:.4f} (mean, of 1)")
    table.add_row("steps", f"{summary.mean_steps:.1f}{solved}")
    table.add_row("valid actions", f"{100 * summary.valid_action_rate:.1f} %")
    table.add_row("format", f"{100 * summary.format_rate:.1f} %")
    table.add_row("cut by the step limit", f"{100 * summary.truncated_rate:.1f} %")
    table.add_row("sampled tokens", f"{summary.tokens:,} ({summary.mean_tokens:.0f} an episode)")
    if summary.failed:
        table.add_row("failed, left out", str(summary.failed))
    Console().print(table, soft_wrap=True)


def comparison(result: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, title=f"{result.b} against {result.a}")
    table.add_row("tasks", f"{result.tasks}" + (f" ({result.left_out} left out)" if result.left_out else ""))
    table.add_row("success", f"{100 * result.rate_b:.1f} % against {100 * result.rate_a:.1f} %")
    points = [f"{100 * value:+.1f}" for value in (result.difference, result.low, result.high)]
    table.add_row("difference", f"{points[0]} points (95 % {points[1]} to {points[2]})")
    score = result.score
    if (score.a, score.b) != (result.rate_a, result.rate_b):
        interval = f"{score.difference:+.4f} (95 % {score.low:+.4f} to {score.high:+.4f})"
        table.add_row("score", f"{score.b:.4f} against {score.a:.4f}: {interval}")
    table.add_row(
        "solved by both, one, the other, none",
        f"{result.both}, {result.only_b}, {result.only_a}, {result.neither} (McNemar p = {result.p_value:.3g})",
    )
    for kind, (tasks, rate_a, rate_b) in result.per_type.items():
        table.add_row(f"  {kind}", f"{100 * rate_b:.1f} % against {100 * rate_a:.1f} % of {tasks}")
    Console().print(table, soft_wrap=True)


def stages(stages: Sequence[Stage], seconds: float) -> None:
    """The closing table of the demo: each stage's training time and what it does on tasks never seen in training."""
    from rich.console import Console
    from rich.table import Table

    first = stages[0].report
    table = Table(box=None, title=f"{first.suite}/{first.split}, {first.summary.tasks} tasks, each once")
    for name in ("", "trained", "success", "95 % interval", "steps", "valid actions"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for stage in stages:
        summary = stage.report.summary
        rate = summary.success
        table.add_row(
            stage.name,
            f"{stage.seconds:.0f} s",
            f"{100 * rate.rate:.1f} %",
            f"{100 * rate.low:.1f} to {100 * rate.high:.1f}",
            f"{summary.mean_steps:.1f}",
            f"{100 * summary.valid_action_rate:.1f} %",
        )
    console = Console()
    console.print(table)
    for stage in stages:
        console.print(f"{stage.name}: {stage.folder / 'model'}", highlight=False, soft_wrap=True)
    console.print(f"{seconds:.0f} s in all, evaluation and set-up of the policy included")


class Watch:
    """Progress of a teacher: episodes, success among them, failures, dollars. `metrics` is the engine's."""

    def __init__(self, title: str, total: int, metrics: Callable[[], Mapping[str, float]]):
        from manus_fast.progress import Progress

        self._progress = Progress(title, total, "episodes")
        self._metrics = metrics
        self._done = self._valid = self._won = 0

    def __enter__(self) -> Watch:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        self._progress.__exit__(kind, error, _t)

    def on_done(self, episode: Trajectory) -> None:
        self._done += 1
        self._valid += episode.valid
        self._won += episode.success
        figures = {"success": self._won / max(1, self._valid), "failed": self._done - self._valid}
        self._progress.update(self._done, **figures, dollars=self._metrics()["endpoint/cost"])


def endpoint(resumed: int, figures: Mapping[str, float]) -> None:
    """What a teacher's run asked and met."""
    from rich.console import Console

    numbers = {name.removeprefix("endpoint/"): value for name, value in figures.items()}
    cost = numbers.pop("cost")
    words = [f"{name.replace('_', ' ')} {value:,.0f}" for name, value in numbers.items()]
    before = f"{resumed} episodes were there already; " if resumed else ""
    Console().print(f"{before}{', '.join(words)}; ${cost:.4f} in all", highlight=False, soft_wrap=True)

"""What a dataset holds, in figures and as a picture: turns, lengths, domains, sources, forms of action."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from manus_fast.agent.protocol import Protocol
from manus_fast.data.normalise import form_of, normalise
from manus_fast.data.preferences import Preference
from manus_fast.data.schema import Conversation, MalformedRow


class Statistics:
    """Counts while conversations pass through: `for item in statistics.watch(items)`, or `statistics.take(items)`."""

    def __init__(self, protocol: Protocol):
        self._protocol = protocol
        self.dropped: Counter[str] = Counter()
        """Rows that the protocol cannot write, by reason; hand it to `load_conversations` to count the others too."""
        self.turns: list[int] = []
        self.characters: list[int] = []
        self.replies = 0
        self.forms: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.domains: Counter[str] = Counter()

    def watch(self, items: Iterable[Conversation]) -> Iterator[Conversation]:
        """Counts the conversations, as their dataset has them, and yields them in the protocol's form."""
        for raw in items:
            forms = Counter(form_of(message["content"]) for message in raw.messages if message["trainable"])
            try:
                item = normalise(raw, self._protocol)
            except MalformedRow as error:
                self.dropped[error.reason] += 1
                continue
            self.forms += forms
            self.replies += sum(forms.values())
            self.turns.append(sum(message["role"] == "assistant" for message in item.messages))
            self.characters.append(sum(len(message["content"]) for message in item.messages))
            self.sources[item.source] += 1
            self.domains[item.domain] += 1
            yield item

    def take(self, items: Iterable[Conversation]) -> Statistics:
        for _ in self.watch(items):
            pass
        return self

    def to_json(self) -> dict[str, Any]:
        return {
            "conversations": len(self.turns),
            "trainable_replies": self.replies,
            "turns": spread(self.turns),
            "characters": spread(self.characters),
            "formats": dict(self.forms.most_common()),
            "sources": dict(self.sources.most_common()),
            "domains": dict(self.domains.most_common()),
            "dropped": dict(sorted(self.dropped.items())),
        }

    def plot(self, title: str) -> str:
        """The figures as an SVG's text: two histograms, and bars of domains, sources, forms and reasons."""
        panels = [
            ("replies a conversation", histogram(self.turns)),
            ("characters a conversation", histogram(self.characters)),
            ("domains", dict(self.domains.most_common(_BARS))),
            ("sources", dict(self.sources.most_common(_BARS))),
            ("forms of action", dict(self.forms.most_common(_BARS))),
            ("rows left out", dict(self.dropped.most_common(_BARS))),
        ]
        return picture(title, f"{len(self.turns):,} conversations, {self.replies:,} trained replies", panels)


class PreferenceStatistics:
    """Counts of preference pairs: levels, sources, replies and characters of each side."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        """Rows that are no pair, by reason; hand it to `load_preferences`."""
        self.levels: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.replies: dict[str, list[int]] = {"chosen": [], "rejected": []}
        self.characters: dict[str, list[int]] = {"prompt": [], "chosen": [], "rejected": []}

    def take(self, items: Iterable[Preference]) -> PreferenceStatistics:
        for item in items:
            self.levels[item.level] += 1
            self.sources[item.source or "unnamed"] += 1
            for side in self.characters:
                messages = getattr(item, side)
                self.characters[side].append(sum(len(message["content"]) for message in messages))
                if side in self.replies:
                    self.replies[side].append(sum(message["role"] == "assistant" for message in messages))
        return self

    def to_json(self) -> dict[str, Any]:
        return {
            "pairs": self.levels.total(),
            "levels": dict(self.levels.most_common()),
            "sources": dict(self.sources.most_common()),
            "replies": {side: spread(values) for side, values in self.replies.items()},
            "characters": {side: spread(values) for side, values in self.characters.items()},
            "dropped": dict(sorted(self.dropped.items())),
        }

    def plot(self, title: str) -> str:
        """The figures as an SVG's text: lengths of each side, levels, sources and reasons."""
        panels = [
            ("replies, chosen", histogram(self.replies["chosen"])),
            ("replies, rejected", histogram(self.replies["rejected"])),
            ("characters, chosen", histogram(self.characters["chosen"])),
            ("characters, rejected", histogram(self.characters["rejected"])),
            ("characters, prompt", histogram(self.characters["prompt"])),
            ("levels", dict(self.levels.most_common(_BARS))),
            ("sources", dict(self.sources.most_common(_BARS))),
            ("rows left out", dict(self.dropped.most_common(_BARS))),
        ]
        return picture(title, f"{self.levels.total():,} preference pairs", panels)


def picture(title: str, subtitle: str, panels: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    """An SVG's text: an even number of panels of bars, two in a row."""
    tops, height = [], 70
    for left, right in zip(panels[::2], panels[1::2], strict=True):
        tops.append(height)
        height += 44 + _BAR * max(1, len(left[1]), len(right[1]))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height}" viewBox="0 0 900 {height}" '
            'font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="20" y="28" font-size="15" font-weight="bold">{escape(title)}</text>',
            f'<text x="20" y="46" fill="#4b5563">{escape(subtitle)}</text>',
            *(_panel(name, bars, 20 + 440 * (i % 2), tops[i // 2]) for i, (name, bars) in enumerate(panels)),
            "</svg>",
            "",
        ]
    )


_BARS, _BINS = 10, 10
_BAR = 19
"""Height of a bar and the space under it."""


def spread(values: Sequence[int]) -> dict[str, float]:
    """Mean (to a hundredth), least, upper median, 95th percentile (nearest rank) and largest; empty for no values."""
    if not values:
        return {}
    ranked = sorted(values)
    at = {"min": 0, "median": len(ranked) // 2, "p95": math.ceil(0.95 * len(ranked)) - 1, "max": len(ranked) - 1}
    return {"mean": round(sum(ranked) / len(ranked), 2), **{name: ranked[index] for name, index in at.items()}}


def histogram(values: Sequence[int], bins: int = _BINS) -> dict[str, int]:
    """ "low–high" → how many; equal bins up to the 99th percentile, the last one open. Empty for no values.

    Bins begin at multiples of their width, which is 1, 2 or 5 times a power of ten, the least that takes `bins` of them
    or fewer.
    """
    if not values:
        return {}
    least, high = min(values), sorted(values)[math.ceil(0.99 * len(values)) - 1]
    widths = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    step = next(width for width in widths if high // width - least // width < bins)
    low = least // step * step
    counts = Counter(min((value - low) // step, (high - low) // step) for value in values)
    named = {}
    for place in range((high - low) // step + 1):
        start, end = low + place * step, low + (place + 1) * step - 1
        last = place == (high - low) // step and max(values) > end
        named[f"{start:,}+" if last else f"{start:,}" if step == 1 else f"{start:,}–{end:,}"] = counts[place]
    return named


def _panel(title: str, bars: Mapping[str, int], x: int, y: int) -> str:
    parts = [f'<text x="{x}" y="{y}" font-weight="bold">{escape(title)}</text>']
    largest = max(bars.values(), default=1)
    if not bars:
        parts.append(f'<text x="{x}" y="{y + 20}" fill="#4b5563">none</text>')
    for row, (name, count) in enumerate(bars.items()):
        top = y + 10 + _BAR * row
        width = 190 * count / max(1, largest)
        parts.append(
            f'<text x="{x + 150}" y="{top + 11}" text-anchor="end">{escape(name[:28])}</text>'
            f'<rect x="{x + 156}" y="{top}" width="{width:.1f}" height="14" fill="#3b6fb6"/>'
            f'<text x="{x + 162 + width:.1f}" y="{top + 11}" fill="#4b5563">{count:,}</text>'
        )
    return "\n".join(parts)

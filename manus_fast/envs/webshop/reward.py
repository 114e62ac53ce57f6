"""WebShop's reward (Yao et al., "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language Agents",
NeurIPS 2022), part by part.

Nouns come from a rule, not from a tagger: every word of letters that is no function word or common adjective counts as
a noun. Fuzzy matching is the token-set ratio of the `difflib` kind, in per cent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

COLORS = (
    "black", "blue", "brown", "gold", "green", "grey", "orange", "pink", "purple", "red", "silver", "white", "yellow",
)  # fmt: skip
_NOT_NOUNS = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "big",
        "best",
        "by",
        "for",
        "from",
        "in",
        "is",
        "it",
        "large",
        "light",
        "long",
        "low",
        "new",
        "of",
        "on",
        "or",
        "small",
        "soft",
        "that",
        "the",
        "this",
        "to",
        "with",
        "your",
    ]
)


@dataclass(frozen=True)
class Product:
    """What a shop knows of a thing on sale. `options` maps an option's name to its values."""

    asin: str
    query: str
    category: str
    """Parts joined by " › "."""
    title: str
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float


@dataclass(frozen=True)
class Goal:
    """What is wanted: like which product, with which attributes and options, for how much at most."""

    asin: str
    query: str
    category: str
    name: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_upper: float
    instruction: str


@lru_cache(1 << 16)
def token_set_ratio(a: str, b: str) -> float:
    """Similarity in [0, 100] of two texts as sets of words: 100 where one's words are all in the other."""
    left, right = (set(re.findall(r"\w+", text.lower())) for text in (a, b))
    if not left or not right:
        return 0.0
    shared = " ".join(sorted(left & right))
    texts = [shared, *(f"{shared} {' '.join(sorted(rest))}".strip() for rest in (left - right, right - left))]
    pairs = ((texts[0], texts[1]), (texts[0], texts[2]), (texts[1], texts[2]))
    return max(100 * SequenceMatcher(None, x, y, autojunk=False).ratio() if x and y else 0.0 for x, y in pairs)


def normalize_color(text: str) -> str:
    """The first colour of COLORS that a text names, else the text: "dark blue" is blue."""
    return next((color for color in COLORS if color in text), text)


def nouns(text: str) -> frozenset[str]:
    """The words that count as nouns."""
    return frozenset(word for word in re.findall(r"[a-z]+", text.lower()) if word not in _NOT_NOUNS)


def type_reward(product: Product, goal: Goal) -> float:
    """r_type, one of 0, 0.1, 0.5, 1."""
    wanted = nouns(goal.name)
    title = len(wanted & nouns(product.title)) / len(wanted) if wanted else 0.2
    parts = [{part.strip() for part in category.split("›")} for category in (product.category, goal.category)]
    same = product.query == goal.query or len(parts[0] & parts[1]) >= 2 or title > 0.2
    if title == 0.0:
        return 0.0
    if title < 0.1:
        return 0.1
    return 1.0 if same else 0.5


def reward(product: Product, goal: Goal, chosen: Sequence[str]) -> float:
    """The score of a purchase in [0, 1].

    Args:
        chosen: option values that were selected.
    """
    text = " ".join((product.title, product.description, *product.bullets)).lower()
    attributes = sum(
        any(token_set_ratio(have, want) > 85 for have in product.attributes) or want.lower() in text
        for want in goal.attributes
    )
    picked = [normalize_color(value.lower()) for value in chosen]
    options = sum(
        any(token_set_ratio(have, normalize_color(want.lower())) > 85 for have in picked)
        for want in goal.options.values()
    )
    hits = attributes + options + (product.price <= goal.price_upper)
    return type_reward(product, goal) * hits / (len(goal.attributes) + len(goal.options) + 1)

"""WebShop's reward (Yao et al., "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language Agents",
NeurIPS 2022), part by part:

    reward = r_type · (attributes hit + options hit + [price <= limit]) / (attributes + options + 1)

Fuzzy matching is the token-set ratio of the `difflib` kind, in whole per cent; above 85 is a hit. The nouns of names,
which r_type compares, come from a tagger or from a rule (see `manus_fast.envs.webshop.nouns`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

from manus_fast.envs.webshop.nouns import by_rule

COLORS = (
    "amber", "aqua", "azure", "beige", "black", "blue", "bronze", "brown", "burgundy", "camel", "charcoal", "chocolate",
    "copper", "coral", "cream", "crimson", "cyan", "denim", "emerald", "fuchsia", "gold", "gray", "green", "grey",
    "indigo", "ivory", "khaki", "lavender", "lilac", "lime", "magenta", "mahogany", "maroon", "mauve", "mint",
    "mustard", "navy", "nude", "ocean", "olive", "orange", "peach", "pink", "plum", "purple", "red", "rose", "ruby",
    "rust", "salmon", "sand", "sapphire", "scarlet", "silver", "stone", "taupe", "teal", "turquoise", "violet",
    "walnut", "white", "wine", "yellow",
)  # fmt: skip
"""Words that `normalize_color` looks for, in this order."""

HIT = 85
"""Per cent of likeness that a hit must exceed."""


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
    """What is compared with a goal's limit."""
    price_tag: str = ""
    """What the pages show where that is something else, such as a range; "" shows `price`."""


@dataclass(frozen=True)
class Goal:
    """What is wanted: like which product, with which attributes and options, for how much at most."""

    asin: str
    query: str
    category: str
    name: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    """By the option's name; by a number in words of people, who name values alone."""
    price_upper: float
    instruction: str


@lru_cache(1 << 14)
def token_set_ratio(a: str, b: str) -> int:
    """Likeness in 0 … 100 of two texts as sets of words: 100 where one's words are all in the other."""
    left, right = (set(re.findall(r"\w+", text.lower())) for text in (a, b))
    if not left or not right:
        return 0
    shared = " ".join(sorted(left & right))
    texts = [shared, *(f"{shared} {' '.join(sorted(rest))}".strip() for rest in (left - right, right - left))]
    pairs = ((texts[0], texts[1]), (texts[0], texts[2]), (texts[1], texts[2]))
    ratios = (SequenceMatcher(None, x, y, autojunk=False).ratio() for x, y in pairs if x and y)
    return max((round(100 * ratio) for ratio in ratios), default=0)


@lru_cache(1 << 12)
def normalize_color(text: str) -> str:
    """The first colour of COLORS that a text names, else the text: "dark blue" is blue."""
    return next((color for color in COLORS if color in text), text)


def type_reward(product: Product, goal: Goal, nouns: Callable[[str], Sequence[str]] = by_rule) -> float:
    """r_type, one of 0, 0.1, 0.5, 1.

    The title's share is the number of different nouns that both names have over the number of nouns in the goal's; 0.2
    where that has none.
    """
    wanted = nouns(goal.name)
    title = len(set(wanted) & set(nouns(product.title))) / len(wanted) if wanted else 0.2
    parts = [{part.strip() for part in category.split("›")} for category in (product.category, goal.category)]
    same = product.query == goal.query or len(parts[0] & parts[1]) >= 2 or title > 0.2
    if title == 0.0:
        return 0.0
    if title < 0.1:
        return 0.1
    return 1.0 if same else 0.5


def attribute_hits(product: Product, goal: Goal) -> int:
    """Wanted attributes that the product lists, or that stand in its title, its bullet points or its description."""
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return sum(
        any(token_set_ratio(have, want) > HIT for have in product.attributes) or any(want in text for text in texts)
        for want in goal.attributes
    )


def option_hits(goal: Goal, chosen: Sequence[str]) -> int:
    """Wanted options that are like one of the chosen values, colours by their plain names."""
    picked = [normalize_color(value.lower()) for value in chosen]
    wanted = [normalize_color(value.lower()) for value in goal.options.values()]
    return sum(any(token_set_ratio(have, want) > HIT for have in picked) for want in wanted)


def reward(
    product: Product, goal: Goal, chosen: Sequence[str], nouns: Callable[[str], Sequence[str]] = by_rule
) -> float:
    """The score of a purchase in [0, 1].

    Args:
        chosen: option values that were selected.
        nouns: tells the nouns of a name, repetitions included.
    """
    hits = attribute_hits(product, goal) + option_hits(goal, chosen) + (product.price <= goal.price_upper)
    return type_reward(product, goal, nouns) * hits / (len(goal.attributes) + len(goal.options) + 1)

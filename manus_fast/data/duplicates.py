"""Near duplicates among texts: those whose sets of word 5-grams have a Jaccard similarity of at least a threshold.

MinHash signatures (Broder, "On the resemblance and containment of documents", 1997) in bands find the few earlier texts
that may be alike (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", 3.4); those are compared exactly. So what
is called a duplicate is one, and one in a thousand of those at the very threshold may be missed.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict

import numpy as np

PERMUTATIONS = 128
GRAM = 5
_MISSED = 1e-3
_PLACE = np.uint64(0x632BE59BD9B4E019)


class NearDuplicates:
    """Remembers texts, and tells which earlier one a text is like.

    Args:
        similarity: Jaccard similarity of word 5-grams from which two texts are duplicates, in (0, 1].
    """

    def __init__(self, similarity: float):
        self.similarity = similarity
        self._rows = rows_in_a_band(similarity)
        rng = np.random.default_rng(0)
        # Odd factors permute the 32-bit numbers.
        self._factors = rng.integers(0, 1 << 31, PERMUTATIONS, np.uint32)[:, None] * np.uint32(2) + np.uint32(1)
        self._shifts = rng.integers(0, 1 << 31, PERMUTATIONS, np.uint32)[:, None] * np.uint32(2)
        self._words = _Words()
        self._buckets: dict[bytes, list[int]] = defaultdict(list)
        self._texts: list[tuple[str, list[np.ndarray], np.ndarray]] = []

    def add(self, name: str, *parts: str) -> str | None:
        """The name of an earlier text that this one is like; None, and it is remembered, where there is none.

        A text of several parts is like another where each part is like the other's of the same place.
        """
        grams = [self.grams(part) for part in parts]
        # Distinct numbers by place keep the union disjoint, whose similarity is then at least that of its least part.
        signature = self._signature(np.concatenate([g + np.uint64(place) * _PLACE for place, g in enumerate(grams)]))
        # The place of a band is part of its key.
        keys = [bytes([place]) + band.tobytes() for place, band in enumerate(signature.reshape(-1, self._rows))]
        looked_at: set[int] = set()
        for key in keys:
            for number in self._buckets.get(key, ()):
                if number not in looked_at:
                    looked_at.add(number)
                    other, theirs, signed = self._texts[number]
                    if self._may_be(grams, theirs, signature, signed) and all(
                        jaccard(a, b) >= self.similarity for a, b in zip(grams, theirs, strict=True)
                    ):
                        return other
        for key in keys:
            self._buckets[key].append(len(self._texts))
        self._texts.append((name, grams, signature))
        return None

    def _may_be(
        self, ours: list[np.ndarray], theirs: list[np.ndarray], signed_a: np.ndarray, signed_b: np.ndarray
    ) -> bool:
        """False where sizes or signatures rule a duplicate out: texts with a long beginning in common meet in many
        bands. The share of equal hashes is the similarity within 0.045 (one standard deviation, at most)."""
        if len(ours) != len(theirs):
            return False
        for a, b in zip(ours, theirs, strict=True):
            if min(len(a), len(b)) < self.similarity * max(len(a), len(b)):
                return False
        return np.count_nonzero(signed_a == signed_b) >= (self.similarity - 0.2) * PERMUTATIONS

    def grams(self, text: str) -> np.ndarray:
        """uint64, rising, distinct: hashes of the text's word 5-grams; of all its words where it has fewer."""
        words = re.findall(r"\w+", text.lower())
        hashes = np.fromiter(map(self._words.__getitem__, words), np.uint64, len(words))
        length = min(GRAM, len(words))
        mixed = np.zeros(max(1, len(words) - GRAM + 1), np.uint64)
        for start in range(length):
            mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + hashes[start : start + len(mixed)]
        mixed ^= mixed >> np.uint64(29)
        return np.unique(mixed * np.uint64(0xBF58476D1CE4E5B9))

    def _signature(self, grams: np.ndarray) -> np.ndarray:
        """uint32 `[PERMUTATIONS]`: each permutation's least hash."""
        least = np.full(PERMUTATIONS, np.iinfo(np.uint32).max, np.uint32)
        upper = (grams >> np.uint64(32)).astype(np.uint32)
        for start in range(0, len(upper), 512):  # in parts that stay in the cache
            part = upper[start : start + 512] * self._factors
            part += self._shifts
            np.minimum(least, part.min(1), out=least)
        return least


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard similarity of two sets as rising arrays."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)


def rows_in_a_band(similarity: float) -> int:
    """The most rows a band can have so that texts at the threshold share a whole band but once in a thousand."""
    for rows in (128, 64, 32, 16, 8, 4, 2):
        if (1 - similarity**rows) ** (PERMUTATIONS // rows) <= _MISSED:
            return rows
    return 1


class _Words(dict[str, int]):
    """64-bit hashes of words, the same in every process."""

    def __missing__(self, word: str) -> int:
        raw = word.encode()
        value = self[word] = zlib.crc32(raw) << 32 | zlib.adler32(raw)
        return value

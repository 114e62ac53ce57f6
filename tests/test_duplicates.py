"""Near duplicates against exact Jaccard similarities: no false ones, and next to none missed at any threshold."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manus_fast.data.duplicates import PERMUTATIONS, NearDuplicates, jaccard, rows_in_a_band

VOCABULARY = [f"w{n}" for n in range(400)]


def similarity(a, b):
    """Jaccard similarity of word 5-grams as sets of tuples of words."""

    def grams(text):
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}

    return len(grams(a) & grams(b)) / len(grams(a) | grams(b))


def edited(rng, words, edits):
    words = list(words)
    for place in rng.choice(len(words), edits, replace=False):
        words[place] = f"new{rng.integers(1 << 30)}"
    return words


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(30, 300), st.integers(0, 8), st.sampled_from([0.5, 0.8, 0.9, 1.0]))
def test_what_is_found_is_as_similar_as_that_and_what_is_similar_is_found(seed, length, edits, threshold):
    rng = np.random.default_rng(seed)
    first = list(rng.choice(VOCABULARY, length))
    texts = [" ".join(first), " ".join(edited(rng, first, edits)), " ".join(rng.choice(VOCABULARY, length))]
    duplicates = NearDuplicates(threshold)
    assert duplicates.add("0", texts[0]) is None
    exact = similarity(texts[0], texts[1])
    found = duplicates.add("1", texts[1])
    if exact < threshold:
        assert found is None
    elif exact >= min(1.0, threshold + 0.02):  # nearer to the threshold one in a thousand may be missed
        assert found == "0"
    assert duplicates.add("2", texts[2]) is None  # drawn apart from the others


def test_similarities_are_exact():
    rng = np.random.default_rng(0)
    duplicates = NearDuplicates(0.9)
    for edits in range(0, 40, 4):
        a = list(rng.choice(VOCABULARY, 200))
        texts = " ".join(a), " ".join(edited(rng, a, edits))
        assert jaccard(*map(duplicates.grams, texts)) == pytest.approx(similarity(*texts))


def test_few_are_missed_at_the_threshold():
    """Copies with one word of 100 new have 91 of 101 5-grams in common, or a few more near the ends: just above 0.9."""
    rng = np.random.default_rng(1)
    duplicates, missed, alike = NearDuplicates(0.9), 0, 0
    for number in range(300):
        words = [f"t{number}x{k}" for k in range(100)]
        copy = " ".join(edited(rng, words, 1))
        alike += similarity(" ".join(words), copy) >= 0.9
        assert duplicates.add(f"{number}", " ".join(words)) is None
        missed += duplicates.add("copy", copy) != f"{number}"
    assert alike == 300 and missed <= 3


def test_short_and_empty_texts_and_other_writing():
    duplicates = NearDuplicates(0.9)
    assert duplicates.add("a", "buy it now") is None
    assert duplicates.add("b", "Buy it,\nnow!") == "a"  # case and signs don't count
    assert duplicates.add("c", "buy now it") is None
    assert duplicates.add("d", "") is None and duplicates.add("e", "?!") == "d"
    assert duplicates.add("f", "買う 今 すぐ これ を ください") is None


def test_bands():
    for threshold in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0):
        rows = rows_in_a_band(threshold)
        assert PERMUTATIONS % rows == 0
        assert (1 - threshold**rows) ** (PERMUTATIONS / rows) <= 1e-3
    assert rows_in_a_band(1.0) == PERMUTATIONS and rows_in_a_band(0.01) == 1


def test_a_long_common_beginning_does_not_make_texts_alike():
    rng = np.random.default_rng(2)
    duplicates, head = NearDuplicates(0.9), " ".join(rng.choice(VOCABULARY, 300))
    for number in range(200):
        assert duplicates.add(f"{number}", f"{head} {' '.join(rng.choice(VOCABULARY, 100))}") is None

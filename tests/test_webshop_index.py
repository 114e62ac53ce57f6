"""The search index against BM25 worked out by hand and against the library bm25s."""

import math

import numpy as np
import pytest

from manus_fast.envs.webshop.catalogue import products
from manus_fast.envs.webshop.index import K1, B, build, words
from manus_fast.envs.webshop.store import document

DOCUMENTS = ["red lamp", "red red chair", "blue lamps for tables", "", "red lamp"]


def test_scores_by_hand():
    index = build(DOCUMENTS)
    # Words that count: 2, 3, 3 ("for" does not), 0, 2; their mean is 2. "red" is in 3 documents of 5.
    rarity = math.log(1 + (5 - 3 + 0.5) / (3 + 0.5))
    place = list(index.words).index(b"red")
    postings = slice(index.starts[place], index.starts[place + 1])
    assert list(index.documents[postings]) == [0, 1, 4]
    expected = [rarity * f / (f + K1 * (1 - B + B * length / 2)) for f, length in ((1, 2), (2, 3), (1, 2))]
    np.testing.assert_allclose(index.scores[postings], expected, rtol=1e-6)
    assert index.search("red", 5) == [1, 0, 4]  # ties by number
    assert index.search("red", 1) == [1]
    assert index.search("LAMP, red!", 10) == [0, 4, 1, 2]
    assert index.search("the zebra", 10) == index.search("", 10) == []
    assert index.search("tables", 10) == index.search("table", 10) == [2]


def test_words():
    assert words("The berries, dresses & glasses of us") == ["berry", "dresse", "glasse", "us"]
    assert words("naïve café_1") == ["naïve", "café_1"]
    assert build([]).search("a lamp", 3) == []


def test_scores_are_those_of_bm25s():
    bm25s = pytest.importorskip("bm25s")
    texts = [document(item) for item in products(600, 0)]
    index, theirs = build(texts), bm25s.BM25(method="lucene", k1=K1, b=B)
    theirs.index([words(text) for text in texts], show_progress=False)
    for query in ("long lasting red lamp", "easy to clean chair color: blue size: small", "lamp lamp"):
        expected = theirs.get_scores(words(query))
        found = index.search(query, 50)
        assert set(found) <= set(np.flatnonzero(expected))
        best = np.sort(expected)[::-1][:50]
        np.testing.assert_allclose(expected[found], best[best > 0], rtol=1e-5)

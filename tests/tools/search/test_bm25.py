from __future__ import annotations

import random

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tools import Bm25Index
from agentrl.tools.search import bm25, words

VOCABULARY = [f"w{number}" for number in range(60)]


def _passages(seed: int, count: int = 400) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(VOCABULARY, k=rng.randint(1, 9))) for _ in range(count)]


def test_words_are_lower_cased_and_repeats_stay():
    assert words("Vodi, is a CITY! vodi é3") == ["vodi", "is", "a", "city", "vodi", "é3"]


@pytest.mark.parametrize("k", [1, 3, 10])
def test_agrees_with_the_librarys_own_retrieval(k):
    passages = _passages(1)
    index, oracle = Bm25Index(passages), bm25s.BM25()
    oracle.index([words(passage) for passage in passages], show_progress=False)
    rng = random.Random(2)
    for _ in range(200):
        query = " ".join(rng.choices(VOCABULARY, k=rng.randint(1, 4)))
        _, scores = oracle.retrieve([words(query)], k=k, show_progress=False)
        mine = index.scores(query)
        np.testing.assert_allclose(mine, oracle.get_scores(words(query)), rtol=1e-6)
        best = np.array([mine[[passages.index(passage)]] for passage in index.search(query, k)])
        np.testing.assert_allclose(best.ravel(), scores[0], rtol=1e-6)


@given(st.lists(st.text("ab ", min_size=1, max_size=8), min_size=1, max_size=12), st.integers(1, 14))
def test_best_first_ties_by_position_and_nothing_without_a_common_word(texts, k):
    passages = [f"{text} x" for text in texts]
    index = Bm25Index(passages)
    scores = index.scores("a b")
    ranked = sorted(range(len(passages)), key=lambda row: (-scores[row], row))
    expected = [passages[row] for row in ranked if scores[row] > 0][:k]
    assert index.search("a b", k) == expected


def test_equal_documents_are_found_in_their_order():
    passages = ["red one", "red two", "blue three", "red four"]
    assert Bm25Index(passages).search("red", 3) == ["red one", "red two", "red four"]
    assert Bm25Index(passages[::-1]).search("red", 1) == ["red four"]


@pytest.mark.parametrize("query", ["", "unknown words", "?!"])
def test_a_query_without_a_common_word_has_no_hits(query):
    index = Bm25Index(["red one", "blue two"])
    assert index.search(query) == []
    assert index.search(query, 5) == []


def test_the_last_word_of_the_vocabulary_has_hits():
    passages = [f"only{number}" for number in range(30)]
    index = Bm25Index(passages)
    assert [index.search(passage) for passage in passages] == [[passage] for passage in passages]


@pytest.mark.parametrize("passages", [[], ["...", ""]])
def test_an_index_without_words_is_refused(passages):
    with pytest.raises(ValueError, match="at least one passage with a word"):
        Bm25Index(passages)


def test_passages_without_words_are_never_hits():
    assert Bm25Index(["...", "red"]).search("red ...", 2) == ["red"]


def test_fewer_than_one_passage_is_refused():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        Bm25Index(["red"]).search("red", 0)


def test_repeated_words_count_and_are_added_once(monkeypatch):
    index = Bm25Index(_passages(3))
    weighted = 500 * index.scores("w1") + index.scores("w2")
    additions = []
    monkeypatch.setattr(bm25, "_CHUNK", 1 << 30)
    monkeypatch.setattr(bm25, "np", Counting(additions))
    np.testing.assert_allclose(index.scores("w1 " * 500 + "w2"), weighted, rtol=1e-5)
    assert len(additions) == 2


class Counting:
    """numpy, with a record of the additions of `np.add.at`."""

    def __init__(self, additions):
        self.additions = additions
        self.add = self

    def __getattr__(self, name):
        return getattr(np, name)

    def at(self, total, rows, weights):
        self.additions.append(len(rows))
        np.add.at(total, rows, weights)


def test_the_work_for_a_query_is_bounded_and_its_rarest_words_are_scored(monkeypatch):
    common = [f"c{n}" for n in range(100)]
    passages = [" ".join([*common, f"rare{n}"]) for n in range(50)]
    index, additions = Bm25Index(passages), []
    monkeypatch.setattr(bm25, "np", Counting(additions))
    assert index.search(" ".join([*common, "rare7"]), 1) == [passages[7]]
    assert 31 * 50 <= sum(additions) <= 32 * 50
    np.testing.assert_allclose(
        index.scores(" ".join(common[:32])), sum(index.scores(word) for word in common[:32]), rtol=1e-5
    )


def test_chunks_give_the_same_scores(monkeypatch):
    index = Bm25Index(_passages(4))
    expected = index.scores("w1 w2 w3")
    monkeypatch.setattr(bm25, "_CHUNK", 7)
    assert index.scores("w1 w2 w3").tolist() == expected.tolist()


def test_cached_words_are_bounded(monkeypatch):
    monkeypatch.setattr(bm25, "_CACHED_WORDS", 5)
    index = Bm25Index(_passages(5))
    first = [index.scores(word).tolist() for word in VOCABULARY]
    assert len(index._postings) <= 5
    assert [index.scores(word).tolist() for word in VOCABULARY] == first

from __future__ import annotations

import json

import pytest

from benchmarks.passages import Passages
from benchmarks.search import SearchSettings, bench_search
from tests.tools.search.corpora import encoder


def test_the_same_seed_gives_the_same_passages_and_queries():
    first, same, other = (Passages(50, 20, seed=seed) for seed in (1, 1, 2))
    assert first.texts() == same.texts() != other.texts()
    queries = first.queries(10)
    assert queries == same.queries(10)
    texts = " ".join(first.texts()).replace('"', " ").split()
    assert all(len(query.split()) == 6 and set(query.split()) <= set(texts) for query in queries)
    assert len(set(texts)) > 200


@pytest.mark.full
def test_rows_name_both_sides_and_can_be_printed():
    tiny = SearchSettings(passages=200, dense_passages=50, queries=8, dense_queries=8, batch=4)
    result = json.loads(json.dumps(bench_search(tiny, encoder=encoder, repeats=2)))
    names = ["BM25", "BM25 over HTTP", "dense", "dense, a free encoder"]
    assert list(result["summary"]) == [
        "start-up",
        *(f"{name}, {mode}" for name in names for mode in ("one at a time", "4 at once")),
    ]
    for row in result["rows"][1:]:
        assert {side: len(figures["queries_per_s"]) for side, figures in row["sides"].items()} == {
            "library": 2,
            "tool": 2,
        }
    assert result["settings"]["repeats"] == 2
    assert result["rows"][0]["median"] > 0

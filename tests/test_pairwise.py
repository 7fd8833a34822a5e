"""Covering arrays contain every allowed pair of choices, in few cases."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.pairwise import covering
from tests.trainer.megatron.layouts import OPTIONS, covering_layouts, is_layout, sizes_of

FACTORS = {"a": (1, 2, 3), "b": ("x", "y", "z"), "c": (True, False)}


def test_every_pair_of_choices_is_in_some_case():
    cases = covering(FACTORS, lambda case: True)
    for first, second in combinations(FACTORS, 2):
        assert {(case[first], case[second]) for case in cases} == {
            (v, w) for v in FACTORS[first] for w in FACTORS[second]
        }
    assert len(cases) <= 10
    assert cases == covering(FACTORS, lambda case: True)


def test_forbidden_pairs_are_not_covered():
    cases = covering(FACTORS, lambda case: case["a"] != 2 or case["b"] == "x")
    assert {(case["a"], case["b"]) for case in cases} == {
        *((a, b) for a in (1, 3) for b in "xyz"),
        (2, "x"),
    }


def test_an_impossible_pair_is_not_required():
    assert covering({"a": (1, 2), "b": (1, 2)}, lambda case: case["a"] == case["b"]) == [
        {"a": 1, "b": 1},
        {"a": 2, "b": 2},
    ]


@pytest.mark.parametrize("more", [{"loss": "abc", "weighting": "1234"}, {"kind": "abcdef"}])
def test_layouts_of_four_ranks_are_covered_by_their_options(more):
    cases = covering_layouts(**more).values()
    assert all(is_layout(case) for case in cases)
    names = list(OPTIONS) + list(more)
    pairs = {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}
    # Every two of the four ways to share work over two ranks each, which leaves the other two at 1.
    ways = names[:4]
    for first, second in combinations(ways, 2):
        assert frozenset({(first, 2), (second, 2)}) in pairs
    for name, values in more.items():
        for option, choices in OPTIONS.items():
            # Models without experts share none.
            fitting = choices[:1] if option.startswith("expert") else choices
            assert all(frozenset({(name, v), (option, w)}) in pairs for v in values for w in fitting)
    for (first, values), (second, choices) in combinations(more.items(), 2):
        assert all(frozenset({(first, v), (second, w)}) in pairs for v in values for w in choices)
    assert all(case[option] == 1 for case in cases for option in OPTIONS if option.startswith("expert"))
    assert len(cases) < 20
    assert all("replicas" not in sizes_of(case) for case in cases)


def test_experts_are_shared_with_every_other_way_that_four_ranks_have():
    cases = covering_layouts(kind=["qwen3_moe", "qwen3"]).values()
    pairs = {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}
    for expert in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        for way in list(OPTIONS)[:4]:
            assert frozenset({(expert, 2), (way, 2)}) in pairs
        assert all(case["kind"] == "qwen3_moe" for case in cases if case[expert] == 2)

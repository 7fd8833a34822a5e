"""The benchmark of grading: both sides grade the same answers."""

from __future__ import annotations

import json

import pytest

from benchmarks.grading import GradingSettings, answers, bench_grading


def test_answers_are_a_function_of_the_seed_and_never_their_label():
    first, same, other = ([*answers(400, seed=seed)] for seed in (1, 1, 2))
    assert first == same != other
    assert all(answer != label for answer, label in first)
    labels = [label for _, label in first]
    assert all(len(set(labels[k : k + 8])) == 1 for k in range(0, 400, 8))


@pytest.mark.full
def test_both_sides_agree_and_the_grader_ends_what_hangs():
    tiny = GradingSettings(answers=42, hanging=2, timeout_s=0.3)
    result = json.loads(json.dumps(bench_grading(tiny, repeats=2)))
    assert {side: len(figures["seconds"]) for side, figures in result["sides"].items()} == {
        "grader math": 2,
        "math-verify alone": 2,
    }
    assert 0.2 < result["settings"]["right_share"] < 0.8
    assert result["settings"]["repeats"] == 2
    assert "42 answers of which 2 hang" in result["summary"]["grading math"]

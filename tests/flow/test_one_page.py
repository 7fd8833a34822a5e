"""The example on one page really trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import agentrl
from tests.flow.runs import WARM, train

PAGE = Path(__file__).parents[2] / "examples" / "one_page" / "train.py"


def test_it_is_one_page_and_says_what_it_leaves_out():
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    assert "Left out" in text.split('"""')[1]


@pytest.mark.learning
def test_an_agent_gets_better(tmp_path):
    warm = train("Bandit", tmp_path, "warm", num_rollout=0, **WARM).folder / "checkpoint"
    spec = importlib.util.spec_from_file_location("one_page", PAGE)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    env = ["--env", "tests.flow.worlds:Bandit", "--out", str(tmp_path / "out")]
    words = [str(warm), *env, "--iterations", "10", "--prompts", "8", "--siblings", "8", "--lr", "2e-3"]
    rewards = page.main(words)
    assert len(rewards) == 10
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.7
    report = agentrl.evaluate("tests.flow.worlds:Bandit", str(tmp_path / "out"), n=64, quiet=True)
    assert report.mean > 0.7

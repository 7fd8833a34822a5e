"""None is not zero, and a truncated episode without rewards scores zero."""

from __future__ import annotations

import pytest

from agentrl import Limits, Task, exact_match
from agentrl.envs import squad_normalize
from agentrl.envs.scoring import reward_of, sum_of_steps
from agentrl.errors import GradingError, StageError
from agentrl.types import Ending, Episode


def episode(rewards, ending=Ending.COMPLETED):
    return Episode("e", "X-v0", Task.ask("t", "?"), 0, Limits(), (), tuple(rewards), ending)


@pytest.mark.parametrize(
    ("rewards", "total"),
    [((None, 1.0), 1.0), ((0.5, None, 0.25), 0.75), ((0.0,), 0.0), ((1.0, -3.0), -2.0), ((), 0.0)],
)
def test_the_score_is_the_sum_of_the_step_rewards(rewards, total):
    verdict = sum_of_steps(episode(rewards))
    assert verdict.total == total
    assert verdict.episode_id == "e"


def test_what_was_not_scored_stays_apart_from_what_was_worth_nothing():
    assert sum_of_steps(episode((None, 0.0))).turn_rewards == (None, 0.0)


def test_an_episode_cut_short_before_any_reward_is_worth_zero():
    assert sum_of_steps(episode((None, None), Ending.TRUNCATED)).total == 0.0


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("The  Tirak.", "tirak", 1.0),
        ("an apple a day", "apple day", 1.0),
        ("theory", "ory", 0.0),
        ("Tirak or Torek", "Tirak", 0.0),
        ("", "Tirak", 0.0),
        ("", "the", 0.0),
        ("+", "-", 0.0),
    ],
)
def test_exact_match_ignores_only_case_articles_and_punctuation(answer, gold, score):
    assert exact_match(answer, gold) == score


@pytest.mark.parametrize("gold", [None, "", " \n"])
def test_without_a_label_nothing_can_be_said_of_an_answer(gold):
    with pytest.raises(GradingError, match="the task has no label to grade by"):
        exact_match("", gold)


@pytest.mark.parametrize(
    ("grade", "total", "parts"),
    [
        ({"score": 1, "acc": 1}, 1.0, {"score": 1.0, "acc": 1.0}),
        ({"score": -1.0, "acc": False, "pred": "34"}, -1.0, {"score": -1.0, "acc": 0.0}),
        ({"a": 1, "b": 1}, 2.0, {"a": 1.0, "b": 1.0}),
    ],
)
def test_a_part_called_score_is_the_reward_as_in_verl(grade, total, parts):
    reward = reward_of(grade)
    assert (float(reward), reward.parts) == (total, parts)


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(StageError, match="the part `score` of the reward is None"):
        reward_of({"score": None, "acc": 1})


def test_normalizing_twice_changes_nothing():
    text = "  The Man, who; a-bove "
    assert squad_normalize(squad_normalize(text)) == squad_normalize(text)

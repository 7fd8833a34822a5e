"""Metrics of a function of the user, and evaluations that a function plays."""

from __future__ import annotations

import math

import pytest

from agentrl.algorithms.contract import small_groups
from agentrl.errors import EngineError, UserError
from agentrl.rollout.batch_functions import (
    BatchFunctions,
    check_after_publishing,
    check_rollout_log,
    own_metrics,
)
from agentrl.rollout.own_evaluation import (
    EvaluationInPlay,
    PlayedPrompts,
    check_eval_function,
    evaluated,
)

GROUPS = small_groups()


def test_metrics_are_numbers_under_names_of_their_own():
    assert own_metrics(None) == {}
    assert own_metrics({"a": 1, "b": 0.5}, {"c": 2.0}) == {"a": 1.0, "b": 0.5}
    for returned, sentence in (
        ([1.0], "numbers by name, not"),
        ({"a": "x"}, "the metric a is 'x', not a finite number"),
        ({"a": math.inf}, "the metric a is inf"),
        ({"a": math.nan}, "the metric a is nan"),
        ({1: 1.0}, "the name of a metric is a text, not 1"),
        ({"c": 1.0}, "there is a metric c already"),
    ):
        with pytest.raises(ValueError, match=sentence):
            own_metrics(returned, {"c": 2.0})


async def test_a_log_function_gets_the_iteration_and_its_groups():
    functions = BatchFunctions(log=lambda step, groups: {"own/groups": float(len(groups)), "own/step": step})
    assert await functions.metrics(3, GROUPS, {}) == {"own/groups": float(len(GROUPS)), "own/step": 3.0}
    with pytest.raises(UserError, match=r"the rollout log function failed .*there is a metric own/step"):
        await functions.metrics(3, GROUPS, {"own/step": 1.0})
    check_rollout_log(functions.log)
    with pytest.raises(ValueError, match="it is called with a PublishReport"):
        check_after_publishing(lambda: None)


def evaluation_of(calls, sets=("",)):
    async def play(name, greedy, num_prompts):
        calls.append((name, greedy, num_prompts))
        return PlayedPrompts(0.5, (), ())

    return EvaluationInPlay(4, sets, play)


async def test_an_evaluation_function_plays_what_it_names_and_its_metrics_get_a_prefix():
    calls = []

    async def function(evaluation):
        assert evaluation.step == 4
        await evaluation.play("b", greedy=True, num_prompts=3)
        return {"own": (await evaluation.play("a")).mean}

    own = await evaluated(function, evaluation_of(calls, ("a", "b")), dict)
    assert own == {"eval/own": 0.5}
    assert calls == [("b", True, 3), ("a", False, None)]


async def test_all_is_each_set_in_each_mode():
    calls = []
    await evaluation_of(calls, ("a", "b")).play_all()
    assert calls == [("a", False, None), ("a", True, None), ("b", False, None), ("b", True, None)]


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [(1.0, "numbers by name"), ({"x": "y"}, "the metric x is"), ({"sampled": 1.0}, "a metric eval/sampled")],
)
async def test_one_that_fails_ends_the_run_with_a_sentence(returned, sentence):
    async def function(evaluation):
        await evaluation.play()
        return returned

    with pytest.raises(UserError, match=f"the evaluation function failed .*{sentence}.*; mend it"):
        await evaluated(function, evaluation_of([]), lambda: {"eval/sampled": 0.5})


async def test_an_engine_that_fails_is_not_the_functions_fault():
    async def play(name, greedy, num_prompts):
        raise EngineError("it is gone.")

    with pytest.raises(EngineError, match="it is gone"):
        await evaluated(EvaluationInPlay.play_all, EvaluationInPlay(1, ("",), play), dict)


async def test_a_set_that_is_none_is_a_sentence():
    with pytest.raises(UserError, match=r"there is no held-out set 'x'; the sets are \['a'\]"):
        await evaluation_of([], ("a",)).play("x")


def test_the_contract_of_an_evaluation_function_is_tried_out():
    async def good(evaluation):
        await evaluation.play_all()
        return {"mean": (await evaluation.play(num_prompts=2)).mean}

    async def raises(evaluation):
        raise KeyError("x")

    check_eval_function(good)
    for function, sentence in ((raises, "KeyError"), (lambda evaluation: {}, "dict")):
        with pytest.raises(ValueError, match=sentence):
            check_eval_function(function)

from dataclasses import dataclass, replace

import numpy as np
import pytest

from agentrl.algorithms.advantages import Advantages
from agentrl.algorithms.contract import (
    check_buffer_filter,
    check_correction,
    check_estimator,
    check_group_filter,
    check_reducer,
    check_rollout_filter,
)
from agentrl.algorithms.corrections import Tis
from agentrl.algorithms.estimators import Gae
from agentrl.algorithms.filters import has_signal, highest_std, truncated, zero_std
from agentrl.algorithms.group_relative import GroupRelative
from agentrl.algorithms.weights import token_mean, ungrouped
from agentrl.types import RolloutId


@dataclass
class Broken:
    """An estimator that breaks one promise."""

    change: object

    def __call__(self, groups, tokens, scores):
        return self.change(GroupRelative()(groups, tokens, scores), scores)


def each(f):
    return lambda advantages, scores: replace(advantages, advantages_N=f(advantages.advantages_N))


def in_place(advantages, scores):
    scores.proximal_N[:] = 0
    return advantages


def overflowing(advantages, scores):
    return replace(advantages, advantages_N=np.exp(scores.proximal_N - scores.behaviour_N))


@dataclass
class Remembering:
    calls: int = 0

    def __call__(self, groups, tokens, scores):
        self.calls += 1
        advantages = GroupRelative()(groups, tokens, scores)
        return replace(advantages, advantages_N=advantages.advantages_N * self.calls)


BREAKS = {
    "returns Advantages, not ndarray; wrap it": lambda advantages, _: advantages.advantages_N,
    "advantages must hold one number for each": each(lambda a: a[:-1]),
    "advantages hold numbers that are not finite": each(lambda a: a / 0),
    "returns hold numbers that are not finite": lambda advantages, _: replace(
        advantages, returns_N=advantages.advantages_N + np.inf
    ),
    "changed its scores": in_place,
    "depend on the order": each(lambda a: a * np.arange(len(a))),
}


@pytest.mark.parametrize("sentence", BREAKS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_violated_contract_is_named(sentence):
    with pytest.raises(ValueError, match=sentence):
        check_estimator(Broken(BREAKS[sentence]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_ratio_that_overflows_on_huge_gaps_is_named():
    with pytest.raises(ValueError, match="not finite"):
        check_estimator(Broken(overflowing))


def test_an_estimator_with_state_is_named():
    with pytest.raises(ValueError, match="must not draw random numbers or keep state"):
        check_estimator(Remembering())


def test_a_custom_function_that_satisfies_the_contract_passes():
    check_estimator(Broken(lambda advantages, _: advantages))
    check_estimator(Gae())


def test_errors_of_the_estimator_itself_pass_through():
    def refuses(groups, tokens, scores):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        check_estimator(refuses)


@pytest.mark.parametrize("shape", [(2, 1), ()])
def test_advantages_are_flat(shape):
    with pytest.raises(ValueError, match="must be flat and of one length"):
        Advantages(np.zeros(shape))


def test_returns_are_as_many_as_advantages():
    with pytest.raises(ValueError, match="must be flat and of one length"):
        Advantages(np.zeros(2), np.zeros(3))


def test_a_filter_that_satisfies_the_contract_passes():
    check_group_filter(zero_std)
    check_group_filter(lambda group: None)


@pytest.mark.parametrize(
    ("group_filter", "sentence"),
    [
        (has_signal, "one word, why a group is dropped, or None to keep it, not True"),
        (lambda group: "too easy", "one word"),
        (lambda group: "", "one word"),
        (lambda group, calls=[]: calls.append(1) or ("odd" if len(calls) % 2 else None), "decided otherwise"),
    ],
)
def test_a_filter_that_violates_the_contract_is_named(group_filter, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_group_filter(group_filter)


def test_filters_of_the_package_satisfy_their_contracts():
    check_buffer_filter(highest_std)
    check_rollout_filter(truncated)


def in_turns(*results):
    """A function that returns these, one after the other."""
    calls = []

    def decide(groups, *numbers):
        calls.append(groups)
        return results[len(calls) % len(results)](groups, *numbers)

    return decide


@pytest.mark.parametrize(
    ("buffer_filter", "sentence"),
    [
        (lambda groups, number: groups, "returns 1 of the 4 groups, each once, not 4 groups"),
        (lambda groups, number: [group.id for group in groups[:number]], r"each once, not \['a'\]"),
        (lambda groups, number: iter(groups[:number]), "each once, not <"),
        (in_turns(lambda g, n: g[:n], lambda g, n: g[-n:]), "decided otherwise"),
    ],
)
def test_a_buffer_filter_that_violates_the_contract_is_named(buffer_filter, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_buffer_filter(buffer_filter)


FIRST = RolloutId("a.0")


@pytest.mark.parametrize(
    ("rollout_filter", "sentence"),
    [
        (lambda groups: [FIRST], "returns reasons by RolloutId, not"),
        (lambda groups: {"a.0": "long"}, "'a.0' is no rollout of the batch"),
        (lambda groups: {RolloutId("d.0"): "long"}, "is no rollout of the batch"),
        (lambda groups: {FIRST: "too long"}, "is one word, not 'too long'"),
        (in_turns(lambda g: {}, lambda g: {FIRST: "long"}), "decided otherwise"),
    ],
)
def test_a_rollout_filter_that_violates_the_contract_is_named(rollout_filter, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_rollout_filter(rollout_filter)


def ratio(tokens, scores):
    return np.exp(np.clip(scores.proximal_N - scores.behaviour_N, -20.0, 20.0))


def test_a_correction_that_satisfies_the_contract_passes():
    check_correction(ratio)
    check_correction(Tis())


def into_its_scores(tokens, scores):
    scores.proximal_N[:] = 0.0
    return np.ones(len(tokens))


@pytest.mark.parametrize(
    ("correction", "sentence"),
    [
        (lambda tokens, scores: [1.0] * len(tokens), "one factor for each of .* tokens, not list"),
        (lambda tokens, scores: np.ones(3), r"not \(3,\)"),
        (lambda tokens, scores: -ratio(tokens, scores), "not finite, or below 0"),
        (lambda tokens, scores: 1.0 / (tokens.rollout_index_N > 0), "not finite, or below 0"),
        (in_turns(ratio, lambda tokens, scores: np.ones(len(tokens))), "other factors"),
        (into_its_scores, "changed its scores in place"),
    ],
)
def test_a_correction_that_violates_the_contract_is_named(correction, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_correction(correction)


def even(groups):
    return [np.ones(len(sample)) for group in groups for sample in group]


def test_a_loss_reducer_that_satisfies_the_contract_passes():
    check_reducer(even)
    check_reducer(ungrouped(token_mean))


@pytest.mark.parametrize(
    ("reducer", "sentence"),
    [
        (lambda groups: None, "weights of .* samples, not of None"),
        (lambda groups: even(groups)[1:], "weights of .* samples, not of"),
        (lambda groups: [1.0 for _ in even(groups)], "one weight for each of the"),
        (lambda groups: [-weights for weights in even(groups)], "not finite, or below 0"),
        (lambda groups: [weights * np.nan for weights in even(groups)], "not finite, or below 0"),
        (lambda groups: [0.0 * weights for weights in even(groups)], "all weights are 0"),
        (in_turns(even, ungrouped(token_mean)), "other weights"),
    ],
)
def test_a_loss_reducer_that_violates_the_contract_is_named(reducer, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_reducer(reducer)


def test_filters_are_checked_on_truncated_episodes_and_on_events_that_did_not_happen():
    seen = set()

    def records(group):
        seen.update((e.ending.value, e.counts["tool_calls"]) for e in group.episodes)

    check_group_filter(records)
    assert seen == {("completed", 0), ("truncated", 0)}

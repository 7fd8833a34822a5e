from dataclasses import dataclass, replace

import numpy as np
import pytest

from agentrl.algorithms.contract import check_estimator
from agentrl.algorithms.estimators import Gae, GroupRelative
from agentrl.types import Credit


@dataclass
class Broken:
    """An estimator that breaks one promise."""

    change: object

    def __call__(self, groups, samples, scores):
        return self.change(GroupRelative()(groups, samples, scores), samples, scores)


def each(f):
    return lambda credit, samples, scores: replace(
        credit, advantages=tuple(f(a, s) for a, s in zip(credit.advantages, samples, strict=True))
    )


def by_position(credit, samples, scores):
    return replace(credit, advantages=tuple(a * k for k, a in enumerate(credit.advantages)))


def in_place(credit, samples, scores):
    scores.old[0][:] = 0
    return credit


def overflowing(credit, samples, scores):
    ratios = [np.exp(o - s.logprobs) for o, s in zip(scores.old, samples, strict=True)]
    return replace(credit, advantages=tuple(r * s.loss_mask for r, s in zip(ratios, samples, strict=True)))


@dataclass
class Remembering:
    calls: int = 0

    def __call__(self, groups, samples, scores):
        self.calls += 1
        credit = GroupRelative()(groups, samples, scores)
        return replace(credit, advantages=tuple(a * self.calls for a in credit.advantages))


BREAKS = {
    "one array of the sample's length": lambda c, s, o: Credit(c.advantages[:-1], c.weights[:-1]),
    "advantages must be float32": each(lambda a, s: a.astype(np.float64)),
    "advantages hold numbers that are not finite": each(lambda a, s: a / np.float32(0)),
    "advantages must be 0 wherever": each(lambda a, s: a + np.float32(1)),
    "weights must not be below 0": lambda c, s, o: replace(c, weights=tuple(-w for w in c.weights)),
    "returns must be 0 wherever": lambda c, s, o: replace(
        c, returns=tuple(a + np.float32(1) for a in c.weights)
    ),
    "changed the scores": in_place,
    "depends on the order": by_position,
}


@pytest.mark.parametrize("sentence", BREAKS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_broken_promise_is_named(sentence):
    with pytest.raises(ValueError, match=sentence):
        check_estimator(Broken(BREAKS[sentence]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_ratio_that_overflows_on_huge_gaps_is_named():
    with pytest.raises(ValueError, match="not finite"):
        check_estimator(Broken(overflowing))


def test_an_estimator_that_remembers_is_named():
    with pytest.raises(ValueError, match="must not draw or remember"):
        check_estimator(Remembering())


def test_a_function_of_ones_own_that_keeps_its_promises_passes():
    check_estimator(Broken(lambda credit, samples, scores: credit))
    check_estimator(Gae())


def test_errors_of_the_estimator_itself_pass_through():
    def refuses(groups, samples, scores):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        check_estimator(refuses)

"""From the groups of a rollout batch to its optimizer steps: credit is made once, then it is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple, TypeVar

from agentrl.algorithms.advantages import Advantages
from agentrl.algorithms.filters import has_signal
from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.tokens import Tokens
from agentrl.algorithms.weights import WeightFunction
from agentrl.types import Credit, FloatArray, Group, Sample, Scores, TrainBatch

T = TypeVar("T")


class OptimizerStep(NamedTuple):
    """What one optimizer step is made of: the groups that have a gradient, and their tokens."""

    groups: tuple[Group, ...]
    batch: TrainBatch


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """The groups of one iteration, as tokens.

    A group that was played and is not replaced counts: in the denominators of the weights, and where
    advantages are whitened. It costs a forward pass only where something can come of it.

    samples: of each group, by its id. idle: ids of the groups that nothing can come of, which is known before
    anything is scored. tokens: of all other groups, in their order.
    """

    groups: tuple[Group, ...]
    samples: Mapping[str, tuple[Sample, ...]]
    idle: frozenset[str]
    tokens: Tokens

    @classmethod
    def of(cls, groups: Sequence[Group], *, is_idle: Callable[[Group], bool]) -> RolloutBatch:
        """Take the tokens out of `groups`; those that are idle are left out of `tokens`."""
        samples = {group.id: tuple(s for e in group.episodes for s in samples_of(e)) for group in groups}
        idle = frozenset(group.id for group in groups if is_idle(group))
        scored = [sample for group in groups if group.id not in idle for sample in samples[group.id]]
        return cls(tuple(groups), samples, idle, Tokens.of(scored))

    def steps(
        self,
        scores: Scores,
        advantages: Advantages,
        weights: WeightFunction,
        *,
        num_steps: int,
        policy_term_alone: bool,
    ) -> list[OptimizerStep]:
        """The optimizer steps, at most `num_steps`: one that has no gradient is left out.

        Args:
            scores: of the samples of `tokens`. advantages: of `tokens`.
            weights: called once for each step, with all its samples, those of idle groups included.
            policy_term_alone: a token whose advantage is 0 has no gradient. Groups without any other
                token are then left out, after they have been counted.
        """
        values = self.tokens.scatter(advantages.advantages_N)
        returns_N = advantages.returns_N
        returns = None if returns_N is None else self.tokens.scatter(returns_N)
        steps = []
        for groups in balanced(self.groups, num_steps):
            shares = iter(weights([sample for group in groups for sample in self.samples[group.id]]))
            own = {group.id: tuple(islice(shares, len(self.samples[group.id]))) for group in groups}
            trained = [g for g in groups if self._has_gradient(g.id, values, policy_term_alone)]
            places = [i for group in trained for i in self._places[group.id]]
            samples = _at(self.tokens.samples, places)
            if not any(sample.loss_mask.any() for sample in samples):
                continue
            credit = Credit(
                _at(values, places),
                tuple(share for group in trained for share in own[group.id]),
                None if returns is None else _at(returns, places),
            )
            steps.append(
                OptimizerStep(tuple(trained), TrainBatch(samples, _scores_at(scores, places), credit))
            )
        return steps

    @property
    def _places(self) -> dict[str, range]:
        """Where the samples of each group stand in those of `tokens`."""
        scored = [group.id for group in self.groups if group.id not in self.idle]
        ends = list(accumulate(len(self.samples[id]) for id in scored))
        return {id: range(end - len(self.samples[id]), end) for id, end in zip(scored, ends, strict=True)}

    def _has_gradient(self, id: str, values: Sequence[FloatArray], policy_term_alone: bool) -> bool:
        if id in self.idle:
            return False
        return not policy_term_alone or any(values[i].any() for i in self._places[id])


def balanced(groups: Sequence[Group], n: int) -> list[list[Group]]:
    """Groups in n steps of nearly equal size, none of them empty; inside a step they keep their order.

    Those with signal are spread evenly, in their order; then each of the others goes to the smallest step,
    the first of several. So steps have nearly equally many groups, and of those, nearly equally many with
    signal. It depends on rewards alone, not on what an algorithm makes of them.
    """
    telling = [i for i, group in enumerate(groups) if has_signal(group)]
    steps = [telling[len(telling) * k // n : len(telling) * (k + 1) // n] for k in range(n)]
    for i in sorted(set(range(len(groups))) - set(telling)):
        min(steps, key=len).append(i)
    return [[groups[i] for i in sorted(step)] for step in steps if step]


def _at(arrays: Sequence[T], places: Sequence[int]) -> tuple[T, ...]:
    return tuple(arrays[i] for i in places)


def _scores_at(scores: Scores, places: Sequence[int]) -> Scores:
    others = (scores.ref, scores.teacher, scores.values)
    return Scores(_at(scores.old, places), *(None if one is None else _at(one, places) for one in others))

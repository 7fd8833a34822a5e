"""From the groups of a rollout batch to its optimizer steps: credit is computed once, then split."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import NamedTuple, TypeVar

import numpy as np

from agentrl.algorithms.advantages import Advantages
from agentrl.algorithms.filters import has_signal
from agentrl.algorithms.samples import followed, samples_of
from agentrl.algorithms.tokens import Tokens
from agentrl.algorithms.weights import WeightFunction
from agentrl.types import (
    UNCHANGED,
    Coefficients,
    Credit,
    Ending,
    FloatArray,
    Group,
    RolloutId,
    Sample,
    Scores,
    TrainBatch,
)

T = TypeVar("T")


class OptimizerStep(NamedTuple):
    """The data of one optimizer step: the groups that have a gradient, and their tokens.

    indices: of the batch's samples in `RolloutBatch.tokens`.
    """

    groups: tuple[Group, ...]
    batch: TrainBatch
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """The groups of one iteration, as tokens.

    A group that was played and is not replaced counts in the denominators of the weights, and where
    advantages are whitened. It costs a forward pass only where it can have a gradient.

    samples: of each group, by its id, without those of `Group.greedy`, which are a baseline only. idle: ids
    of the groups that cannot have a gradient, whatever their scores. tokens: of all other groups, in their
    order. removed: rollouts that a filter takes out of the loss: they have scores and advantages and count as
    any other, and no term of the loss is computed on them. masks_older: the same for single tokens: those
    that are older than the newest version of their rollout.
    played: the samples of all episodes, in their order.
    """

    groups: tuple[Group, ...]
    samples: Mapping[str, tuple[Sample, ...]]
    idle: frozenset[str]
    tokens: Tokens
    removed: frozenset[RolloutId] = frozenset()
    masks_older: bool = False
    played: tuple[Sample, ...] = ()

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        *,
        is_idle: Callable[[Group], bool],
        removed: Collection[RolloutId] = (),
        masks_older: bool = False,
        version: int | None = None,
    ) -> RolloutBatch:
        """Extract the tokens of `groups`; idle groups are left out of `tokens`. version: as for `Tokens`."""
        by_episode = {e.id: samples_of(e) for group in groups for e in group.episodes}
        greedy = {episode.id for group in groups for episode in group.greedy}
        samples = {
            group.id: tuple(s for e in group.episodes if e.id not in greedy for s in by_episode[e.id])
            for group in groups
        }
        played = tuple(sample for own in by_episode.values() for sample in own)
        idle = frozenset(group.id for group in groups if is_idle(group))
        scored = [sample for group in groups if group.id not in idle for sample in samples[group.id]]
        tokens = Tokens.of(scored, version)
        return cls(tuple(groups), samples, idle, tokens, frozenset(removed), masks_older, played)

    def with_samples(self, samples: Sequence[Sample]) -> RolloutBatch:
        """The same groups with other samples of the same tokens: of all groups, in their order."""
        each = iter(samples)
        own = {group.id: tuple(islice(each, len(self.samples[group.id]))) for group in self.groups}
        scored = [sample for group in self.groups if group.id not in self.idle for sample in own[group.id]]
        return replace(self, samples=own, tokens=Tokens.of(scored, self.tokens.version))

    def cut_off(self) -> dict[RolloutId, Sample]:
        """For each rollout of `tokens` whose episode was truncated: its last sample, and a token after it.

        That token alone is under the loss mask, so that a critic's value there is its estimate of what would
        have followed. Its id and its logprob mean nothing.
        """
        truncated = {e.id for g in self.groups for e in g.episodes if e.ending is Ending.TRUNCATED}
        last = {self.tokens.samples[i].rollout_id: self.tokens.samples[i] for i in self.tokens.order}
        return {id: followed(sample) for id, sample in last.items() if id.episode in truncated}

    @property
    def splits_rollouts(self) -> bool:
        """Whether the trainable tokens of a rollout are in several samples."""
        ids = [sample.rollout_id for sample in self.tokens.samples if sample.loss_mask.any()]
        return len(set(ids)) < len(ids)

    def steps(
        self,
        scores: Scores,
        advantages: Advantages,
        weights: WeightFunction,
        *,
        num_steps: int,
        policy_term_only: bool,
        coefficients: Coefficients = UNCHANGED,
    ) -> list[OptimizerStep]:
        """The optimizer steps, at most `num_steps`: a step without a gradient is left out.

        Args:
            scores: of the samples of `tokens`. advantages: of `tokens`.
            weights: called once for each step, with the samples of all its groups, idle ones included.
            policy_term_only: whether a token whose advantage is 0 has no gradient. If so, groups without any
                other token are left out, after they have been counted.
            coefficients: of the loss, in all of them.
        """
        all_samples, loss_samples = self._masked_samples, self._loss_samples
        values = self.tokens.scatter(advantages.advantages_N)
        values = tuple(array * s.loss_mask for array, s in zip(values, all_samples, strict=True))
        optional = [
            None if array_N is None else self.tokens.scatter(array_N)
            for array_N in (advantages.returns_N, advantages.kl_cov_N)
        ]
        steps = []

        def has_gradient(group: Group) -> bool:
            indices = [i for _, i in loss_samples.get(group.id, ())]
            return any(values[i].any() for i in indices) if policy_term_only else bool(indices)

        for groups in balanced(self.groups, num_steps):
            own_weights = self._weights(groups, weights, loss_samples)
            trained = tuple(group for group in groups if has_gradient(group))
            indices = [i for group in trained for _, i in loss_samples[group.id]]
            samples = _at(all_samples, indices)
            if not any(sample.loss_mask.any() for sample in samples):
                continue
            credit = Credit(
                _at(values, indices),
                tuple(own_weights[i] * all_samples[i].loss_mask for i in indices),
                *(None if arrays is None else _at(arrays, indices) for arrays in optional),
            )
            batch = TrainBatch(samples, scores.at(indices), credit, self.tokens.version, coefficients)
            steps.append(OptimizerStep(trained, batch, tuple(indices)))
        return steps

    def _weights(
        self,
        groups: Sequence[Group],
        weights: WeightFunction,
        loss_samples: Mapping[str, Sequence[tuple[int, int]]],
    ) -> dict[int, FloatArray]:
        """The weights of a step with these groups, by index in `tokens`. loss_samples: `_loss_samples`."""
        shares = iter(weights([self.samples[group.id] for group in groups]))
        own = {group.id: tuple(islice(shares, len(self.samples[group.id]))) for group in groups}
        return {i: own[group.id][place] for group in groups for place, i in loss_samples.get(group.id, ())}

    @property
    def _masked_samples(self) -> tuple[Sample, ...]:
        """The samples of `tokens`; where older tokens are masked, without them under the loss mask."""
        samples = self.tokens.samples
        if not self.masks_older:
            return samples
        kept = self.tokens.scatter(self.tokens.is_newest().astype(np.float64))
        return tuple(replace(s, loss_mask=array > 0) for s, array in zip(samples, kept, strict=True))

    @property
    def _loss_samples(self) -> dict[str, list[tuple[int, int]]]:
        """Each group's samples that the loss is computed on: place in the group, index in `tokens`."""
        scored = [group.id for group in self.groups if group.id not in self.idle]
        starts = accumulate((len(self.samples[id]) for id in scored), initial=0)
        return {
            id: [
                (place, start + place)
                for place, sample in enumerate(self.samples[id])
                if sample.rollout_id not in self.removed
            ]
            for id, start in zip(scored, starts, strict=False)
        }


def balanced(groups: Sequence[Group], n: int) -> list[list[Group]]:
    """Groups in n steps of nearly equal size, none of them empty; inside a step they keep their order.

    Groups with signal are distributed evenly, in their order; then each of the others goes to the smallest
    step, the first of several. So steps have nearly equally many groups, and of those, nearly equally many
    with signal. The split depends on rewards only, not on the algorithm.
    """
    with_signal = [i for i, group in enumerate(groups) if has_signal(group)]
    steps = [with_signal[len(with_signal) * k // n : len(with_signal) * (k + 1) // n] for k in range(n)]
    for i in sorted(set(range(len(groups))) - set(with_signal)):
        min(steps, key=len).append(i)
    return [[groups[i] for i in sorted(step)] for step in steps if step]


def _at(arrays: Sequence[T], indices: Sequence[int]) -> tuple[T, ...]:
    return tuple(arrays[i] for i in indices)

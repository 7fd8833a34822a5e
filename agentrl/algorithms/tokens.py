"""The trainable tokens of a batch, concatenated: formulas over them need no loop over tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.types import (
    Author,
    FloatArray,
    Group,
    RolloutId,
    Sample,
    Scores,
    Verdict,
    newest_version,
    staleness_of,
)

Floats = npt.NDArray[np.float64]
"""The precision of formulas; float32 is for inputs and results."""
Indices = npt.NDArray[np.intp]

_LARGEST = float(np.finfo(np.float32).max)


class TokenScores(NamedTuple):
    """The outputs of models at N trainable tokens, float64 [N] each.

    proximal_N: logprobs of the policy before the first update of the batch, which the loss's ratios are
    relative to. behaviour_N: those of the engine, when it sampled. The current ones, inside the loss, change
    from one optimizer step to the next. ref_N, teacher_N: logprobs of two other models. values_N: the
    critic's prediction before each token. entropy_N, sum_pi_squared_N: of the proximal policy's
    distribution, see `Scores`. ends_E: of each rollout, the critic's estimate of what would have followed
    its last token, 0 where it was not cut off. None: not computed.
    """

    proximal_N: Floats
    behaviour_N: Floats
    ref_N: Floats | None = None
    teacher_N: Floats | None = None
    values_N: Floats | None = None
    entropy_N: Floats | None = None
    sum_pi_squared_N: Floats | None = None
    ends_E: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The N trainable tokens of some samples, rollout after rollout, each in the order of its turns.

    A rollout is one agent's part of an episode: of an environment with one agent, the episode. A rollout
    whose history was rewritten is several samples; here its tokens are one run again, so that formulas along
    it do not depend on where it was split.

    rollout_ids: the E rollouts of the samples, also those without a trainable token.
    rollout_index_N: the index of a token's rollout, non-decreasing. turn_N: the turn in that rollout.
    staleness_N: how many versions a token is older than the weights that are served when it is trained on.
    version: of these weights; None = that of the newest token.
    order: the indices of the samples, in the order of their tokens here.
    """

    samples: tuple[Sample, ...]
    rollout_ids: tuple[RolloutId, ...]
    order: tuple[int, ...]
    rollout_index_N: Indices
    turn_N: Indices
    staleness_N: Indices
    version: int | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], version: int | None = None) -> Tokens:
        """Concatenate the trainable tokens of `samples`. version: None = that of their newest token."""
        rollout_ids = tuple(dict.fromkeys(sample.rollout_id for sample in samples))
        rank = {id: k for k, id in enumerate(rollout_ids)}
        order = tuple(
            sorted(range(len(samples)), key=lambda i: (rank[samples[i].rollout_id], int(samples[i].turns[0])))
        )
        counts = [int(samples[i].loss_mask.sum()) for i in order]
        ranks = np.array([rank[samples[i].rollout_id] for i in order], dtype=np.intp)
        turns = [samples[i].turns[samples[i].loss_mask] for i in order]
        turn_N = np.concatenate([np.zeros(0, dtype=np.intp), *turns]).astype(np.intp)
        versions = [samples[i].versions[samples[i].loss_mask] for i in order]
        versions_N = np.concatenate([np.zeros(0, dtype=np.int32), *versions])
        served = newest_version(samples) if version is None else version
        staleness_N = staleness_of(versions_N, served).astype(np.intp)
        return cls(tuple(samples), rollout_ids, order, np.repeat(ranks, counts), turn_N, staleness_N, version)

    def __len__(self) -> int:
        return len(self.rollout_index_N)

    @property
    def bounds(self) -> Indices:
        """[E + 1]: the tokens of rollout e are bounds[e] to bounds[e + 1], exclusive."""
        return np.searchsorted(self.rollout_index_N, np.arange(len(self.rollout_ids) + 1)).astype(np.intp)

    def is_newest(self) -> npt.NDArray[np.bool_]:
        """Whether a token is of its rollout's newest version, [N]: false before an update that it spans."""
        least_E = np.full(len(self.rollout_ids), np.iinfo(np.intp).max)
        np.minimum.at(least_E, self.rollout_index_N, self.staleness_N)
        is_newest_N: npt.NDArray[np.bool_] = self.staleness_N == least_E[self.rollout_index_N]
        return is_newest_N

    def scores(self, scores: Scores) -> TokenScores:
        """The values of the trainable tokens in `scores`, and in the engine's own logprobs.

        Raises:
            ValueError: a value is not finite, or the scores are of other samples.
        """
        names = ("reference", "teacher", "values", "entropy", "sum of squares")
        ref_N, teacher_N, values_N, entropy_N, squares_N = (
            None if arrays is None else self.gather(arrays, name)
            for name, arrays in zip(names, scores.optional, strict=True)
        )
        ends_E = np.array([scores.ends.get(id, 0.0) for id in self.rollout_ids]) if scores.ends else None
        behaviour_N = self.gather([sample.logprobs for sample in self.samples], "behaviour logprobs")
        proximal_N = self.gather(scores.proximal, "proximal logprobs")
        optional = (ref_N, teacher_N, values_N, entropy_N, squares_N, ends_E)
        return TokenScores(proximal_N, behaviour_N, *optional)

    def spread(self, by_rollout: Mapping[RolloutId, float]) -> Floats:
        """One number of each rollout, repeated for all its tokens, [N].

        Raises:
            ValueError: a rollout has no number.
        """
        self._check_known(by_rollout)
        values_E = np.array([by_rollout[id] for id in self.rollout_ids], dtype=np.float64)
        values_N: Floats = values_E[self.rollout_index_N]
        return values_N

    def spread_turns(self, by_rollout: Mapping[RolloutId, Floats]) -> Floats:
        """One number of each turn of a rollout, repeated for all tokens of the turn, [N].

        by_rollout: float64 [K] of each rollout, K being the turns of its agent, at least 1.

        Raises:
            ValueError: a rollout has no numbers, or fewer than its samples have turns.
        """
        self._check_known(by_rollout)
        values_N = np.zeros(len(self))
        for id, (start, stop) in zip(self.rollout_ids, pairwise(self.bounds), strict=True):
            turn_n = self.turn_N[start:stop]
            if np.any(turn_n >= len(by_rollout[id])):
                raise ValueError(f"episode {id} has {len(by_rollout[id])} turns, its samples have more")
            values_N[start:stop] = by_rollout[id][turn_n]
        return values_N

    def gather(self, arrays: Sequence[FloatArray], name: str) -> Floats:
        """The values of the trainable tokens, [N], from one [T] array for each sample.

        Raises:
            ValueError: a value is not finite, or an array is not of its sample's length. The message begins
                with `name`.
        """
        if [array.shape for array in arrays] != [sample.loss_mask.shape for sample in self.samples]:
            raise ValueError(f"{name} must hold one value for each token of each sample")
        parts = [arrays[i][self.samples[i].loss_mask] for i in self.order]
        values_N = np.concatenate([np.zeros(0), *parts]).astype(np.float64)
        if not np.all(np.isfinite(values_N)):
            raise ValueError(f"{name} must be finite; look at what computed them before training on them")
        return values_N

    def scatter(self, values_N: Floats) -> tuple[FloatArray, ...]:
        """The inverse of `gather`: one float32 [T] array for each sample, 0 off the loss mask."""
        bounded_N = _bounded(values_N)
        arrays = [np.zeros(len(sample), dtype=np.float32) for sample in self.samples]
        start = 0
        for i in self.order:
            mask = self.samples[i].loss_mask
            stop = start + int(mask.sum())
            arrays[i][mask] = bounded_N[start:stop]
            start = stop
        return tuple(arrays)

    def by_rollout(self, values_N: Floats) -> dict[RolloutId, FloatArray]:
        """The values of the tokens that each rollout sampled, float32: a single one where all are equal.

        0 where a conversion took a token out of the loss.
        """
        sampled = [sample.author == Author.POLICY for sample in self.samples]
        if any((s.loss_mask != mask).any() for s, mask in zip(self.samples, sampled, strict=True)):
            whole = [replace(s, loss_mask=mask) for s, mask in zip(self.samples, sampled, strict=True)]
            all_of_them = Tokens.of(whole, self.version)
            return all_of_them.by_rollout(all_of_them.gather(self.scatter(values_N), "advantages"))
        parts = [_bounded(values_N[start:stop]) for start, stop in pairwise(self.bounds)]
        return {
            id: part[:1].copy() if len(part) and (part == part[0]).all() else part.copy()
            for id, part in zip(self.rollout_ids, parts, strict=True)
        }

    def mean(self, values_N: Floats) -> float:
        """The mean over all tokens, 0 where there are none."""
        return float(values_N.mean()) if len(values_N) else 0.0

    def _check_known(self, rollout_ids: Collection[RolloutId]) -> None:
        if strangers := sorted(set(self.rollout_ids).difference(rollout_ids)):
            raise ValueError(f"samples of rollouts that are in no group: {strangers}")


def _bounded(values_N: Floats) -> FloatArray:
    """As float32; what is beyond its range becomes its largest number."""
    return np.clip(values_N, -_LARGEST, _LARGEST).astype(np.float32)


def verdicts_of(groups: Sequence[Group], rollout_ids: Sequence[RolloutId]) -> tuple[Verdict, ...]:
    """The verdict of each rollout.

    Raises:
        ValueError: a rollout is in no group.
    """
    verdicts = {verdict.rollout_id: verdict for group in groups for verdict in group.verdicts}
    strangers = sorted(set(rollout_ids) - verdicts.keys())
    if strangers:
        raise ValueError(f"samples of rollouts that are in no group: {strangers}")
    return tuple(verdicts[id] for id in rollout_ids)

"""The promises of an advantage estimator, checked on small batches that hold every oddity of large ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentrl.algorithms.samples import samples_of
from agentrl.protocols import AdvantageEstimator
from agentrl.types import (
    Completion,
    Credit,
    Ending,
    Episode,
    Finish,
    FloatArray,
    Group,
    Limits,
    Message,
    Restart,
    Sample,
    Scores,
    Task,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)

_TASK = Task.ask("check_estimator", "?")
_TOLERANCE = 1e-4


class _Batch(NamedTuple):
    groups: tuple[Group, ...]
    samples: tuple[Sample, ...]
    scores: Scores

    def __call__(self, estimator: AdvantageEstimator) -> Credit:
        return estimator(self.groups, self.samples, self.scores)


def check_estimator(estimator: AdvantageEstimator) -> None:
    """Check that an estimator keeps its promises: use it in the tests of your own.

    It is run on groups of different sizes, one of them a single episode, with equal and unequal rewards,
    rewards on turns, an episode that became two samples, samples with one trainable token and with none, and
    scores of every kind; then on the same with logprobs and values that are 10 000 apart. It must give

    - one float32 array of its sample's length for each sample, in advantages, weights and returns (if any);
    - finite numbers, no weight below 0, and 0 wherever the loss mask is off;
    - the same when it is asked again, and for the same samples and groups in another order;
    - its inputs back as they were.

    Raises:
        ValueError: a promise is broken; one sentence says which. Errors of the estimator itself pass through.
    """
    batch = _batch(spread=1.0)
    kept = [array.copy() for array in _arrays(batch.scores)]
    credit = batch(estimator)
    _check_arrays(credit, batch.samples)
    if not all(np.array_equal(a, b) for a, b in zip(kept, _arrays(batch.scores), strict=True)):
        raise ValueError("the estimator changed the scores it was given; it must work on copies")
    if not _alike(credit, batch(estimator)):
        raise ValueError("the estimator gave other credit for the same batch; it must not draw or remember")
    if not _alike(credit, _reordered(batch, estimator)):
        raise ValueError("credit depends on the order of samples or groups; go by `Sample.rollout_id`")
    _check_arrays(_batch(spread=1e4)(estimator), batch.samples)


def _check_arrays(credit: Credit, samples: Sequence[Sample]) -> None:
    named = {"advantages": credit.advantages, "weights": credit.weights, "returns": credit.returns}
    for name, arrays in named.items():
        if arrays is None:
            continue
        if [array.shape for array in arrays] != [sample.loss_mask.shape for sample in samples]:
            raise ValueError(f"{name} must hold one array of the sample's length for each sample")
        if any(array.dtype != np.float32 for array in arrays):
            raise ValueError(f"{name} must be float32")
        if not all(np.all(np.isfinite(array)) for array in arrays):
            raise ValueError(
                f"{name} hold numbers that are not finite; bound ratios and guard divisions by 0"
            )
        if any(np.any(a[~sample.loss_mask]) for a, sample in zip(arrays, samples, strict=True)):
            raise ValueError(f"{name} must be 0 wherever the loss mask is off")
    if any(np.any(array < 0) for array in credit.weights):
        raise ValueError("weights must not be below 0; the sign of a term belongs to its advantage")


def _reordered(batch: _Batch, estimator: AdvantageEstimator) -> Credit:
    """The credit of the batch turned around, in the order of the batch as it was."""
    scores = batch.scores
    turned = _Batch(
        batch.groups[::-1],
        batch.samples[::-1],
        Scores(scores.old[::-1], *(one and one[::-1] for one in (scores.ref, scores.teacher, scores.values))),
    )
    credit = turned(estimator)
    return Credit(
        credit.advantages[::-1],
        credit.weights[::-1],
        None if credit.returns is None else credit.returns[::-1],
    )


def _alike(one: Credit, other: Credit) -> bool:
    pairs = [(one.advantages, other.advantages), (one.weights, other.weights)]
    if one.returns is not None and other.returns is not None:
        pairs.append((one.returns, other.returns))
    return (one.returns is None) == (other.returns is None) and all(
        np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * float(np.abs(a).max(initial=0.0)))
        for arrays in pairs
        for a, b in zip(*arrays, strict=True)
    )


def _arrays(scores: Scores) -> list[FloatArray]:
    kinds = (scores.old, scores.ref, scores.teacher, scores.values)
    return [array for kind in kinds if kind is not None for array in kind]


def _batch(spread: float) -> _Batch:
    """spread: how far, in nats, scores are from the logprobs that the engine gave."""
    groups = (
        _group("a", totals=(1.0, 0.0, 2.0), lengths=((2, 3), (1, 2, 1), (4,)), split="a.1"),
        _group("b", totals=(1.0, 1.0), lengths=((1,), (0,))),
        _group("c", totals=(0.0,), lengths=((2, 0),)),
        _group("d", totals=(1.0, 0.0, 0.0, 0.0), lengths=((1, 1), (3,), (0, 2), (2, 2))),
    )
    samples = tuple(s for group in groups for e in group.episodes for s in samples_of(e, temperature=1.0))
    rng = np.random.default_rng(0)

    def near() -> tuple[FloatArray, ...]:
        noise = (rng.uniform(-spread, spread, len(sample)) for sample in samples)
        return tuple((s.logprobs + n).astype(np.float32) for s, n in zip(samples, noise, strict=True))

    return _Batch(groups, samples, Scores(near(), near(), near(), near()))


def _group(id: str, totals: Sequence[float], lengths: Sequence[Sequence[int]], split: str = "") -> Group:
    """lengths: how many tokens the policy wrote in each turn of each episode."""
    episodes = tuple(_episode(f"{id}.{i}", written, split) for i, written in enumerate(lengths))
    verdicts = tuple(
        Verdict(e.id, "check_estimator", total, turn_rewards=(0.5, *[None] * (len(e.turns) - 1)))
        for e, total in zip(episodes, totals, strict=True)
    )
    return Group(id, _TASK, 0, episodes, verdicts)


def _episode(id: str, lengths: Sequence[int], split: str) -> Episode:
    turns = tuple(_turn(length) for length in lengths)
    whole = (Trajectory(turns),)
    parted = (Trajectory(turns[:1]), Trajectory(turns[1:], 0, Restart.COMPACTED))
    return Episode(
        id=id,
        env_id="check_estimator",
        task=_TASK,
        seed=0,
        limits=Limits(),
        trajectories=parted if id == split else whole,
        step_rewards=(),
        ending=Ending.COMPLETED,
    )


def _turn(length: int) -> Turn:
    ids = np.arange(length, dtype=np.int32)
    completion = Completion(
        ids, np.linspace(-1, -0.1, length, dtype=np.float32), np.zeros(length, np.int32), Finish.STOP
    )
    told = np.zeros(2, dtype=np.int32)
    return Turn((Message("user", "?"),), Message("assistant", "!"), TurnTokens(told, completion))

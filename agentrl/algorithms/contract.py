"""The promises of an advantage estimator, checked on small batches that hold every oddity of large ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agentrl.algorithms.advantages import AdvantageEstimator, Advantages
from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.tokens import Floats, Tokens, TokenScores
from agentrl.types import (
    Completion,
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
    tokens: Tokens
    scores: TokenScores

    def __call__(self, estimator: AdvantageEstimator) -> Advantages:
        return estimator(self.groups, self.tokens, self.scores)

    @classmethod
    def of(cls, groups: Sequence[Group], samples: Sequence[Sample], scores: Scores) -> _Batch:
        tokens = Tokens.of(samples)
        return cls(tuple(groups), tokens, tokens.scores(scores))


def check_estimator(estimator: AdvantageEstimator) -> None:
    """Check that an estimator keeps its promises: use it in the tests of your own.

    It is run on groups of different sizes, one of them a single episode, with equal and unequal rewards,
    rewards on turns, an episode that became two samples, samples with one trainable token and with none, and
    scores of every kind; then on the same with logprobs and values that are 10 000 apart. It must give

    - `Advantages`: one finite number for each trainable token, and as many returns, if any;
    - the same when it is asked again, and for the same samples and groups in another order;
    - its inputs back as they were.

    Raises:
        ValueError: a promise is broken; one sentence says which. Errors of the estimator itself pass through.
    """
    groups, samples, scores = _parts(spread=1.0)
    batch = _Batch.of(groups, samples, scores)
    kept = [array.copy() for array in _arrays(batch)]
    advantages = batch(estimator)
    _check_arrays(advantages, batch.tokens)
    if not all(np.array_equal(a, b) for a, b in zip(kept, _arrays(batch), strict=True)):
        raise ValueError("the estimator changed the scores it was given; it must work on copies")
    found = _by_sample(batch.tokens, advantages)
    if not _alike(found, _by_sample(batch.tokens, batch(estimator))):
        raise ValueError("the same batch was given other advantages; an estimator must not draw or remember")
    others = (scores.ref, scores.teacher, scores.values)
    turned = _Batch.of(
        groups[::-1], samples[::-1], Scores(scores.old[::-1], *(one and one[::-1] for one in others))
    )
    reordered = [arrays[::-1] for arrays in _by_sample(turned.tokens, turned(estimator))]
    if not _alike(found, reordered):
        raise ValueError("advantages depend on the order of samples or groups; go by `Tokens.rollout_ids`")
    far = _Batch.of(*_parts(spread=1e4))
    _check_arrays(far(estimator), far.tokens)


def _check_arrays(advantages: Advantages, tokens: Tokens) -> None:
    if not isinstance(advantages, Advantages):
        raise ValueError(
            f"an estimator returns Advantages, not {type(advantages).__name__}; wrap it: Advantages(array)"
        )
    named = {"advantages": advantages.advantages_N, "returns": advantages.returns_N}
    for name, array in named.items():
        if array is None:
            continue
        if array.shape != (len(tokens),):
            raise ValueError(
                f"{name} must hold one number for each of the {len(tokens)} tokens, got {array.shape}"
            )
        if not np.all(np.isfinite(array)):
            raise ValueError(
                f"{name} hold numbers that are not finite; bound ratios and guard divisions by 0"
            )


def _by_sample(tokens: Tokens, advantages: Advantages) -> list[tuple[FloatArray, ...]]:
    """Advantages and returns, sample by sample."""
    both = (advantages.advantages_N, advantages.returns_N)
    return [tokens.scatter(array_N) for array_N in both if array_N is not None]


def _alike(one: Sequence[Sequence[FloatArray]], other: Sequence[Sequence[FloatArray]]) -> bool:
    return len(one) == len(other) and all(
        np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * float(np.abs(a).max(initial=0.0)))
        for arrays in zip(one, other, strict=True)
        for a, b in zip(*arrays, strict=True)
    )


def _arrays(batch: _Batch) -> list[Floats]:
    return [array_N for array_N in batch.scores if array_N is not None]


def _parts(spread: float) -> tuple[tuple[Group, ...], tuple[Sample, ...], Scores]:
    """spread: how far, in nats, scores are from the logprobs that the engine gave."""
    groups = (
        _group("a", totals=(1.0, 0.0, 2.0), lengths=((2, 3), (1, 2, 1), (4,)), split="a.1"),
        _group("b", totals=(1.0, 1.0), lengths=((1,), (0,))),
        _group("c", totals=(0.0,), lengths=((2, 0),)),
        _group("d", totals=(1.0, 0.0, 0.0, 0.0), lengths=((1, 1), (3,), (0, 2), (2, 2))),
    )
    samples = tuple(s for group in groups for e in group.episodes for s in samples_of(e))
    rng = np.random.default_rng(0)

    def near() -> tuple[FloatArray, ...]:
        noise = (rng.uniform(-spread, spread, len(sample)) for sample in samples)
        return tuple((s.logprobs + n).astype(np.float32) for s, n in zip(samples, noise, strict=True))

    return groups, samples, Scores(near(), near(), near(), near())


def _group(id: str, totals: Sequence[float], lengths: Sequence[Sequence[int]], split: str = "") -> Group:
    """lengths: how many tokens the policy wrote in each turn of each episode."""
    episodes = tuple(_episode(f"{id}.{i}", written, split) for i, written in enumerate(lengths))
    verdicts = tuple(
        Verdict(e.id, "check_estimator", total, turn_rewards=(0.5, *[None] * (len(e.turns) - 1)))
        for e, total in zip(episodes, totals, strict=True)
    )
    return Group(id, _TASK, 0, episodes, verdicts)


def _episode(id: str, lengths: Sequence[int], split: str) -> Episode:
    turns = tuple(_turn(length, step) for step, length in enumerate(lengths))
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


def _turn(length: int, step: int) -> Turn:
    ids = np.arange(length, dtype=np.int32)
    completion = Completion(
        ids, np.linspace(-1, -0.1, length, dtype=np.float32), np.zeros(length, np.int32), Finish.STOP
    )
    world_ids = np.zeros(2, dtype=np.int32)
    return Turn((Message("user", "?"),), Message("assistant", "!"), TurnTokens(world_ids, completion), step)

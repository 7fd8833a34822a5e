"""Whole batches as short as a test needs them, a strategy for ragged ones, and a walk over their tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.tokens import Tokens, TokenScores
from agentrl.types import (
    Ending,
    Episode,
    FloatArray,
    Group,
    Limits,
    Message,
    Restart,
    RolloutId,
    Sample,
    Scores,
    Trajectory,
    Verdict,
)
from tests.algorithms.episodes import TASK, turn


class EpisodeSpec(NamedTuple):
    """An episode: tokens written in each turn, its rewards, at which turn its history was rewritten, and what
    the agent saw before each turn; left out, the same."""

    lengths: Sequence[int]
    total: float = 0.0
    turn_rewards: Sequence[float | None] = ()
    split: int = 0
    states: Sequence[str] = ()


class Arrays(NamedTuple):
    """What an estimator gives, as one [T] array for each sample."""

    advantages: tuple[FloatArray, ...]
    returns: tuple[FloatArray, ...] | None
    metrics: dict[str, float]


class Batch(NamedTuple):
    groups: list[Group]
    samples: list[Sample]
    scores: Scores

    def credit(self, estimator) -> Arrays:
        return arrays_of(estimator, self.groups, self.samples, self.scores)

    @property
    def samples_by_group(self) -> list[list[Sample]]:
        by_id = {e.id: g.id for g in self.groups for e in g.episodes}
        return [[s for s in self.samples if by_id[s.rollout_id.episode] == g.id] for g in self.groups]

    @property
    def tokens(self) -> Tokens:
        return Tokens.of(self.samples)

    @property
    def token_scores(self) -> TokenScores:
        return self.tokens.scores(self.scores)


def arrays_of(estimator, groups, samples, scores) -> Arrays:
    tokens = Tokens.of(samples)
    estimated = estimator(groups, tokens, tokens.scores(scores))
    returns = None if estimated.returns_N is None else tokens.scatter(estimated.returns_N)
    return Arrays(tokens.scatter(estimated.advantages_N), returns, dict(estimated.metrics))


class Token(NamedTuple):
    """Where a trainable token is: which sample, which position; and the turn it belongs to."""

    sample: int
    position: int
    turn: int


def episode_of(id: str, spec: EpisodeSpec) -> Episode:
    turns = tuple(
        replace(turn([1], list(range(1, length + 1))), step=k) for k, length in enumerate(spec.lengths)
    )
    if spec.states:
        turns = tuple(
            replace(t, observation=(Message("user", s),)) for t, s in zip(turns, spec.states, strict=True)
        )
    trajectories = [Trajectory(turns[spec.split :])]
    if spec.split:
        trajectories = [
            Trajectory(turns[: spec.split]),
            Trajectory(turns[spec.split :], 0, Restart.COMPACTED),
        ]
    return Episode(id, "e", TASK, 0, Limits(), tuple(trajectories), (), Ending.COMPLETED)


def batch(*groups: Sequence[EpisodeSpec], gap: float = 1.0, seed: int = 0) -> Batch:
    """Groups g0, g1, ...; episodes g0.0, g0.1, ...; scores up to `gap` from the engine's logprobs."""
    played = []
    for g, specs in enumerate(groups):
        episodes = tuple(episode_of(f"g{g}.{i}", spec) for i, spec in enumerate(specs))
        verdicts = tuple(
            Verdict(e.id, "s", spec.total, turn_rewards=tuple(spec.turn_rewards))
            for e, spec in zip(episodes, specs, strict=True)
        )
        played.append(Group(f"g{g}", TASK, 0, episodes, verdicts))
    samples = [s for group in played for e in group.episodes for s in samples_of(e)]
    rng = np.random.default_rng(seed)

    def near():
        return tuple((s.logprobs + rng.uniform(-gap, gap, len(s))).astype(np.float32) for s in samples)

    proximal = near()
    entropy = tuple(rng.uniform(0, 2, len(s)).astype(np.float32) for s in samples)
    # Of a distribution that gives the token its probability, and the rest to one other or to many.
    pi = [np.exp(np.minimum(logprobs, 0)) for logprobs in proximal]
    squares = tuple((p**2 + rng.random(len(p)) * (1 - p) ** 2).astype(np.float32) for p in pi)
    return Batch(played, samples, Scores(proximal, near(), near(), near(), entropy, squares))


def aged(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """The samples, whose tokens have random versions of 3 to 7 that rise along each of them."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            sample,
            versions=np.where(
                sample.versions < 0, sample.versions, np.sort(rng.integers(3, 8, len(sample)))
            ).astype(np.int32),
        )
        for sample in samples
    ]


def walk(samples: Sequence[Sample]) -> dict[RolloutId, list[Token]]:
    """The trainable tokens of each episode in the order they were sampled in."""
    by_rollout: dict[RolloutId, list[tuple[int, int, int]]] = {}
    for i, sample in enumerate(samples):
        tokens = by_rollout.setdefault(sample.rollout_id, [])
        for t in range(len(sample)):
            if sample.loss_mask[t]:
                tokens.append((int(sample.turns[t]), t, i))
    return {id: [Token(i, t, k) for k, t, i in sorted(tokens)] for id, tokens in by_rollout.items()}


def by_sample(samples: Sequence[Sample], values: dict[tuple[int, int], float]) -> list[list[float]]:
    """Values by (sample, position) as one list for each sample, 0 elsewhere."""
    return [[values.get((i, t), 0.0) for t in range(len(s))] for i, s in enumerate(samples)]


def flat(batch: Batch, arrays) -> list[float]:
    """One [T] array for each sample as one list over the trainable tokens, episode after episode."""
    return [
        float(arrays[token.sample][token.position])
        for tokens in walk(batch.samples).values()
        for token in tokens
    ]


def episode_specs() -> st.SearchStrategy[EpisodeSpec]:
    reward = st.floats(0, 4).map(lambda r: round(r, 2))

    def spec_of_turns(lengths: list[int]) -> st.SearchStrategy[EpisodeSpec]:
        marks = st.lists(st.none() | reward, max_size=len(lengths))
        states = st.lists(st.sampled_from("abc"), min_size=len(lengths), max_size=len(lengths))
        split = st.integers(0, len(lengths) - 1)
        return st.builds(EpisodeSpec, st.just(lengths), reward, marks, split, states)

    return st.lists(st.integers(0, 3), min_size=1, max_size=4).flatmap(spec_of_turns)


def batches(gap: float = 1.0) -> st.SearchStrategy[Batch]:
    """Ragged groups; turns and episodes without a token; rewritten histories."""
    groups = st.lists(st.lists(episode_specs(), min_size=1, max_size=4), min_size=1, max_size=3)
    return st.builds(lambda gs, seed: batch(*gs, gap=gap, seed=seed), groups, st.integers(0, 99))


def close(arrays, expected, tolerance: float = 1e-5) -> bool:
    return all(
        np.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(arrays, expected, strict=True)
    )


def only_on_mask(samples: Sequence[Sample], arrays) -> Iterator[bool]:
    for sample, array in zip(samples, arrays, strict=True):
        yield bool(np.all(np.isfinite(array)) and not np.any(array[~sample.loss_mask]))

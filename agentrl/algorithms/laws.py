"""The token laws, checked on every trajectory before it is trained on.

    tokens        each turn of a trained agent has tokens
    lengths       a turn has as many logprobs and versions as sampled tokens
    start         a trajectory begins with a token of the world: a first token has no prefix
    prefix        the engine's prompt was the trajectory so far: all turns before, and the world's tokens
    vocabulary    each id is a row of the model's embedding
    logprobs      each logprob is finite, and not above 0
    versions      versions never fall along a trajectory, and none is above the served one
    kept          the ids that a cut kept of a token are in the vocabulary, and have the token
    temperature   tokens were sampled above temperature 0; the trainer divides logits by it
    once          the samples hold each token of each trajectory once, as it was recorded
    mask          the loss mask is 1 exactly on sampled tokens, and the policy is their author

All of a batch is compared at once, in numpy: the check costs milliseconds.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from agentrl.errors import TokenLawError
from agentrl.types import (
    KEPT_IDS,
    Author,
    Episode,
    Group,
    IntArray,
    RolloutId,
    Sample,
    Trajectory,
    TurnTokens,
)

MAX_LOGPROB = 1e-3
"""Above 0 by no more than rounding (nats)."""

_ENGINE = "mend the engine"
_REMEDIES: Mapping[str, str] = {
    "tokens": "train agents that sample tokens from the engine",
    "lengths": f"{_ENGINE}, which has to return a logprob and a version for each token",
    "start": "mend the renderer, whose prompt must not be empty",
    "prefix": "mend the renderer, which must not change the ids that it receives",
    "vocabulary": "give engine and renderer the tokenizer of the model that is trained",
    "logprobs": "mend the engine, or look in metrics.jsonl for a gradient that is not finite",
    "kept": f"{_ENGINE}, whose kept ids have to be ragged ids that include the sampled token",
    "versions": "restart the engine: it serves weights that this run has not published",
    "temperature": f"{_ENGINE}, or the generate function, which have to sample above temperature 0",
    "once": "report this as a bug, with the episode from the journal",
    "mask": "report this as a bug, with the episode from the journal",
}

Bools = npt.NDArray[np.bool_]


class _Turn(NamedTuple):
    """A turn of a trained agent. number: among the agent's turns, from 0. starts: begins a trajectory."""

    episode: Episode
    agent: str
    number: int
    starts: bool
    tokens: TurnTokens


@dataclass(frozen=True, slots=True)
class TokenLaws:
    """The laws for the trajectories of one model. vocab_size: its rows of the embedding; None = any id."""

    vocab_size: int | None = None

    def check_episodes(self, groups: Sequence[Group], *, version: int) -> None:
        """Check what was played, before samples are made of it. version: the served one.

        Raises:
            TokenLawError: a trajectory breaks a law.
        """
        turns = list(_turns_of(groups))
        if not turns:
            return
        for turn in turns:
            _check_lengths(turn)
            _check_kept(turn, self.vocab_size)
        _check_prefixes(turns)
        sampled = _Sampled.of(turns)
        self._check_ids(turns, sampled)
        _check_values(sampled, greedy={episode.id for group in groups for episode in group.greedy})
        _check_versions(sampled, version)

    def check_samples(self, groups: Sequence[Group], samples: Sequence[Sample]) -> None:
        """Check that the samples hold what was played, once. samples: of the groups, in their order.

        Raises:
            TokenLawError: a token is missing, repeated, changed, or under the wrong mask.
        """
        turns = list(_turns_of(groups))
        if not turns:
            return
        _check_rollouts(turns, samples)
        parts = [ids for turn in turns for ids in (turn.tokens.world_ids, turn.tokens.completion.token_ids)]
        lengths = [len(part) for part in parts]
        is_sampled_T = np.repeat(np.tile([False, True], len(turns)), lengths)
        turn_T = np.repeat(np.arange(len(parts)) // 2, lengths)
        _compare("once", turns, turn_T, np.concatenate(parts), [s.token_ids for s in samples])
        _compare("mask", turns, turn_T, is_sampled_T, [s.loss_mask for s in samples])
        author_T = np.where(is_sampled_T, int(Author.POLICY), int(Author.WORLD))
        _compare("mask", turns, turn_T, author_T, [s.author for s in samples])
        sampled = _Sampled.of(turns)
        for recorded_N, trained in (
            (sampled.logprobs_N, [s.logprobs[s.loss_mask] for s in samples]),
            (sampled.versions_N, [s.versions[s.loss_mask] for s in samples]),
            (sampled.temperatures_N, [s.temperatures[s.loss_mask] for s in samples]),
        ):
            _compare("once", turns, sampled.turn_N, recorded_N, trained)

    def _check_ids(self, turns: Sequence[_Turn], sampled: _Sampled) -> None:
        worlds = [turn.tokens.world_ids for turn in turns]
        turn_W = np.repeat(np.arange(len(turns)), [len(ids) for ids in worlds])
        for ids, turn_of, author in (
            (np.concatenate(worlds), turn_W, "the world's"),
            (sampled.ids_N, sampled.turn_N, "the sampled"),
        ):
            bad = ids < 0 if self.vocab_size is None else (ids < 0) | (ids >= self.vocab_size)
            if (at := _first(bad)) is not None:
                size = "" if self.vocab_size is None else f" of {self.vocab_size}"
                fact = f"{author} token id {ids[at]} is outside the vocabulary{size}"
                _refuse(turns[turn_of[at]], "vocabulary", fact)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The sampled tokens of all turns, concatenated: N tokens. turn_N: indices into `turns`."""

    turns: Sequence[_Turn]
    turn_N: npt.NDArray[np.intp]
    ids_N: IntArray
    logprobs_N: npt.NDArray[np.float32]
    versions_N: IntArray
    temperatures_N: npt.NDArray[np.float32]

    @classmethod
    def of(cls, turns: Sequence[_Turn]) -> _Sampled:
        completions = [turn.tokens.completion for turn in turns]
        lengths = [len(completion.token_ids) for completion in completions]
        temperatures = np.array([completion.temperature for completion in completions], np.float32)
        return cls(
            turns,
            np.repeat(np.arange(len(turns)), lengths),
            np.concatenate([completion.token_ids for completion in completions]),
            np.concatenate([completion.logprobs for completion in completions]),
            np.concatenate([completion.versions for completion in completions]),
            np.repeat(temperatures, lengths),
        )

    def refuse_first(self, bad_N: Bools, law: str, values_N: npt.NDArray[np.generic], fact: str) -> None:
        """Refuse the turn of the first bad token. fact: what its value {} breaks."""
        if (at := _first(bad_N)) is None:
            return
        turn = int(self.turn_N[at])
        token = at - int(np.searchsorted(self.turn_N, turn))
        _refuse(self.turns[turn], law, f"sampled token {token} has {fact.format(f'{values_N[at]:g}')}")


def _turns_of(groups: Sequence[Group]) -> Iterator[_Turn]:
    """The turns of all trained trajectories, in the order of their samples."""
    for episode in (episode for group in groups for episode in group.episodes):
        if not episode.turns:
            _raise(f"episode {episode.id}", "tokens", "there is no turn")
        counts: Counter[str] = Counter()
        for trajectory in episode.trajectories:
            if trajectory.trainable:
                yield from _turns_in(trajectory, counts[trajectory.agent], episode)
            counts[trajectory.agent] += len(trajectory.turns)


def _turns_in(trajectory: Trajectory, first: int, episode: Episode) -> Iterator[_Turn]:
    agent = trajectory.agent
    for number, turn in enumerate(trajectory.turns, start=first):
        if turn.tokens is None:
            _raise(_where(episode, agent, number), "tokens", "it was played without tokens")
        yield _Turn(episode, agent, number, number == first, turn.tokens)


def _check_lengths(turn: _Turn) -> None:
    completion = turn.tokens.completion
    counts = (len(completion.token_ids), len(completion.logprobs), len(completion.versions))
    if len(set(counts)) != 1:
        _refuse(turn, "lengths", f"{counts[0]} tokens have {counts[1]} logprobs and {counts[2]} versions")
    for name, extra in completion.extras.items():
        if len(extra) != counts[0]:
            _refuse(turn, "lengths", f"{counts[0]} tokens have {len(extra)} values of the extra `{name}`")
    for name, extra in completion.prompt_extras.items():
        if extra.offsets is not None:
            _refuse(turn, "lengths", f"the extra `{name}` of its prompt is ragged")
    if turn.starts and not len(turn.tokens.world_ids):
        _refuse(turn, "start", "its trajectory does not begin with a token of the world")


def _check_kept(turn: _Turn, vocab_size: int | None) -> None:
    completion = turn.tokens.completion
    kept = completion.extras.get(KEPT_IDS)
    if kept is None:
        return
    if kept.offsets is None or kept.values.dtype != np.int32 or kept.values.ndim != 1:
        _refuse(turn, "kept", f"its kept ids are {kept.spec}")
    counts = np.diff(kept.offsets)
    token_M = np.repeat(np.arange(len(counts)), counts)
    ids_M = kept.values.astype(np.int64)
    is_bad_M = (ids_M < 0) | (ids_M >= (ids_M.max(initial=0) + 1 if vocab_size is None else vocab_size))
    if (at := _first(is_bad_M)) is not None:
        _refuse(turn, "kept", f"sampled token {token_M[at]} has the kept id {ids_M[at]}")
    is_token_M = ids_M == completion.token_ids[token_M]
    is_kept_T = np.bincount(token_M[is_token_M], minlength=len(counts)) > 0
    if (at := _first((counts > 0) & ~is_kept_T)) is not None:
        _refuse(turn, "kept", f"sampled token {at} is not among its {counts[at]} kept ids")


def _check_prefixes(turns: Sequence[_Turn]) -> None:
    """Compare the prompts' checksums; a checksum goes on from that of the turns before."""
    checksum = 0
    for turn in turns:
        tokens = turn.tokens
        checksum = zlib.crc32(_bytes_of(tokens.world_ids), 0 if turn.starts else checksum)
        if tokens.prompt_crc32 is not None and tokens.prompt_crc32 != checksum:
            _refuse(turn, "prefix", "the engine's prompt was another than the tokens recorded before it")
        checksum = zlib.crc32(_bytes_of(tokens.completion.token_ids), checksum)


def _bytes_of(ids: IntArray) -> bytes:
    return ids.astype(np.int32, copy=False).tobytes()


def _check_values(sampled: _Sampled, *, greedy: Collection[str]) -> None:
    """greedy: the episodes whose tokens may have a temperature of 0."""
    logprobs_N, temperatures_N = sampled.logprobs_N, sampled.temperatures_N
    is_fine_N = np.isfinite(logprobs_N) & (logprobs_N <= MAX_LOGPROB)
    sampled.refuse_first(~is_fine_N, "logprobs", logprobs_N, "the logprob {}")
    is_baseline_N = np.array([turn.episode.id in greedy for turn in sampled.turns])[sampled.turn_N]
    is_fine_N = np.isfinite(temperatures_N) & ((temperatures_N > 0) | is_baseline_N)
    sampled.refuse_first(~is_fine_N, "temperature", temperatures_N, "the temperature {}")


def _check_versions(sampled: _Sampled, version: int) -> None:
    versions_N = sampled.versions_N
    is_fine_N = (versions_N >= 0) & (versions_N <= version)
    fact = f"version {{}}, and {version} is served"
    sampled.refuse_first(~is_fine_N, "versions", versions_N, fact)
    trajectory_N = np.cumsum([turn.starts for turn in sampled.turns])[sampled.turn_N]
    falls_N = np.diff(versions_N, prepend=versions_N[:1]) < 0
    falls_N &= np.diff(trajectory_N, prepend=trajectory_N[:1]) == 0
    sampled.refuse_first(falls_N, "versions", versions_N, "version {}, and the token before it a newer one")


def _check_rollouts(turns: Sequence[_Turn], samples: Sequence[Sample]) -> None:
    """Compare the samples, one by one, with the trajectories."""
    starts = [turn for turn in turns if turn.starts]
    for turn, sample in zip(starts, samples, strict=False):
        if sample.rollout_id != RolloutId(turn.episode.id, turn.agent):
            _refuse(turn, "once", f"its sample is of {sample.rollout_id}")
    if len(starts) != len(samples):
        turn = starts[min(len(samples), len(starts) - 1)]
        _refuse(turn, "once", f"{len(starts)} trajectories of its batch have {len(samples)} samples")


def _compare(
    law: str,
    turns: Sequence[_Turn],
    turn_T: npt.NDArray[np.intp],
    recorded_T: npt.NDArray[np.generic],
    trained: Sequence[npt.NDArray[np.generic]],
) -> None:
    """Compare recorded values, token by token, with those of the samples."""
    trained_T = np.concatenate(trained)
    length = min(len(trained_T), len(recorded_T))
    at = _first(trained_T[:length] != recorded_T[:length])
    if at is None and len(trained_T) != len(recorded_T):
        at = min(length, len(recorded_T) - 1)
    if at is not None:
        _refuse(turns[turn_T[at]], law, "its sample differs from what was recorded")


def _first(bad: Bools) -> int | None:
    """The index of the first true value; None = there is none."""
    at = int(bad.argmax()) if len(bad) else 0
    return at if len(bad) and bad[at] else None


def _where(episode: Episode, agent: str, number: int) -> str:
    name = f", agent {agent}" if len(episode.agents) > 1 else ""
    return f"episode {episode.id}{name}, turn {number}"


def _refuse(turn: _Turn, law: str, fact: str) -> NoReturn:
    _raise(_where(turn.episode, turn.agent, turn.number), law, fact)


def _raise(where: str, law: str, fact: str) -> NoReturn:
    raise TokenLawError(
        f"{where} breaks the token law `{law}`: {fact}; its batch was dropped before the update, so "
        f"{_REMEDIES[law]}, then resume the run.",
        law,
    )

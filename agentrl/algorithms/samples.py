"""From episodes to Samples: the recorded tokens, concatenated; no text is encoded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from agentrl.types import (
    NO_VERSION,
    Author,
    Episode,
    Extra,
    IntArray,
    RolloutId,
    Sample,
    Trajectory,
    TurnTokens,
    joined_extras,
    with_prompts,
)


def samples_of(episode: Episode) -> tuple[Sample, ...]:
    """One Sample for each trajectory that is trained on. The loss mask is 1 exactly on the tokens that were
    sampled.

    Two turns and their sample, W written by the world and P by the policy:

        turn 0: world_ids 5 6    completion 7 8 (version 3)
        turn 1: world_ids 9      completion 4   (version 3)

        token_ids   5  6  7  8  9  4
        author      W  W  P  P  W  P
        loss_mask   0  0  1  1  0  1
        versions   -1 -1  3  3 -1  3
        turns       0  0  0  0  1  1

    Turns are counted for each agent. Frozen agents have no Sample.

    Args:
        episode: played by agents of which the trained ones have tokens.

    Raises:
        ValueError: a trained trajectory holds no tokens, or begins with sampled ones.
    """
    if not episode.turns:
        raise ValueError(f"episode {episode.id} holds no turns, so there is nothing to train on")
    first: Counter[str] = Counter()
    samples: list[Sample] = []
    for trajectory in episode.trajectories:
        if trajectory.trainable:
            samples.append(_sample(trajectory, first[trajectory.agent], episode.id))
        first[trajectory.agent] += len(trajectory.turns)
    return tuple(samples)


def demonstration(
    parts: Sequence[tuple[Author, Sequence[int]]], rollout_id: RolloutId, *, untrained: Collection[int] = ()
) -> Sample:
    """A Sample from runs of tokens and their authors; the loss mask is 1 exactly on demo tokens.

    untrained: indices of the parts that the loss leaves out, whoever their author is.

    Raises:
        ValueError: a part was written by a policy, or the first token is a demo token.
    """
    if any(author is Author.POLICY for author, _ in parts):
        raise ValueError(f"demonstration {rollout_id} holds policy tokens; those come from episodes")
    ids = np.concatenate([np.asarray(part, dtype=np.int32) for _, part in parts])
    lengths = [len(part) for _, part in parts]
    author = np.repeat([int(author) for author, _ in parts], lengths)
    is_trained = np.repeat([index not in untrained for index in range(len(parts))], lengths)
    return Sample(
        token_ids=ids,
        author=author.astype(np.int8),
        loss_mask=(author == Author.DEMO) & is_trained,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.full(len(ids), NO_VERSION, dtype=np.int32),
        turns=np.zeros(len(ids), dtype=np.int32),
        temperatures=np.ones(len(ids), dtype=np.float32),
        rollout_id=rollout_id,
    )


def _sample(trajectory: Trajectory, first_turn: int, episode_id: str) -> Sample:
    tokens = [turn.tokens for turn in trajectory.turns if turn.tokens is not None]
    if len(tokens) != len(trajectory.turns):
        raise ValueError(f"episode {episode_id} was played without tokens, so it cannot be trained on")
    completions = [turn.completion for turn in tokens]
    lengths = [len(completion.token_ids) for completion in completions]
    spans = [
        span for turn, length in zip(tokens, lengths, strict=True) for span in (len(turn.world_ids), length)
    ]
    author = np.repeat(np.array([Author.WORLD, Author.POLICY] * len(tokens), dtype=np.int8), spans)
    sampled = author == Author.POLICY
    logprobs = np.zeros(len(author), dtype=np.float32)
    versions = np.full(len(author), NO_VERSION, dtype=np.int32)
    temperatures = np.ones(len(author), dtype=np.float32)
    logprobs[sampled] = np.concatenate([completion.logprobs for completion in completions])
    versions[sampled] = np.concatenate([completion.versions for completion in completions])
    temperatures[sampled] = np.repeat([completion.temperature for completion in completions], lengths)
    ids = [part for turn in tokens for part in (turn.world_ids, turn.completion.token_ids)]
    privileged = tokens[0].privileged_ids
    return Sample(
        token_ids=np.concatenate(ids).astype(np.int32, copy=False),
        author=author,
        loss_mask=sampled,
        logprobs=logprobs,
        versions=versions,
        turns=_turns(tokens, first_turn),
        temperatures=temperatures,
        rollout_id=RolloutId(episode_id, trajectory.agent),
        extras=_extras(tokens),
        privileged_ids=None if privileged is None else np.array(privileged, dtype=np.int32),
    )


def _extras(tokens: Sequence[TurnTokens]) -> dict[str, Extra]:
    runs: list[tuple[int, Mapping[str, Extra]]] = []
    prompts: list[tuple[int, Mapping[str, Extra]]] = []
    length = 0
    for turn in tokens:
        completion, num_world = turn.completion, len(turn.world_ids)
        runs += [(num_world, {}), (len(completion.token_ids), completion.extras)]
        prompts.append((length + num_world, completion.prompt_extras))
        length += num_world + len(completion.token_ids)
    joined = joined_extras(runs)
    return with_prompts(joined, prompts, length) if any(extras for _, extras in prompts) else joined


def _turns(tokens: Sequence[TurnTokens], first: int) -> IntArray:
    lengths = [len(turn.world_ids) + len(turn.completion.token_ids) for turn in tokens]
    return np.repeat(np.arange(first, first + len(tokens), dtype=np.int32), lengths)


def followed(sample: Sample) -> Sample:
    """The sample and one more token of the policy, the only one under the loss mask."""
    return Sample(
        token_ids=np.append(sample.token_ids, np.int32(0)),
        author=np.append(sample.author, np.int8(Author.POLICY)),
        loss_mask=np.append(np.zeros_like(sample.loss_mask), True),
        logprobs=np.append(sample.logprobs, np.float32(0.0)),
        versions=np.append(sample.versions, np.int32(0)),
        turns=np.append(sample.turns, sample.turns[-1]),
        temperatures=np.append(sample.temperatures, np.float32(1.0)),
        rollout_id=sample.rollout_id,
    )

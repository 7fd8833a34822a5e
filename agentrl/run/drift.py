"""Retokenization drift: what training on text that is encoded again would get wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from agentrl.rollout.group import GroupOutcome
from agentrl.types import BoolArray, Trajectory

NUM_EPISODES = 16
MAX_TOKENS = 16_384
_EQUAL = 3
_WINDOW = 32


class TextTokenizer(Protocol):
    """Tokens to text, special ones included, and back."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, nothing added."""


class _Tokens(NamedTuple):
    ids: list[int]
    is_sampled_T: BoolArray


def drift_metrics(
    outcomes: Sequence[GroupOutcome], tokenizer: TextTokenizer, *, seed: str
) -> dict[str, float]:
    """How many sampled tokens would be others if the text of their trajectory were encoded again.

    A trajectory's ids are decoded and encoded, and both are compared in their order. After a difference they
    are aligned again where the next 3 tokens are equal; the sampled tokens up to there have drifted.

        count           drifted tokens
        ratio           drifted tokens / sampled tokens
        episode_ratio   episodes with a drifted token / episodes

    This trainer uses the sampled ids, so nothing drifts in training; a trainer that encodes text again would
    give logprobs and gradients to tokens that the policy did not sample.

    It costs the event loop's time. So it is measured on at most 16 episodes of complete groups, drawn by
    `seed`, and 16,384 tokens: what is beyond is left out.
    """
    groups = [outcome.group for outcome in outcomes if outcome.group is not None]
    episodes = [episode for group in groups for episode in group.episodes]
    drawn = random.Random(seed).sample(episodes, min(NUM_EPISODES, len(episodes)))
    num_left, num_sampled, by_episode = MAX_TOKENS, 0, []
    for episode in drawn:
        num_drifted = 0
        for trajectory in episode.trajectories:
            tokens = _tokens_of(trajectory, num_left)
            num_left -= len(tokens.ids)
            num_sampled += int(tokens.is_sampled_T.sum())
            num_drifted += _num_drifted(tokens, tokenizer)
        by_episode.append(num_drifted)
    name = "rollout/retokenization_drift"
    return {
        f"{name}/count": float(sum(by_episode)),
        f"{name}/ratio": sum(by_episode) / max(num_sampled, 1),
        f"{name}/episode_ratio": sum(map(bool, by_episode)) / max(len(by_episode), 1),
    }


def _tokens_of(trajectory: Trajectory, limit: int) -> _Tokens:
    """The first `limit` tokens of a trajectory of the trained policy; none of another's."""
    turns = [turn.tokens for turn in trajectory.turns if turn.tokens is not None and trajectory.trainable]
    if not turns:
        return _Tokens([], np.zeros(0, bool))
    parts = [ids for tokens in turns for ids in (tokens.world_ids, tokens.completion.token_ids)]
    ids = [token for part in parts for token in part.tolist()]
    is_sampled_T = np.repeat(np.tile([False, True], len(turns)), [len(part) for part in parts])
    return _Tokens(ids[:limit], is_sampled_T[:limit])


def _num_drifted(tokens: _Tokens, tokenizer: TextTokenizer) -> int:
    ids, again = tokens.ids, tokenizer.encode(tokenizer.decode(tokens.ids))
    if again == ids:
        return 0
    drifted, at, at_again = 0, 0, 0
    while at < len(ids):
        if at_again < len(again) and ids[at] == again[at_again]:
            at, at_again = at + 1, at_again + 1
            continue
        skipped, skipped_again = _aligned(
            ids[at : at + 2 * _WINDOW], again[at_again : at_again + 2 * _WINDOW]
        )
        drifted += int(tokens.is_sampled_T[at : at + skipped].sum())
        at, at_again = at + skipped, at_again + skipped_again
    return drifted


def _aligned(ids: list[int], again: list[int]) -> tuple[int, int]:
    """How many tokens of both to skip, as few as possible, until the next ones are equal."""
    for total in range(1, 2 * _WINDOW):
        for skipped in range(max(0, total - _WINDOW), min(total, _WINDOW) + 1):
            rest, rest_again = ids[skipped:], again[total - skipped :]
            if rest[:_EQUAL] == rest_again[:_EQUAL]:
                return skipped, total - skipped
    return _WINDOW, _WINDOW

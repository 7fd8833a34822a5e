"""Credit by states: turns that began in the same state are siblings, wherever they are in their episodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from agentrl.algorithms.advantages import Advantages
from agentrl.algorithms.baselines import grpo
from agentrl.algorithms.group_relative import siblings_of
from agentrl.algorithms.rewards import KlPenalty, penalised
from agentrl.algorithms.tokens import Floats, Tokens, TokenScores
from agentrl.algorithms.turns import returns_to_go
from agentrl.types import Group, Observation, Rollout, RolloutId


def state_of(observation: Observation) -> Hashable:
    """What two turns have in common that began in the same state: the messages before them.

    These are the new messages of the world, the first time the complete prompt. They do not depend on where
    a history was rewritten, and of images they hold the content. Only the ids of calls are left out: engines
    may draw them.
    """
    return tuple(
        (
            *(message.role, message.content, message.reasoning, message.name),
            *((call.name, call.raw, repr(call.arguments)) for call in message.tool_calls),
        )
        for message in observation
    )


@dataclass(frozen=True, slots=True)
class StateRelative:
    """Rollouts against their siblings, and turns against the siblings' turns from the same state.

    With R the reward of a rollout, and G_k = r_k + gamma G_(k+1) its return from turn k on,

        advantage = (R - mean of R) / F + weight x (G_k - mean of G) / F
        F = std + 1e-6, of a sample; 1 without `std_normalization`

    where the first mean and F are over the siblings, the second over all turns of all siblings that began in
    the state of turn k, whichever their numbers are: one rollout may come back to a state. A turn whose state
    no other had has only the first term, and so do equal returns.
    Source: https://arxiv.org/abs/2505.10978 (GiGPO), equations 3 to 8, with states that are equal exactly.

    Metrics: shared_states, the share of turns whose state another turn of the group had.

    gamma: discounts from turn to turn. weight: of the second term.

    Raises:
        ValueError: gamma is not between 0 and 1.
    """

    gamma: float = 1.0
    weight: float = 1.0
    std_normalization: bool = True
    kl: KlPenalty | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma must be between 0 and 1, got {self.gamma}")

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group or has too few turns, a reward is not finite, or
                scores are missing.
        """
        baseline = partial(grpo, std_normalization=self.std_normalization)
        by_rollout: dict[RolloutId, Floats] = {}
        num_turns = num_shared = 0
        for siblings in siblings_of(groups):
            returns_GK = returns_to_go(siblings, gamma=self.gamma)
            outcomes_G = baseline([verdict.total for _, verdict in siblings])
            own = [np.full(len(k), outcome) for k, outcome in zip(returns_GK, outcomes_G, strict=True)]
            for turns in _by_state(siblings):
                num_turns += len(turns)
                num_shared += len(turns) if len(turns) > 1 else 0
                compared = baseline([returns_GK[i][k] for i, k in turns])
                for (i, k), advantage in zip(turns, compared, strict=True):
                    own[i][k] += self.weight * advantage
            by_rollout |= zip((verdict.rollout_id for _, verdict in siblings), own, strict=True)
        estimated = penalised(tokens.spread_turns(by_rollout), self.kl, tokens, scores)
        shared = num_shared / num_turns if num_turns else 0.0
        return Advantages(estimated.advantages_N, metrics={**estimated.metrics, "shared_states": shared})


def _by_state(siblings: Sequence[Rollout]) -> list[list[tuple[int, int]]]:
    """The turns of each state: sibling, and number among its turns."""
    turns: dict[Hashable, list[tuple[int, int]]] = {}
    for i, (episode, verdict) in enumerate(siblings):
        for k, turn in enumerate(episode.turns_of(verdict.agent)):
            turns.setdefault(state_of(turn.observation), []).append((i, k))
    return list(turns.values())

"""What episodes consist of: drawn from given distributions, or from the recorded groups of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from agentrl_simulate.config import EpisodesSection, Spread


class TurnPlan(NamedTuple):
    """A turn of the policy.

    world: tokens of the prompt that are new in it. sampled: tokens that the policy samples (counts).
    then_s: time from its end to the next turn, or to the end of the episode (seconds).
    """

    world: int
    sampled: int
    then_s: float


class EpisodePlan(NamedTuple):
    """An episode. reset_s: time before its first turn (seconds). fails: it fails after its last turn."""

    turns: Sequence[TurnPlan]
    reset_s: float = 0.0
    fails: bool = False

    @property
    def num_tokens(self) -> int:
        """All tokens, those of prompts included (count)."""
        return sum(turn.world + turn.sampled for turn in self.turns)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group. episodes: of the siblings, in their order. reason: why the filter drops it; "" = it does not.
    is_idle: it has no gradient, and costs the trainer nothing."""

    episodes: Sequence[EpisodePlan]
    reason: str = ""
    is_idle: bool = False


class Workload(Protocol):
    """The episodes of a run."""

    def group(self, index: int) -> GroupPlan:
        """The group of a prompt's number: always the same one."""

    def retry(self, index: int, sibling: int, attempt: int) -> EpisodePlan:
        """The episode that is played for one that failed. attempt: from 1."""


FILTERED = "filtered"
"""Why a group is dropped that the dynamic sampling filter does not keep."""


@dataclass(frozen=True, slots=True)
class GivenWorkload:
    """Episodes of lognormal lengths and times. size: of a group (count)."""

    section: EpisodesSection
    size: int
    seed: int

    def group(self, index: int) -> GroupPlan:
        """See `Workload`."""
        rng = random.Random(f"group/{self.seed}/{index}")
        shared = _Shared.of(rng)
        episodes = [self._episode(rng, shared) for _ in range(self.size)]
        reason = FILTERED if rng.random() < self.section.filtered_ratio else ""
        return GroupPlan(episodes, reason, rng.random() < self.section.idle_ratio)

    def retry(self, index: int, sibling: int, attempt: int) -> EpisodePlan:
        """See `Workload`."""
        shared = _Shared.of(random.Random(f"group/{self.seed}/{index}"))
        return self._episode(random.Random(f"retry/{self.seed}/{index}/{sibling}/{attempt}"), shared)

    def _episode(self, rng: random.Random, shared: _Shared) -> EpisodePlan:
        section, correlation = self.section, self.section.sibling_correlation

        def drawn(spread: Spread, of_group: float = 0.0, correlation: float = 0.0) -> float:
            z = math.sqrt(correlation) * of_group + math.sqrt(1.0 - correlation) * rng.gauss(0.0, 1.0)
            return spread.median * math.exp(spread.sigma * z) if spread.median else 0.0

        def tokens(spread: Spread, of_group: float = 0.0, correlation: float = 0.0) -> int:
            return max(round(drawn(spread, of_group, correlation)), 1)

        prompt = Spread(section.prompt_len, section.prompt_len_p95)
        reply = Spread(section.reply_len, section.reply_len_p95)
        sampled = Spread(section.turn_len, section.turn_len_p95)
        env_s = Spread(section.env_s, section.env_s_p95)
        number = tokens(Spread(section.turns, section.turns_p95), shared.turns, correlation)
        fails = rng.random() < section.failed_episodes_ratio
        if fails:
            number = rng.randint(1, number)
        turns = [
            TurnPlan(
                # The prompt of a group is the same for all siblings.
                tokens(prompt, shared.prompt, 1.0) if turn == 0 else tokens(reply),
                tokens(sampled, shared.sampled, correlation),
                drawn(env_s),
            )
            for turn in range(number)
        ]
        return EpisodePlan(turns, fails=fails)


class _Shared(NamedTuple):
    """What siblings have in common: standard normal variables of the number of turns, of lengths."""

    turns: float
    sampled: float
    prompt: float

    @classmethod
    def of(cls, rng: random.Random) -> _Shared:
        return cls(*(rng.gauss(0.0, 1.0) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class RecordedWorkload:
    """Groups that runs have played, drawn at random with their siblings, lengths and times.

    groups: at least one; the failed episodes of a run are drawn by `failed_ratio`. size: of a group (count);
    siblings of smaller recorded groups are drawn again.
    """

    groups: Sequence[GroupPlan]
    size: int
    seed: int
    failed_ratio: float = 0.0

    def group(self, index: int) -> GroupPlan:
        """See `Workload`."""
        rng = random.Random(f"group/{self.seed}/{index}")
        plan = rng.choice(self.groups)
        recorded = list(plan.episodes)
        rng.shuffle(recorded)
        episodes = [*recorded[: self.size], *rng.choices(recorded, k=max(self.size - len(recorded), 0))]
        return GroupPlan([self._maybe_failed(each, rng) for each in episodes], plan.reason, plan.is_idle)

    def retry(self, index: int, sibling: int, attempt: int) -> EpisodePlan:
        """See `Workload`."""
        plan = random.Random(f"group/{self.seed}/{index}").choice(self.groups)
        rng = random.Random(f"retry/{self.seed}/{index}/{sibling}/{attempt}")
        return self._maybe_failed(rng.choice(plan.episodes), rng)

    def _maybe_failed(self, episode: EpisodePlan, rng: random.Random) -> EpisodePlan:
        if rng.random() >= self.failed_ratio:
            return episode
        turns = episode.turns[: rng.randint(1, max(len(episode.turns), 1))]
        return episode._replace(turns=turns, fails=True)

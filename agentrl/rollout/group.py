"""One group: siblings that play the same task in the same world, failures replaced."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.algorithms.filters import GroupFilter
from agentrl.data import Prompt
from agentrl.envs import AnyEnv, Scorer, play
from agentrl.envs.opponents import Opponent, agents_of
from agentrl.envs.scoring import Marked, failed
from agentrl.errors import StageError, UserError, all_of, stage
from agentrl.protocols import Agent
from agentrl.types import Episode, Group, Verdict


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """A complete group, or None where it could not be filled; and every episode that failed.

    reason: why the filter dropped the complete group.
    """

    group: Group | None
    failed: tuple[Episode, ...]
    finished: tuple[Episode, ...]
    reason: str = ""

    @property
    def kept(self) -> Group | None:
        """The group, unless the filter dropped it."""
        return None if self.reason else self.group

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """Every episode that was played, each once."""
        return self.finished + self.failed


@dataclass(frozen=True, slots=True)
class GroupPlayer:
    """Plays groups of `size` siblings; an episode that fails is played again, `retries` times at most.

    An episode whose reward fails has failed, too. A retry keeps the task and the world's seed and uses a
    new sampling seed. Where a reward over the whole group fails, the group is lost.

    make_agent: makes an agent of the trained policy. opponents: they play the agents that are not trained.
    drops: the dynamic sampling filter: why a complete group is dropped and replaced, None = it is kept.
    """

    make_env: Callable[[], AnyEnv]
    make_agent: Callable[[], Agent]
    scorer: Scorer
    size: int
    retries: int
    seed: int
    shuffle_rewards: bool = False
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    drops: GroupFilter | None = None

    async def play(self, prompt: Prompt, version: int) -> GroupOutcome:
        """Play a group; `version` is the policy's when it starts.

        Waits for: all siblings. Unblocked by: the siblings' ends, each bounded by its deadlines. On
        cancellation: every sibling is cancelled and its environment closed.

        Raises:
            UserError: the filter failed.
        """
        attempts_of = await all_of([self._sibling(prompt, k) for k in range(self.size)])
        lost = tuple(m.episode for attempts in attempts_of for m in attempts if not m.is_usable)
        siblings = [attempts[-1] for attempts in attempts_of if attempts[-1].is_usable]
        finished = tuple(marked.episode for marked in siblings)
        if len(finished) < self.size:
            return GroupOutcome(None, lost, finished)
        try:
            verdicts = await self.scorer.judge(siblings)
        except StageError as error:
            return GroupOutcome(None, lost + tuple(failed(episode, error) for episode in finished), ())
        if self.shuffle_rewards:
            verdicts = _shuffled(verdicts, random.Random(f"{self.seed}/{prompt.index}"))
        group = Group(f"g{prompt.index}", prompt.task, prompt.seed, finished, tuple(verdicts), version)
        return GroupOutcome(group, lost, finished, await self._drop_reason(group))

    async def _drop_reason(self, group: Group) -> str:
        if self.drops is None:
            return ""
        try:
            async with stage("filter", None):
                return self.drops(group) or ""
        except StageError as error:
            raise UserError(
                f"the dynamic sampling filter failed on group {group.id} ({error.detail}); mend it."
            ) from error

    async def _sibling(self, prompt: Prompt, k: int) -> list[Marked]:
        attempts: list[Marked] = []
        for attempt in range(self.retries + 1):
            name = f"g{prompt.index}-{k}" + (f"-retry{attempt}" if attempt else "")
            env, sampling_seed = self.make_env(), zlib.crc32(f"{self.seed}/{name}".encode())
            episode = await play(
                env,
                agents_of(env, prompt.task, self.make_agent, self.opponents, seed=sampling_seed),
                prompt.task,
                seed=prompt.seed,
                episode_id=name,
                sampling_seed=sampling_seed,
            )
            attempts.append(await self.scorer.mark(episode))
            if attempts[-1].is_usable:
                break
        return attempts


def _shuffled(verdicts: Sequence[Verdict], rng: random.Random) -> list[Verdict]:
    """The same totals, permuted at random among the verdicts of each agent."""
    totals: dict[str, list[float]] = {}
    for verdict in verdicts:
        totals.setdefault(verdict.agent, []).append(verdict.total)
    for agent_totals in totals.values():
        rng.shuffle(agent_totals)
    return [
        replace(
            verdict, scorer=f"{verdict.scorer}, shuffled", total=totals[verdict.agent].pop(0), turn_rewards=()
        )
        for verdict in verdicts
    ]

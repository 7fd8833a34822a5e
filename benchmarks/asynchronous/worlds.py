"""Environments for asynchronous runs: cheap episodes, and long-tailed lengths.

Rewards are chance, so that every group has a gradient and no policy learns: the work of each iteration
stays the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from agentrl import Env, Limits, Message, Reward, Script, Step, Task, say
from agentrl.tools import inline
from agentrl.types import JSON, Episode, Observation

LONG, SHORT = 60, 3
"""Turns of a long episode, and of any other (count)."""
LONG_SHARE = 0.1
"""The share of groups whose episodes are long."""
_WORDS = "on on on on on on on on"
_ANSWER = "go on"


@inline
def coin(episode: Episode) -> float:
    """0 or 1, by the episode's id."""
    return float(random.Random(episode.id).random() < 0.5)


class Brief(Env):
    """One turn: whatever the model writes ends the episode."""

    limits = Limits(max_turns=1, max_tokens=64)
    rewards = (Reward(coin),)

    def tasks(self, split: str) -> Sequence[Task]:
        """Prompts that differ in a number."""
        return [Task.ask(f"{split}{n}", f"Write anything about number {n}.") for n in range(64)]

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """The prompt."""
        del seed
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """The end."""
        del action
        return Step.finished(reward=None)


class Tailed(Brief):
    """Episodes of SHORT turns, and in a share of the groups of LONG ones."""

    limits = Limits(max_turns=LONG, max_tokens=1280)
    _num_left = 0

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """The prompt; the group's world decides how many turns follow."""
        self._num_left = LONG if self.rng.random() < LONG_SHARE else SHORT
        return await super().reset(task, seed=seed)

    async def step(self, action: Message) -> Step:
        """The next turn, whatever was written."""
        self._num_left -= 1
        return Step.going(Message("user", _ANSWER)) if self._num_left else await super().step(action)

    def corpus(self) -> Iterable[str]:
        """The words of every turn, so that each is a token."""
        yield from (*super().corpus(), _WORDS, *[_ANSWER] * len(_WORDS.split()))

    def expert(self, task: Task) -> Script:
        """The same few words in every turn."""
        del task
        for _ in range(LONG):
            yield say(_WORDS)

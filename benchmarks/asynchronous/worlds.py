"""Environments for asynchronous runs: cheap episodes, long-tailed lengths, steps that take their time.

Rewards are chance, so that every group has a gradient and no policy learns: the work of each iteration
stays the same. Of `Buttons` alone something can be learned, within seconds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence

from agentrl import Env, Limits, Message, Reward, Script, Step, Task, ToolEnv, call, say
from agentrl.tools import inline
from agentrl.types import JSON, Episode, Observation

LONG, SHORT = 60, 3
"""Turns of a long episode, and of any other (count)."""
LONG_SHARE = 0.1
"""The share of groups whose episodes are long."""
WAIT_S, WAIT_SIGMA = 0.03, 0.8
"""The median wait of a slow environment (seconds), and the standard deviation of its logarithm."""
_WORDS = "on on on on on on on on"
_ANSWER = "go on"
_GOLD, _DUST = "gold", "dust"


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


class Buttons(ToolEnv):
    """Press a button, then say what it gave. Only gold is worth anything, which three in ten demonstrate."""

    limits = Limits(max_turns=3, max_tokens=64)

    def __init__(self) -> None:
        super().__init__()
        self._result = ""

    async def press(self, button: str) -> str:
        """Press a button."""
        self._result = _GOLD if button == "right" else _DUST
        return self._result

    tools = (press,)

    def tasks(self, split: str) -> Sequence[Task]:
        """Prompts that differ in a number."""
        return [Task.ask(f"{split}{n}", f"press {n}") for n in range(8)]

    def reward(self, task: Task, answer: str) -> float:
        """1 for gold that was found."""
        del task
        return float(answer == self._result == _GOLD)

    def expert(self, task: Task) -> Script:
        """The right button."""
        del task
        yield say((yield call("press", button="right")))

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """Three times in ten the right button."""
        del task
        yield say((yield call("press", button="right" if rng.random() < 0.3 else "left")))

    def corpus(self) -> Iterable[str]:
        """All words."""
        yield from (message.text for task in self.tasks("train") for message in task.prompt)
        yield from ("left", "right", _GOLD, _DUST)


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


class Paced(Tailed):
    """Episodes of 2 to 10 turns, the same number in a group; the environment takes its time between two."""

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """The prompt; the group's world decides how many turns follow."""
        prompt = await super().reset(task, seed=seed)
        self._num_left = self.rng.randint(2, 10)
        return prompt

    async def step(self, action: Message) -> Step:
        """The next turn, after a wait whose length is lognormal."""
        await asyncio.sleep(WAIT_S * self.rng.lognormvariate(0.0, WAIT_SIGMA))
        return await super().step(action)

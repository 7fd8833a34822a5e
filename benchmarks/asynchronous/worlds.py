"""Environments for asynchronous runs: cheap episodes, long-tailed lengths, something to learn.

Rewards are chance, so that every group has a gradient and no policy learns: the work of each iteration
stays the same. Only of `Buttons` and `Lamps` something can be learned: within seconds, and in a minute.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from agentrl import Env, Limits, Message, Reward, Script, Step, Task, ToolEnv, call, say
from agentrl.tools import inline
from agentrl.types import JSON, Episode, Observation

LONG, SHORT = 60, 3
"""Turns of a long episode, and of any other (count)."""
LONG_SHARE = 0.1
"""The share of groups whose episodes are long."""
_WORDS = "on on on on on on on on"
_ANSWER = "go on"
_GOLD, _DUST = "gold", "dust"
_LAMPS = ("attic", "bath", "cellar", "hall")


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


class Lamps(ToolEnv):
    """Make the lamps of a house what they should be; a switch turns an off lamp on and an on lamp off.

    Demonstrations leave four in ten lamps that are wrong as they are. No pair of a house and a goal is in
    both splits.
    """

    limits = Limits(max_turns=10, max_tokens=256)

    def __init__(self) -> None:
        super().__init__()
        self._on: dict[str, bool] = {}

    async def look(self, lamp: str) -> str:
        """See whether a lamp is on."""
        return _state(self._on[lamp]) if lamp in self._on else "no such lamp"

    async def switch(self, lamp: str) -> str:
        """Switch a lamp."""
        if lamp not in self._on:
            return "no such lamp"
        self._on[lamp] = not self._on[lamp]
        return _state(self._on[lamp])

    tools = (look, switch)

    def tasks(self, split: str) -> Sequence[Task]:
        """Pairs of what the lamps are and should be."""
        pairs = [(start, goal) for start in range(16) for goal in range(16) if start != goal]
        random.Random(0).shuffle(pairs)
        return [
            Task.ask(
                f"{start}-{goal}",
                ", ".join(f"{lamp} {_state(on)}" for lamp, on in _lamps(goal).items()),
                start=start,
                goal=goal,
            )
            for start, goal in (pairs[:200] if split == "train" else pairs[200:])
        ]

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """The house as it is."""
        self._on = _lamps(task.metadata["start"])
        return await super().reset(task, seed=seed)

    def reward(self, task: Task, answer: str) -> float:
        """1 if each lamp is what it should be."""
        del answer
        return float(self._on == _lamps(task.metadata["goal"]))

    def expert(self, task: Task) -> Script:
        """Looks at each lamp, and switches those that are wrong."""
        return self.demonstrator(task, random.Random(0), careless=0.0)

    def demonstrator(self, task: Task, rng: random.Random, careless: float = 0.4) -> Script:
        """The same, careless."""
        for lamp, on in _lamps(task.metadata["goal"]).items():
            if (yield call("look", lamp=lamp)) != _state(on) and rng.random() >= careless:
                yield call("switch", lamp=lamp)
        yield say("done")


def _state(on: bool) -> str:
    return "on" if on else "off"


def _lamps(bits: JSON) -> dict[str, bool]:
    return {
        lamp: bool(cast(int, bits) >> n & 1) for n, lamp in enumerate(("attic", "bath", "cellar", "hall"))
    }


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

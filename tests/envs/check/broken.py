"""Worlds with one fault each, and one without any. `FAULTS` has the finding for each."""

from __future__ import annotations

import asyncio
import io
import random
import time

import numpy as np

from agentrl import Limits, Message, Reward, Task, ToolEnv, UserError, call, say, tool
from agentrl.envs import Env
from agentrl.tools import inline

WORDS = ("amber", "basil", "cedar", "dahlia", "ember", "fjord", "grove", "heron")
LEAKED: list[object] = []
FAULTS: dict[str, type[Env]] = {}


def caught_by(code):
    """Register a world under the only finding that its check must have."""

    def enter(env_class):
        FAULTS[f"{code} {env_class.__name__}"] = env_class
        return env_class

    return enter


class Good(ToolEnv):
    """Look up a word's partner and say it."""

    limits = Limits(max_turns=4, max_tokens=512)

    @tool(inline=True)
    def look(self, word: str, times: int = 1) -> str:
        """Look up a word's partner."""
        return " ".join([self.partner(word)] * min(max(times, 0), 2))

    tools = (look,)

    def partner(self, word):
        return f"{WORDS[-1 - WORDS.index(word)]}ite" if word in WORDS else f"no {word[:50]}"

    def tasks(self, split):
        words = WORDS[::2] if split == "train" else WORDS[1::2]
        return [Task.ask(f"{split}-{w}", f"What goes with {w}?", self.partner(w), word=w) for w in words]

    @inline
    def reward(self, task, answer):
        return float(answer == task.answer)

    def expert(self, task):
        yield say((yield call("look", word=task.metadata["word"])))


@caught_by("no-expert")
class Bookless(Good):
    expert = Env.expert


@caught_by("no-expert")
class Refusing(Good):
    def expert(self, task):
        raise UserError("this world has no expert")


@caught_by("expert-falls-short")
class Wrong(Good):
    def expert(self, task):
        yield say(task.answer if task.metadata["word"] == "amber" else "basilite")


@caught_by("expert-falls-short")
class Once(Good):
    """One task of eight cannot be solved."""

    def reward(self, task, answer):
        return float(answer == task.answer and task.metadata["word"] != "heron")


@caught_by("expert-score-too-low")
class Modest(Good):
    expert_score = 0.2


@caught_by("expert-fails")
class Raising(Good):
    def expert(self, task):
        yield call("look", word=task.metadata["no such key"])


@caught_by("nothing-to-learn expert-score-too-low")
class Flat(Good):
    expert_score = 0.0


@caught_by("close-fails")
class ClosesWhatResetMade(Good):
    async def reset(self, task, *, seed):
        self.file = io.StringIO()
        return await super().reset(task, seed=seed)

    async def close(self):
        self.file.close()
        await super().close()


@caught_by("close-fails")
class BreaksAtTheEnd(Good):
    was_reset = False

    async def reset(self, task, *, seed):
        self.was_reset = True
        return await super().reset(task, seed=seed)

    async def close(self):
        await super().close()
        if self.was_reset:
            raise RuntimeError("the page has gone")


class Needs(Good):
    """A member that exists only while an episode is played."""

    async def reset(self, task, *, seed):
        self.world = True
        return await super().reset(task, seed=seed)


@caught_by("class-fails")
class ScoresWhatResetMade(Needs):
    @property
    def expert_score(self):
        return float(self.world)


@caught_by("class-fails")
class ToolsOfWhatResetMade(Needs):
    @property
    def tool_schemas(self):
        return super().tool_schemas if self.world else ()


@caught_by("class-fails")
class RewardsOfWhatResetMade(Needs):
    @property
    def rewards(self):
        return (Reward(lambda episode: 0.0),) if self.world else ()


@caught_by("class-fails")
class ExitsInARead(Good):
    @property
    def has_expert(self):
        raise SystemExit(3)


@caught_by("no-tasks")
class Empty(Good):
    def tasks(self, split):
        return []


@caught_by("tasks-fails")
class NoSplit(Good):
    splits = ("train", "test", "extra")

    def tasks(self, split):
        return {"train": [], "test": []}[split]


@caught_by("tasks-fails")
class Strings(Good):
    def tasks(self, split):
        return list(WORDS)


@caught_by("make-fails")
class Unmade(Good):
    def __init__(self):
        raise ConnectionError("the index is offline")


@caught_by("tasks-differ")
class Moving(Good):
    def tasks(self, split):
        return random.Random(time.perf_counter_ns()).sample(super().tasks(split), 4)


@caught_by("duplicate-task-id")
class Numbered(Good):
    def tasks(self, split):
        return [
            Task(f"{n}", task.prompt, task.answer, task.metadata)
            for n, task in enumerate(super().tasks(split))
        ]


@caught_by("splits-overlap")
class Overlapping(Good):
    def tasks(self, split):
        both = [*super().tasks("train"), *super().tasks("test")][: 5 if split == "train" else 8]
        both = both if split == "train" else both[4:]
        return [Task(f"{split}-{n}", task.prompt, task.answer, task.metadata) for n, task in enumerate(both)]


@caught_by("answer-in-prompt")
class Telling(Good):
    def tasks(self, split):
        return [
            Task.ask(
                task.id,
                f"{task.prompt[0].content} Think of {task.answer.upper()}!",
                task.answer,
                **task.metadata,
            )
            for task in super().tasks(split)
        ]


@caught_by("answer-in-prompt above-chance")
class Labelled(Good):
    """The answer is near the end of the prompt, after a label as a template could leave it: copying pays."""

    def tasks(self, split):
        return [
            Task.ask(
                task.id,
                f"{task.prompt[0].content} {'so ' * 200} Answer: {task.answer}",
                task.answer,
                **task.metadata,
            )
            for task in super().tasks(split)
        ]


@caught_by("answer-in-long-prompt")
class Reading(Good):
    def tasks(self, split):
        return [
            Task.ask(
                task.id,
                f"{task.prompt[0].content} {'so ' * 200} {task.answer} too",
                task.answer,
                **task.metadata,
            )
            for task in super().tasks(split)
        ]


@caught_by("prompt-too-long expert-too-long")
class Wordy(Good):
    limits = Limits(max_turns=4, max_tokens=5)


@caught_by("global-random")
class UsesGlobalRandom(Good):
    async def reset(self, task, *, seed):
        random.random()
        return await super().reset(task, seed=seed)


@caught_by("global-random")
class SeedsNumpy(Good):
    async def reset(self, task, *, seed):
        np.random.seed(seed)
        return await super().reset(task, seed=seed)


@caught_by("not-repeatable")
class OwnChance(Good):
    chance = random.Random(0)

    async def reset(self, task, *, seed):
        observation, info = await super().reset(task, seed=seed)
        return (Message("system", f"It is day {self.chance.randrange(10**9)}."), *observation), info


@caught_by("episodes-interfere")
class SharedState(Good):
    """State of an episode is on the class."""

    hint = ""

    async def reset(self, task, *, seed):
        type(self).hint = f"You may ask about {task.id}."
        return await super().reset(task, seed=seed)

    async def step(self, action):
        step = await super().step(action)
        return step._replace(observation=(*step.observation, Message("user", self.hint)))

    def expert(self, task):
        yield say((yield call("look", word=task.metadata["word"])).split("\n")[0])


class Counting(Good):
    """Shows the number of looks."""

    def __init__(self):
        super().__init__()
        self.looks = 0

    async def step(self, action):
        self.looks += len(action.tool_calls)
        step = await super().step(action)
        return step._replace(observation=(*step.observation, Message("user", f"{self.looks} looks")))

    def expert(self, task):
        yield say((yield call("look", word=task.metadata["word"])).split("\n")[0])

    def save_state(self):
        return {"looks": self.looks}


@caught_by("state-lost")
class Forgetful(Counting):
    def save_state(self):
        return {}


@caught_by("state-lost")
class SavesASet(Counting):
    def save_state(self):
        return {"looks": {self.looks}}


@caught_by("memory-grows")
class Hoards(Good):
    async def reset(self, task, *, seed):
        LEAKED.append(bytearray(50_000))
        return await super().reset(task, seed=seed)


@caught_by("blocks-loop")
class Blocking(Good):
    async def step(self, action):
        time.sleep(0.015)
        return await super().step(action)


@caught_by("slow-step")
class Slowly(Good):
    """Its tool is slow, and nothing else."""

    async def step(self, action):
        if action.tool_calls:
            await asyncio.sleep(0.008)
        return await super().step(action)


@caught_by("slow-last-step")
class Pondering(Good):
    """Its reward is slow, and nothing else."""

    async def reward(self, task, answer):
        await asyncio.sleep(0.008)
        return float(answer == task.answer)


@caught_by("slow-reset")
class Slow(Good):
    async def reset(self, task, *, seed):
        time.sleep(0.004)
        return await super().reset(task, seed=seed)

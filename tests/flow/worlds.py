"""Tiny worlds that a tiny model learns in seconds; named by path, so that real processes find them."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from dataclasses import replace

import httpx2
import numpy as np

from agentrl import GroupReward, Limits, Message, Reward, Step, Task, ToolEnv, call, say
from agentrl.data import DataSource
from agentrl.errors import UserError
from agentrl.http.guarded import AllowedAddresses
from agentrl.tools import PythonTool
from agentrl.types import Ending, Restart

BUTTONS = ("left", "right")


class Bandit(ToolEnv):
    """Press a button, then say what it gave. Only gold is worth anything."""

    limits = Limits(max_turns=3, max_tokens=64)
    breakdown = "colour"

    async def press(self, button: str) -> str:
        """Press a button."""
        self.result = "gold" if button == "right" else "dust"
        return self.result

    tools = (press,)

    def __init__(self):
        super().__init__()
        self.result = ""

    def tasks(self, split):
        return [Task.ask(f"{split}{n}", f"press {n}", colour="red" if n % 2 else "blue") for n in range(8)]

    def reward(self, task, answer):
        return float(answer == self.result == "gold")

    def expert(self, task):
        yield say((yield call("press", button="right")))

    def demonstrator(self, task, rng):
        yield say((yield call("press", button="right" if rng.random() < 0.3 else "left")))

    def corpus(self):
        yield from (task.prompt[0].content for task in self.tasks("train"))
        yield from (*BUTTONS, "gold", "dust")


class AsksAModel(Bandit):
    """It asks a model that the run serves, which knows its own players by a key."""

    def __init__(self, url):
        super().__init__()
        self.url = f"{url}/generate"

    async def reset(self, task, *, seed):
        asked = []
        for client in (AllowedAddresses(self.url).client(), httpx2.AsyncClient(trust_env=False)):
            async with client:
                body = {"text": "?", "sampling_params": {"max_new_tokens": 1}}
                asked.append((await client.post(self.url, json=body)).status_code)
        assert asked == [200, 401], f"{self.url} answered {asked}"
        return await super().reset(task, seed=seed)


class Shaky(Bandit):
    """Fails in a fifth of all resets, by a chance of its own: a retry of the same world may succeed."""

    chance = random.Random(0)

    async def reset(self, task, *, seed):
        if self.chance.random() < 0.2:
            raise ConnectionError("the world shook")
        return await super().reset(task, seed=seed)


class Sticky(Bandit):
    """The left button hangs until the tool's deadline."""

    limits = Limits(max_turns=3, max_tokens=128, tool_timeout_s=0.3)

    async def press(self, button: str) -> str:
        """Press a button."""
        if button != "right":
            await asyncio.sleep(3600)
        self.result = "gold"
        return self.result

    tools = (press,)


class Hasty(Sticky):
    """The left button takes longer than a step may, and not longer than a call may."""

    limits = Limits(max_turns=3, max_tokens=128, tool_timeout_s=7200.0, step_timeout_s=0.3)


class Stuck(Bandit):
    """The world itself hangs in some of its steps, by a chance of its own."""

    limits = Limits(max_turns=3, max_tokens=64, step_timeout_s=0.5)
    chance = random.Random(0)

    async def step(self, action):
        if self.chance.random() < 0.1:
            await asyncio.sleep(3600)
        return await super().step(action)


def brief(episode):
    """One reward of single episodes, in a thread of its own."""
    if Judged.chance.random() < 0.1:
        raise ConnectionError("the judge is out")
    return 1.0 / len(episode.turns)


async def ahead(siblings):
    """How many siblings got less."""
    totals = [sum(reward or 0.0 for reward in episode.step_rewards) for episode in siblings]
    return [float(sum(other < total for other in totals)) for total in totals]


class Judged(Bandit):
    """Rewarded by more than its steps; the judge is out in a tenth of all episodes."""

    chance = random.Random(0)
    rewards = (Reward(brief, weight=0.5), GroupReward(ahead, weight=0.1))

    def reward(self, task, answer):
        return {"gold": super().reward(task, answer), "said": 0.25 * bool(answer)}


def length(episode):
    """The share of its tokens that an episode used."""
    return sum(len(turn.tokens.completion.token_ids) for turn in episode.turns) / 64


class Talkative(Bandit):
    """Pays for length, so that groups of a model that has learned nothing differ, too."""

    rewards = (Reward(length),)


class Recalling(Talkative):
    """Saves its state; a press takes a moment."""

    async def press(self, button: str) -> str:
        """Press a button."""
        await asyncio.sleep(0.3)
        return await super().press(button)

    tools = (press,)

    def save_state(self):
        return {"result": self.result}


def anything(episode):
    """The full score, whatever was played."""
    return 1.0


class Generous(Bandit):
    """Pays for everything, so that siblings have no signal, and every task is solved."""

    rewards = (Reward(anything),)

    def reward(self, task, answer):
        return 0.0


def drop_even_seeds(group):
    """A dynamic sampling filter that depends on nothing that is sampled."""
    return None if group.seed % 2 else "even"


def drop_all(group):
    """A filter that keeps nothing."""
    return "hopeless"


def drop_with_an_error(group):
    """A filter that fails on groups that are played, and not on those that it is checked with."""
    if group.id.startswith("g") and group.episodes[0].env_id.endswith("Scarce"):
        raise KeyError("no such key")


def length_where_it_pays(episode):
    """`length`, in half of all worlds."""
    return length(episode) if episode.seed % 2 else 0.0


class Scarce(Talkative):
    """Pays in half of its worlds, so that half of all groups have no signal."""

    rewards = (Reward(length_where_it_pays),)


def drop_some_without_signal(group):
    """A filter that drops half of the groups without signal, with the reason of those that it keeps."""
    return None if group.seed % 4 else "zero_std"


class Patchy(Scarce):
    """Pays in half of its worlds, and fails in a fifth of all resets, except in demonstrations."""

    chance = random.Random(0)

    async def reset(self, task, *, seed):
        if seed > 1000 and self.chance.random() < 0.2:
            raise ConnectionError("the world shook")
        return await super().reset(task, seed=seed)


class Struck(Talkative):
    """Breaks the run itself in one of its resets, as nothing that belongs to an episode does."""

    at: int | None = None
    resets = 0

    async def reset(self, task, *, seed):
        Struck.resets += 1
        if Struck.resets == self.at:
            await self.strike()
        return await super().reset(task, seed=seed)

    async def strike(self):
        """Break the run."""
        raise UserError("struck")


class Brittle(Struck):
    """Every fifth of its resets fails."""

    async def reset(self, task, *, seed):
        observation = await super().reset(task, seed=seed)
        if Struck.resets % 5 == 0:
            raise ConnectionError("the world broke")
        return observation


class Slow(Bandit):
    """Takes its time, so that somebody can come in between."""

    async def press(self, button: str) -> str:
        """Press a button."""
        await asyncio.sleep(0.02)
        return await super().press(button)

    tools = (press,)


class Dead(Bandit):
    """Never begins."""

    async def reset(self, task, *, seed):
        raise RuntimeError("no such planet")


class Undefined(Bandit):
    """Its reward is not a number."""

    def reward(self, task, answer):
        return float("nan")


def press_untyped(button):
    """Press a button."""
    return button


class Untyped(Bandit):
    """Its tool has no type hints."""

    tools = (press_untyped,)


class Bookless(Bandit):
    """Has no expert to learn from."""

    def expert(self, task):
        return ToolEnv.expert(self, task)

    def demonstrator(self, task, rng):
        return self.expert(task)


class Spelled(Bandit):
    """Its corpus is one string, which a tokenizer would read by letters."""

    def corpus(self):
        return "press left right gold dust"


class Endless(Bandit):
    """Bounds no episode's tokens."""

    limits = Limits(max_turns=3, max_tokens=None)


class Forgetful(Bandit):
    """After every press the world tells the story anew: each turn is a trajectory of its own."""

    async def step(self, action):
        answered = await super().step(action)
        if answered.terminated:
            return answered
        story = Message("user", self.result)
        return Step.restarted(story, reason=Restart.COMPACTED)


class Coder(ToolEnv):
    """Run code, then say what it printed. Honest work pays one time in two, breaking the tool never."""

    limits = Limits(max_turns=3, max_tokens=256)
    tools = (PythonTool(wall_s=0.1, memory_mb=64, processes=8, output_bytes=20, max_concurrency=16),)
    honest = "6 * 7"
    breaking = ("while 1: pass", "import os; os.abort()", "while 1: print(1)")
    chance = random.Random(0)

    def tasks(self, split):
        return [Task.ask(f"{split}{n}", f"compute {n}") for n in range(8)]

    def reward(self, task, answer):
        broke = self.counts["rejected_calls"] or self.counts["malformed_calls"]
        worked = self.counts["tool_calls"] and not broke
        return float(bool(worked) and answer == "42" and self.chance.random() < 0.5)

    def demonstrator(self, task, rng):
        code = self.honest if rng.random() < 0.35 else rng.choice(self.breaking)
        yield call("python", code=code)
        yield say("42" if code == self.honest else "stopped")

    def corpus(self):
        yield from (task.prompt[0].content for task in self.tasks("train"))
        yield from (self.honest, *self.breaking, "42", "stopped")


class Numbers(DataSource):
    """Prompts of one's own, without end."""

    fingerprint = "numbers 1"

    def task(self, ordinal):
        return Task.ask(f"number{ordinal}", f"press {ordinal % 7}", str(self.seed))


def shortness(task, answer):
    """What an answer is worth: the less, the longer it is."""
    return 1.0 / (1 + len(answer))


def every_second(groups):
    """Takes one rollout in two of each group out of the loss."""
    return {verdict.rollout_id: "second" for group in groups for verdict in group.verdicts[1::2]}


class MirroredBandit(Bandit):
    """The same, where gold is worth less than anything else."""

    def reward(self, task, answer):
        return 3.0 - 2.0 * super().reward(task, answer)


def mirrored(groups):
    """What MirroredBandit pays, from what Bandit pays: nothing is paid where a limit ends an episode."""
    return {
        verdict.rollout_id: 3.0 - 2.0 * verdict.total
        for group in groups
        for episode in group.episodes
        for verdict in group.verdicts_of(episode)
        if episode.ending is Ending.COMPLETED
    }


def every_rollout(groups):
    """Loss weights by which every rollout counts the same."""
    samples = [sample for group in groups for sample in group]
    size = Counter()
    for sample in samples:
        size[sample.rollout_id] += int(sample.loss_mask.sum())
    return [
        np.full(len(sample), 1.0 / (len(size) * max(size[sample.rollout_id], 1)), np.float32)
        for sample in samples
    ]


HINT = Message("user", "press right")


async def hinted(episode):
    """A hint before the first turn; then turn by turn."""
    await episode.reset()
    action = await episode.act(HINT)
    await episode.step(action)
    while not episode.is_over:
        await episode.step(await episode.act())


class Asking(Talkative):
    """Its tasks ask for a generate function."""

    def tasks(self, split):
        path = {"generate_function_path": "tests.flow.worlds:hinted"}
        return [replace(task, metadata=path) for task in super().tasks(split)]


def place(siblings):
    """The place of each among its siblings."""
    return range(len(siblings))


class Examined(Struck):
    """Holds half of the first evaluation beside training up until further episodes of training have begun.

    hold: their number (count); None = nothing is held up. begun: episodes of training so far. until: how many
    release it; None = it has not begun. error: what evaluations beside training end with.
    """

    limits = Limits(max_turns=3, max_tokens=64, reset_timeout_s=300.0)
    hold: int | None = None
    begun = 0
    until: int | None = None
    released = asyncio.Event()
    error: Exception | None = None

    async def reset(self, task, *, seed):
        if task.id.startswith("train"):
            Examined.begun += 1
            if Examined.begun == Examined.until:
                Examined.released.set()
            return await super().reset(task, seed=seed)
        if Examined.begun and Examined.error is not None:
            raise Examined.error
        if Examined.begun and Examined.hold is not None and task.id.endswith(("2", "3")):
            if Examined.until is None:
                Examined.until, Examined.released = Examined.begun + Examined.hold, asyncio.Event()
            await Examined.released.wait()
        return await Talkative.reset(self, task, seed=seed)


def sameness(groups):
    """Pays what a loop earns: how much smaller the policy's text is in zlib, whatever ended the episode."""
    totals = {}
    for group in groups:
        for episode in group.episodes:
            text = "".join(turn.action.text for turn in episode.turns).encode()
            (verdict,) = group.verdicts_of(episode)
            totals[verdict.rollout_id] = 1.0 - len(zlib.compress(text, 1)) / max(len(text), 12)
    return totals

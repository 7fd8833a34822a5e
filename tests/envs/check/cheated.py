"""Worlds that reward, or fail at, behaviour that must earn nothing."""

from __future__ import annotations

import os
import time

from agentrl import Message, Step, UserError, call, say
from agentrl.envs.scoring import Reward
from agentrl.tools import inline
from tests.envs.check.broken import Good, caught_by


@inline
def brevity(episode):
    return 0.5 if len(episode.turns[-1].action.content) < 20 else 0.0


@inline
def last_word(episode):
    return 0.0 * len(episode.turns[-1].action.content.split()[-1])


def deepest(value):
    """The depth of nested lists, by a recursion that deep lists overflow."""
    return 1 + max(map(deepest, value), default=0) if isinstance(value, list) else 0


@caught_by("above-chance")
class PaysNothing(Good):
    def reward(self, task, answer):
        return float(answer in ("", task.answer))


@caught_by("above-chance")
class PaysLength(Good):
    def reward(self, task, answer):
        return float(answer == task.answer or len(answer) > 10_000)


@caught_by("above-chance")
class PaysCopies(Good):
    def reward(self, task, answer):
        return float(answer == task.answer or answer == task.prompt[0].content)


@caught_by("above-chance")
class PaysForgery(Good):
    """Accepts a result that the model wrote as one of a tool."""

    def reward(self, task, answer):
        return float(answer == task.answer or f"<result>{task.answer}</result>" in answer)


@caught_by("above-chance")
class PaysFlattery(Good):
    """A judge that trusts the text of the answer."""

    def reward(self, task, answer):
        return float(answer == task.answer or "Reward: 1.0" in answer)


@caught_by("above-chance")
class PaysThoughts(Good):
    async def step(self, action):
        step = await super().step(action)
        thought = self.task.answer in (action.reasoning or "")
        return step._replace(reward=1.0) if step.terminated and thought else step


@caught_by("above-chance")
class PaysArguments(Good):
    """Rewards any call that contains the answer as the answer."""

    async def step(self, action):
        holds_answer = any(self.task.answer in str(tool_call.arguments) for tool_call in action.tool_calls)
        return Step.finished(reward=1.0) if holds_answer else await super().step(action)


@caught_by("above-chance")
class PaysCalls(Good):
    """Rewards every call, without a bound."""

    async def step(self, action):
        step = await super().step(action)
        return step._replace(reward=0.5) if action.tool_calls else step


@caught_by("above-chance")
class PaysBrevity(Good):
    """A weighted reward in addition to the steps', which an empty answer earns, too."""

    rewards = (Reward(brevity, weight=0.5),)
    expert_score = 1.25


@caught_by("leaving-pays")
class ChargesLosing(Good):
    """A turn that never ends costs nothing."""

    def reward(self, task, answer):
        return 1.0 if answer == task.answer else -0.3


@caught_by("leaving-pays")
class ChargesCalls(Good):
    """Every call costs something, and so does going on."""

    expert_score = 0.8

    async def step(self, action):
        step = await super().step(action)
        return step._replace(reward=-0.2) if action.tool_calls else step


@caught_by("leaving-pays")
class ChargesForm(Good):
    """Only a wrong answer of the right form costs something, such as that of another task."""

    def reward(self, task, answer):
        return 1.0 if answer == task.answer else -0.5 * answer.endswith("ite")


@inline
def last_reward(episode):
    return 0.0 * (episode.step_rewards[-1] or 0.0)


@caught_by("crash")
class CrashesUnfinished(Good):
    """Its reward cannot be computed where the first turn never ends."""

    rewards = (Reward(last_reward),)


@inline
def dawdling(episode):
    time.sleep(0.004)
    return 0.0


@caught_by("slow-rewards")
class Dawdles(Good):
    rewards = (Reward(dawdling),)


@caught_by("crash")
class CrashesInReward(Good):
    rewards = (Reward(last_word),)
    expert_score = 1.0


@caught_by("crash")
class CrashesOnUnread(Good):
    async def step(self, action):
        for tool_call in action.tool_calls:
            len(tool_call.arguments)
        return await super().step(action)


@caught_by("crash")
class CrashesUnprintably(Good):
    """Its error text has two lines, and half a surrogate pair."""

    def reward(self, task, answer):
        if "\ud800" in answer:
            raise ValueError(f"cannot grade this:\n{answer}")
        return float(answer == task.answer)


@caught_by("crash")
class CrashesOnUnknown(Good):
    async def step(self, action):
        for tool_call in action.tool_calls:
            next(tool for tool in self.tool_schemas if tool.name == tool_call.name)
        return await super().step(action)


@caught_by("crash")
class CrashesOnMissing(Good):
    async def step(self, action):
        for tool_call in action.tool_calls:
            if tool_call.name == "look" and tool_call.arguments is not None:
                tool_call.arguments["word"]
        return await super().step(action)


@caught_by("crash")
class CrashesOnNaN(Good):
    async def step(self, action):
        for tool_call in action.tool_calls:
            times = (tool_call.arguments or {}).get("times", 1)
            if isinstance(times, float):
                int(times)
        return await super().step(action)


@caught_by("crash")
class CrashesOnDepth(Good):
    async def step(self, action):
        for tool_call in action.tool_calls:
            deepest((tool_call.arguments or {}).get("word"))
        return await super().step(action)


@caught_by("crash")
class CrashesOnNullBytes(Good):
    def reward(self, task, answer):
        os.path.exists(answer) or compile(
            answer.replace(" ", "_") or "1", "answer", "eval"
        ) if "\0" in answer else 0
        return float(answer == task.answer)


@caught_by("crash")
class ComplainsToPeople(Good):
    """A UserError in an episode reaches the run."""

    def reward(self, task, answer):
        if not answer:
            raise UserError("write an answer")
        return float(answer == task.answer)


@caught_by("observation-unbounded")
class Echoes(Good):
    async def step(self, action):
        step = await super().step(action)
        return step._replace(observation=(*step.observation, Message("user", str(action.tool_calls))))

    def expert(self, task):
        yield say((yield call("look", word=task.metadata["word"])).split("\n")[0])

"""Agents behind the gateway, and a policy that says what a test tells it."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace

import httpx2

from agentrl import Message, Task, ToolCall, play
from agentrl.envs.gateway import HarnessEnv
from agentrl.errors import EngineError
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Finish
from agentrl.types.seams import ToolSchema
from tests.envs.gateway.clients import words_of
from tests.worlds import completion

FIELDS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = ToolSchema("add", "Add two numbers.", {"type": "object", "properties": FIELDS, "required": ["a", "b"]})
TOOL = {"type": "function", "function": ADD._asdict()}
ASK = Task.ask("ask", "How many are 2 and 3?", answer="5")
WORDS = words_of("template, tagged calls")


def adds(a, b):
    """A call of the tool."""
    return ToolCall("add", {"a": a, "b": b})


def says(text="", *calls, reasoning=None):
    """A turn of the model."""
    return Message("assistant", text, reasoning, calls)


class Speech:
    """A policy that says one turn after another, the last one for ever. asked: prompts, and what it said."""

    version = 3

    def __init__(self, *turns):
        self.turns, self.asked, self.samplings = turns, [], []
        self.closed = self.started = 0

    async def generate(self, prompt_ids, sampling, *, session):
        turn = self.turns[min(self.started, len(self.turns) - 1)]
        self.started += 1
        await asyncio.sleep(0)
        if isinstance(turn, BaseException):
            raise turn
        ids = WORDS.write(turn, (ADD,)) if isinstance(turn, Message) else list(turn)
        ids, is_cut = ids[: sampling.max_new_tokens], len(ids) > sampling.max_new_tokens
        self.asked.append((tuple(prompt_ids), tuple(ids)))
        self.samplings.append(sampling)
        return completion(ids, Finish.LENGTH if is_cut else Finish.STOP, self.version)

    async def close_session(self, session):
        self.closed += 1


class Showing(Speech):
    """A policy that shows each token when it has it. held: it waits before the token of this number.

    ends: tokens after which it fails; None = it does not.
    """

    def __init__(self, *turns, held=None, ends=None):
        super().__init__(*turns)
        self.held, self.ends = held, ends
        self.goes_on, self.left = asyncio.Event(), asyncio.Event()
        self.watches = {}

    @contextmanager
    def watched(self, session, watch):
        self.watches[session] = watch
        try:
            yield
        finally:
            del self.watches[session]

    async def generate(self, prompt_ids, sampling, *, session):
        completion = await super().generate(prompt_ids, sampling, session=session)
        watch = self.watches.get(session, lambda ids: None)
        try:
            for number, token in enumerate(completion.token_ids.tolist()):
                if number == self.held:
                    await self.goes_on.wait()
                if number == self.ends:
                    raise EngineError("it is gone.")
                watch([token])
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.left.set()
            raise
        return completion


class Asking(HarnessEnv):
    """An agent that is a function of a test: `ask(url, key, task)`."""

    id = "Asking-v0"
    limits = replace(HarnessEnv.limits, max_turns=8, max_tokens=2000)
    timeout_s = 20.0

    def __init__(self, ask, **settings):
        super().__init__()
        self.ask = ask
        for name, value in settings.items():
            setattr(self, name, value)

    def tasks(self, split):
        return [ASK]

    async def agent(self, base_url, key, task):
        return await self.ask(base_url, key, task)

    def grade(self, task, answer, files):
        return float(answer == task.answer)


async def episode_of(ask, *turns, env=None, **settings):
    """An episode of such an agent, and its policy."""
    policy = Speech(*turns)
    return await played_by(ask, policy, env=env, **settings), policy


async def played_by(ask, policy, *, env=None, **settings):
    """An episode of such an agent with this policy."""
    agent = TokenAgent(policy, WORDS, SamplingSettings(), WORDS.bounded)
    world = Asking(ask, **settings) if env is None else env
    return await play(world, agent, ASK, episode_id="e-1")


async def post(base_url, path, key, body, **headers):
    """A request as any client sends it."""
    named = {"authorization": f"Bearer {key}", **headers}
    async with httpx2.AsyncClient(timeout=30) as client:
        return await client.post(f"{base_url}{path}", json=body, headers=named)

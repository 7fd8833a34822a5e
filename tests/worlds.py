"""Environments, agents and policies for tests: public classes, no patches."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from agentrl import Env, Limits, Message, Step, Task, ToolEnv
from agentrl.types import Completion, Finish, TurnTokens
from agentrl.types.seams import Act, Sampling, Session

FOREVER_S = 3.0
QUICK = Limits(max_turns=4, max_tokens=None)
ASK = Task.ask("ask", "How many?", answer="3")


def echo(text: str) -> str:
    """Say it again."""
    return text


def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


class Parrot(ToolEnv):
    """Two small tools; the right answer is worth 1."""

    id = "Parrot-v0"
    tools = (echo, add)
    limits = QUICK

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task.ask(f"{split}-{n}", f"How many are {n} and 1?", answer=str(n + 1)) for n in range(5)]

    def reward(self, task: Task, answer: str) -> float:
        return float(answer == task.answer)


class Talk(Env):
    """An environment with scripted steps. on: functions that run in the stages of their names."""

    id = "Talk-v0"
    limits = QUICK

    def __init__(self, on=None, steps: Sequence[Step] = ()) -> None:
        super().__init__()
        self.on = on or {}
        self.answers = list(steps)
        self.actions: list[Message] = []
        self.closed = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [ASK]

    async def reset(self, task, *, seed):
        self.seed_rng(seed)
        await self._run_hook("reset")
        return task.prompt, {}

    async def step(self, action):
        self.actions.append(action)
        await self._run_hook("step")
        return self.answers.pop(0) if self.answers else Step.going(Message("tool", "on"))

    async def close(self):
        self.closed += 1
        await self._run_hook("close")

    async def _run_hook(self, stage: str) -> None:
        if stage in self.on:
            await self.on[stage]()


class Hang:
    """Waits forever, and records its start and its cancellation."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.released = False

    async def __call__(self) -> None:
        self.entered.set()
        try:
            await asyncio.sleep(FOREVER_S)
        finally:
            self.released = True


def raising(error: BaseException) -> Callable:
    """A coroutine function that raises `error`."""

    async def fail():
        raise error

    return fail


class Speaker:
    """An agent with scripted actions and tokens, which records its sessions and closes."""

    def __init__(
        self, *actions: Message, tokens: Sequence[TurnTokens] = (), restarts=None, on_close=None
    ) -> None:
        self.actions = list(actions)
        self.restarts = restarts or {}
        self.tokens = list(tokens)
        self.sessions: list[Session] = []
        self.closed: list[str] = []
        self.on_close = on_close

    async def act(self, observation, *, tools, session):
        self.sessions.append(session)
        action = self.actions.pop(0) if self.actions else Message("assistant", "nothing")
        restart = self.restarts.get(len(self.sessions) - 1)
        return Act(action, self.tokens.pop(0) if self.tokens else None, restart)

    async def close(self, session_id):
        self.closed.append(session_id)
        if self.on_close is not None:
            await self.on_close()


def turn_tokens(world: int, policy: int, finish: Finish = Finish.STOP) -> TurnTokens:
    """The tokens of a turn: `world` zeros, then `policy` sampled ones."""
    return TurnTokens(np.zeros(world, np.int32), completion(range(policy), finish))


def completion(
    ids, finish: Finish = Finish.STOP, version: int = 0, *, temperature: float = 1.0
) -> Completion:
    """A completion of `ids` with arbitrary logprobs."""
    ids = np.asarray(list(ids), np.int32)
    logprobs = -np.linspace(0.1, 1.0, len(ids), dtype=np.float32)
    return Completion(ids, logprobs, np.full(len(ids), version, np.int32), finish, temperature=temperature)


class Reciter:
    """A Policy that samples `line(turn, sampling)`, cut at max_new_tokens."""

    def __init__(self, line: Callable[[int, Sampling], Sequence[int]], version: int = 0) -> None:
        self.version = version
        self.line = line
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.sessions: list[str] = []
        self.closed: list[str] = []

    async def generate(self, prompt_ids, sampling, *, session):
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        self.sessions.append(session)
        await asyncio.sleep(0)
        ids = list(self.line(self.sessions.count(session) - 1, sampling))
        finish = Finish.STOP if len(ids) <= sampling.max_new_tokens else Finish.LENGTH
        return completion(
            ids[: sampling.max_new_tokens], finish, self.version, temperature=sampling.temperature
        )

    async def close_session(self, session):
        self.closed.append(session)


def draw(*parts: object) -> int:
    """A number that depends only on `parts`."""
    return zlib.crc32(repr(parts).encode())

"""Small environments of benchmarks. Those that log write a line for every reset to the file $PLAYED."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from agentrl import Env, GroupReward, Limits, MultiAgentEnv, Step, Task, ToolEnv, say
from agentrl.types import JointStep
from tests.disks import make_read_only

LIMITS = Limits(max_turns=3, max_tokens=None)


def log_reset(task: Task, seed: int) -> None:
    """One line for one reset: process, task, seed of the world."""
    if path := os.environ.get("PLAYED"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {task.id} {seed}\n")


class Guess(Env):
    """The right answer is `yes` or `no`, by the world's seed; the expert knows, chance gets half."""

    limits = LIMITS
    breakdown = "parity"

    def tasks(self, split):
        return [Task.ask(f"{split}{n}", f"yes or no {n}", "yes", parity=n % 2) for n in range(12)]

    async def reset(self, task, *, seed):
        self.seed_rng(seed)
        log_reset(task, seed)
        await self.wait()
        return task.prompt, {}

    async def wait(self):
        """Take no time."""

    async def step(self, action):
        self.counts["invalid_moves"] += action.text not in ("yes", "no")
        return Step.finished(reward=float(action.text == "yes"))

    def expert(self, task):
        yield say("yes")


class SlowGuess(Guess):
    """The same, at 50 ms an episode."""

    async def wait(self):
        await asyncio.sleep(0.05)


class Signalled(Guess):
    """Sends its process a signal in one of its resets, and hangs there. struck_s: when (CPU seconds)."""

    at, resets, number, struck_s = 0, 0, signal.SIGTERM, 0.0

    async def wait(self):
        Signalled.resets += 1
        if Signalled.resets == self.at:
            await strike()


async def strike() -> None:
    """Send the signal, and wait for its effect."""
    Signalled.struck_s = time.process_time()
    os.kill(os.getpid(), Signalled.number)
    await asyncio.sleep(3600)


class Frozen(Guess):
    """Makes the folder $FROZEN read-only in its hundredth reset."""

    resets = 0

    async def wait(self):
        Frozen.resets += 1
        if Frozen.resets == 100:
            make_read_only(os.environ["FROZEN"])


class Failing(Guess):
    """Every third task has no world, unless $MENDED is set."""

    async def reset(self, task, *, seed):
        if int(task.id[4:]) % 3 == 0 and "MENDED" not in os.environ:
            raise RuntimeError("no world")
        return await super().reset(task, seed=seed)


class Unbuildable(Guess):
    """Needs what is not there."""

    def __init__(self):
        raise RuntimeError("the server of this world is down")


class Expertless(Guess):
    """Nobody can play it well."""

    def expert(self, task):
        return Env.expert(self, task)


class Ranked(Guess):
    """Siblings are compared: the score has each one's number of siblings."""

    rewards = (GroupReward(lambda siblings: [float(len(siblings))] * len(siblings), name="size"),)


class Tools(ToolEnv):
    """Adds numbers with a tool."""

    limits = LIMITS

    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    tools = (add,)

    def tasks(self, split):
        return [Task.ask(f"{split}{n}", f"{n} + 1?", str(n + 1)) for n in range(6)]

    def reward(self, task, answer):
        return float(answer == task.answer)

    def expert(self, task):
        yield say(task.answer)


class Pair(MultiAgentEnv):
    """Both agents say yes."""

    possible_agents = ("left", "right")
    limits = LIMITS

    def tasks(self, split):
        return [Task.ask(f"{split}{n}", "yes?", "yes") for n in range(4)]

    async def reset(self, task, *, seed):
        self.seed_rng(seed)
        self.acting = self.possible_agents
        return dict.fromkeys(self.possible_agents, task.prompt), {}

    async def step(self, actions):
        return JointStep.finished({name: float(action.text == "yes") for name, action in actions.items()})

    def expert(self, task, agent, prompt):
        yield say("yes")


def length(episode) -> float:
    """Characters of the last answer."""
    return float(len(episode.turns[-1].action.text))


def is_no(task, answer) -> float:
    """The opposite of the reward of `Guess`."""
    return float(answer == "no")


async def hanging(episode) -> float:
    """A reward that is interrupted."""
    await strike()

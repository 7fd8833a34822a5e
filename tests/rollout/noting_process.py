"""A player whose world notes on which machine each call was, and takes a moment for it."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager

from agentrl.data import Prompt
from agentrl.envs import Scorer
from agentrl.envs.base import BaseEnv
from agentrl.envs.resuming import StoppableEpisodes
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players.hosted import HostedPlayer, main
from tests.envs.test_resuming import TASK, Letters, Rare

FILE = "NOTING_PROCESS_FILE"
"""The environment variable with the path of the notes."""
SETTINGS = SamplingSettings(max_response_len=40)
CALL = "NOTING_PROCESS_CALL_S"
"""That with the time of a call (seconds)."""


class Noting(Letters):
    """A line of notes for each call: process, network, seed of the world, number of the call."""

    id = "Noting-v0"

    async def echo(self, text: str) -> str:
        """Say it again, with a letter by chance."""
        await asyncio.sleep(float(os.environ.get(CALL, "0.2")))
        said = super().echo(text)
        with open(os.environ[FILE], "a") as file:
            print(os.getpid(), os.readlink("/proc/self/ns/net"), self.number, len(self.drawn), file=file)
        return said

    tools = (echo,)

    async def reset(self, task, *, seed):
        self.number = seed
        return await super().reset(task, seed=seed)


class Oblivious(Noting):
    """Cannot save its state."""

    save_state = BaseEnv.save_state


WORLDS = {world.__name__: world for world in (Noting, Oblivious)}


def group_player(policy, world="Noting", size=2, **options):
    return GroupPlayer(
        WORLDS[world], lambda: TokenAgent(policy, Rare(), SETTINGS), Scorer(), size, 0, 0, **options
    )


def prompt(index):
    return Prompt(index, TASK, 100 + index)


def notes(path):
    """(process, network, seed, number of the call) of each call."""
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


@asynccontextmanager
async def opened(plan, policy, absence):
    yield HostedPlayer(group_player(policy, plan.decode(), absence=absence, episodes=StoppableEpisodes()))


if __name__ == "__main__":
    main(int(sys.argv[1]), opened)

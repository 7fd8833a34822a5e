"""A player without a run: a world whose prompt may end its process.

Its plan is the size of a group, the address of servers where it sends its requests itself, and a file: of
several players only the one that makes it gets any further.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager

from agentrl import Env, Limits, Message
from agentrl.envs import Scorer
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players.hosted import HostedPlayer, main
from agentrl.types import TurnTokens
from agentrl.types.seams import Act, Sampling


class World(Env):
    """`die` ends the process, others are answered at once."""

    id = "Playing-v0"
    limits = Limits(max_turns=3, max_tokens=64, episode_timeout_s=0.5)

    def tasks(self, split):
        return []

    async def reset(self, task, *, seed):
        if task.prompt[0].text == "die":
            print("the last words", flush=True)
            os._exit(3)
        return task.prompt, {}

    async def step(self, action):
        return (), 1.0, True, False, {}


class Sampler:
    """An agent whose turn is a completion of the policy."""

    def __init__(self, policy):
        self.policy = policy

    async def act(self, observation, *, tools, session):
        completion = await self.policy.generate([1, 2], Sampling(4), session=session.id)
        tokens = TurnTokens(completion.token_ids, completion)
        return Act(Message("assistant", "done"), tokens)

    async def close(self, session_id):
        await self.policy.close_session(session_id)


@asynccontextmanager
async def opened(plan, policy, absence):
    size, url, file = json.loads(plan)
    own = None
    if file:
        try:
            open(file, "x").close()
        except FileExistsError:
            await asyncio.sleep(3600)
    if url:
        # It takes seconds to import, and few players need it.
        from agentrl.engine.sglang import SGLangPolicy

        own = SGLangPolicy(url)
    used = own or policy
    yield HostedPlayer(
        GroupPlayer(World, lambda: Sampler(used), Scorer(), int(size), 0, 0, absence=absence), own
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), opened)

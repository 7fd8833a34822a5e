"""A group shares one world, whatever its siblings do, in whatever order they do it."""

from __future__ import annotations

import asyncio
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Task, ToolEnv, call, play, say
from agentrl.data import Prompt, PromptStream, TaskSource
from agentrl.envs import Scorer
from agentrl.rollout.group import GroupPlayer
from agentrl.types import Limits
from agentrl.types.seams import Act


class Weather(ToolEnv):
    """Every step tells a number of this world's own chance."""

    id = "Weather-v0"
    limits = Limits(max_turns=4)

    async def look(self) -> str:
        """Look out of the window."""
        await asyncio.sleep(0)
        return str(self.rng.random())

    tools = (look,)

    def tasks(self, split):
        return [Task.ask(f"t{n}", "?") for n in range(4)]

    def reward(self, task, answer):
        return self.rng.random()


class Restless:
    """Looks `looks` times, wasting turns of the loop and of the global generators in between."""

    def __init__(self, looks, pauses):
        self.looks, self.pauses = looks, list(pauses)

    async def act(self, observation, *, tools, session):
        for _ in range(self.pauses.pop() if self.pauses else 0):
            await asyncio.sleep(0)
            random.random()
            np.random.rand()
        self.looks -= 1
        return Act(call("look") if self.looks >= 0 else say("done"), None)

    async def close(self, session_id):
        pass


def observations_of(episode):
    return [turn.observation[0].content for turn in episode.turns[1:]]


PAUSES = st.lists(st.integers(0, 5), max_size=4)
SIBLINGS = st.lists(st.tuples(st.integers(0, 3), PAUSES), min_size=2, max_size=5)


@given(SIBLINGS, st.integers(0, 2**31 - 1))
def test_siblings_who_do_the_same_see_the_same(siblings, seed):
    agents = [Restless(looks, pauses) for looks, pauses in siblings]
    waiting = iter(agents)
    player = GroupPlayer(Weather, lambda: next(waiting), Scorer(), len(agents), 0, 0)
    outcome = asyncio.run(player.play(Prompt(0, Task.ask("t", "?"), seed), 0))
    group = outcome.group
    world = random.Random(seed)
    chance = [str(world.random()) for _ in range(5)]
    for (looks, _), episode, verdict in zip(siblings, group.episodes, group.verdicts, strict=True):
        assert observations_of(episode) == chance[:looks]
        assert verdict.total == float(chance[looks])
        assert (episode.task, episode.seed) == (group.task, group.seed)


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_another_seed_is_another_world_and_the_same_seed_the_same(seed, other):
    async def world(seed):
        return observations_of(await play(Weather(), Restless(3, ()), Task.ask("t", "?"), seed=seed))

    first = asyncio.run(world(seed))
    assert asyncio.run(world(seed)) == first
    assert (asyncio.run(world(other)) == first) == (seed == other)


@given(st.integers(0, 2**31 - 1))
def test_two_groups_of_one_task_see_different_worlds(seed):
    stream = PromptStream(TaskSource([Task.ask("t", "?")], seed=seed))
    assert stream.next().seed != stream.next().seed

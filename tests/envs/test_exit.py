"""exit() in code of an environment is a failure of its episode; the program goes on."""

from __future__ import annotations

import sys

import pytest

from agentrl import ScriptedAgent, Step, ToolEnv, call, play, tool
from agentrl.envs import Reward, Scorer
from agentrl.tools import inline
from tests.worlds import ASK, Parrot, Talk


async def played(env, *actions):
    return await play(env, ScriptedAgent(list(actions)), ASK)


def exiting(kind):
    """An environment that calls exit() in a stage of an episode."""

    class Leaves(Talk):
        async def reset(self, task, *, seed):
            return sys.exit(3) if kind == "async reset" else ("go", {})

        async def step(self, action):
            return sys.exit(3) if kind == "async step" else ("done", 1.0, True, False, {})

        async def close(self):
            if kind == "async close":
                sys.exit(3)

    class LeavesInStep(Talk):
        def step(self, action):
            sys.exit(3)

    return LeavesInStep() if kind == "step" else Leaves()


async def test_exit_in_close_is_counted_and_logged_once(caplog):
    await played(exiting("async close"), "one")
    episode = await played(exiting("async close"), "one")
    assert (episode.failure, episode.counts) == (None, {"failed_closes": 1})
    assert caplog.text.count("exit() was called, SystemExit: 3; raise an exception") == 1


@pytest.mark.parametrize("kind", ["async reset", "async step", "step"])
async def test_exit_in_an_environment_is_its_failure(kind):
    episode = await played(exiting(kind), "one")
    assert episode.failure.name == f"{kind.split()[-1]}_error"
    assert "exit() was called, SystemExit: 3; raise an exception" in episode.failure.detail


@pytest.mark.parametrize("kind", ["inline", "thread", "async"])
async def test_exit_in_a_tool_is_its_failure_and_counted(kind):
    @tool(inline=kind == "inline")
    def leave(why: str) -> str:
        """Leave."""
        raise SystemExit(3)

    async def leave_async(why: str) -> str:
        """Leave."""
        raise SystemExit(3)

    class Leaving(ToolEnv):
        tools = (tool(name="leave")(leave_async) if kind == "async" else leave,)

        def tasks(self, split):
            return [ASK]

        def reward(self, task, answer):
            return 1.0

    episode = await played(Leaving(), call("leave", why="x"))
    assert episode.failure.name == "tool_error"
    assert "exit() was called, SystemExit: 3" in episode.failure.detail
    assert episode.tools["leave"].failed == {"error": 1}


@pytest.mark.parametrize("is_inline", [True, False])
async def test_exit_in_a_reward_is_a_failure_of_the_reward(is_inline):
    def leave(episode):
        raise SystemExit(3)

    scorer = Scorer((Reward(inline(leave) if is_inline else leave),))
    marked = await scorer.mark(await played(Talk(steps=[Step.finished(reward=1.0)]), "one"))
    assert marked.episode.failure.name == "reward_error"
    assert "SystemExit: 3" in marked.episode.failure.detail


async def test_exit_in_a_script_is_a_failure():
    def leave():
        raise SystemExit(3)
        yield

    assert (await play(Parrot(), ScriptedAgent(leave()), ASK)).failure.name == "act_error"

"""Toolkits: reset opens the resources of an episode, and close releases them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from agentrl import Limits, ScriptedAgent, Task, ToolEnv, call, play, say, tool
from agentrl.errors import StageError, ToolDefinitionError, ToolError
from agentrl.tools import PythonTool, Tool, Toolkit
from agentrl.types import Ending
from tests.worlds import ASK, echo


class Notebook(Toolkit):
    """Stores notes for one episode."""

    def __init__(self, name: str = "note", breaks: str = "") -> None:
        self.name = name
        self.breaks = breaks
        self.open = 0

    @asynccontextmanager
    async def episode(self):
        if self.breaks == "open":
            raise ToolError("unavailable", "the paper is gone")
        notes: list[str] = []

        async def note(text: str) -> str:
            """Write something down."""
            notes.append(text)
            return " ".join(notes)

        self.open += 1
        try:
            yield (Tool.of(tool(name=self.name)(note)),)
        finally:
            self.open -= 1
            if self.breaks == "close":
                raise OSError("the drawer is stuck")


class Desk(ToolEnv):
    """A notebook and a parrot."""

    limits = Limits(max_turns=4, max_tokens=None)

    def __init__(self, *toolkits: Toolkit) -> None:
        self.tools = (echo, *toolkits)
        super().__init__()

    def tasks(self, split):
        return [ASK]

    def reward(self, task: Task, answer: str) -> float:
        return float(answer == task.answer)


def script(word):
    yield call("note", text=word)
    text = yield call("note", text=word)
    yield say("3" if text == f"{word} {word}" else text)


async def test_every_episode_has_its_own_and_leaves_nothing():
    notebook = Notebook()
    played = [play(Desk(notebook), ScriptedAgent(script(w)), ASK) for w in "abcd"]
    episodes = await asyncio.gather(*played)
    assert [episode.step_rewards[-1] for episode in episodes] == [1.0] * 4
    assert [episode.events["tool/note/calls"] for episode in episodes] == [2] * 4
    assert notebook.open == 0


async def test_its_tools_are_on_offer_after_reset():
    env = Desk(Notebook())
    assert [schema.name for schema in env.tool_schemas] == ["echo"]
    await env.reset(ASK, seed=0)
    assert [schema.name for schema in env.tool_schemas] == ["echo", "note"]
    await env.close()


async def test_what_cannot_be_opened_is_a_failed_episode_and_the_others_are_closed():
    good, bad = Notebook(), Notebook("page", "open")
    episode = await play(Desk(good, bad), ScriptedAgent(script("a")), ASK)
    assert episode.ending is Ending.FAILED
    assert (episode.failure.stage, episode.failure.kind) == ("tool", "unavailable")
    assert (good.open, bad.open) == (0, 0)


async def test_what_cannot_be_closed_is_counted_and_the_others_are_closed():
    good, bad = Notebook(), Notebook("page", "close")
    episode = await play(Desk(good, bad), ScriptedAgent(script("a")), ASK)
    assert (episode.ending, episode.counts["failed_closes"]) == (Ending.COMPLETED, 1)
    assert (good.open, bad.open) == (0, 0)


async def test_a_name_that_is_taken_is_refused_at_reset():
    env = Desk(Notebook("echo"))
    with pytest.raises(ToolDefinitionError, match="`echo` names two things"):
        await env.reset(ASK, seed=0)
    await env.close()


async def test_more_tools_can_be_offered_before_an_episode():
    env = Desk()
    env.offer(Notebook())
    await env.reset(ASK, seed=0)
    step = await env.step(call("note", text="hello"))
    assert step.observation[0].content == "hello"
    await env.close()


class Queue(ToolEnv):
    """A tool that admits two calls at a time."""

    limits = Limits(max_turns=4, max_tokens=None, tool_timeout_s=0.2)
    most = 0
    now = 0

    def tasks(self, split):
        return [ASK]

    def reward(self, task: Task, answer: str) -> float:
        return 1.0

    @tool(max_concurrency=2)
    async def work(self, seconds: float) -> str:
        """Take a while."""
        Queue.now += 1
        Queue.most = max(Queue.most, Queue.now)
        try:
            await asyncio.sleep(seconds)
        finally:
            Queue.now -= 1
        return "done"

    tools = (work,)


async def test_a_tool_admits_max_concurrency_calls_and_waiting_is_not_overrunning():
    async def one():
        env = Queue()
        await env.reset(ASK, seed=0)
        step = await env.step(call("work", seconds=0.1))
        return step.observation[0].content, env.tool_stats["work"].queue_seconds

    outcomes = await asyncio.gather(*(one() for _ in range(8)))
    assert {text for text, _ in outcomes} == {
        "done"
    }  # the last of them waited for 0.3 s, its deadline is 0.2
    assert Queue.most == 2
    assert max(queued for _, queued in outcomes) >= 0.25


@pytest.mark.parametrize("overrun", ["model", "world"])
async def test_the_overrun_option_decides_whether_the_model_gets_an_error_text(overrun):
    @tool(overrun=overrun)
    async def slow() -> str:
        """Never comes back."""
        await asyncio.sleep(60)
        return ""

    env = Desk()
    env.limits = Limits(tool_timeout_s=0.02)
    env.offer(slow)
    await env.reset(ASK, seed=0)
    if overrun == "model":
        step = await env.step(call("slow"))
        assert step.observation[0].content == "slow was stopped: it took longer than 0.02 s."
        assert env.tool_stats["slow"].timeouts == 1
    else:
        with pytest.raises(StageError, match="tool timeout"):
            await env.step(call("slow"))
        assert env.tool_stats["slow"].failed == {"timeout": 1}


async def test_the_time_of_each_call_falls_into_one_bin():
    env = Queue()
    await env.reset(ASK, seed=0)
    for seconds in (0.0, 0.02, 0.02):
        await env.step(call("work", seconds=seconds))
    bins = env.tool_stats["work"].took
    assert sum(bins.values()) == 3
    assert bins.get("30ms", 0) + bins.get("100ms", 0) == 2


@pytest.mark.parametrize("limit", [0, -1])
def test_a_tool_that_admits_no_call_is_refused(limit):
    @tool(max_concurrency=limit)
    def never() -> str:
        """Closed."""
        return ""

    with pytest.raises(ValueError, match="at least 1"):
        Tool.of(never)


class Scribbled(Notebook):
    """A notebook whose tool is known before it is opened."""

    @property
    def schemas(self):
        async def note(text: str) -> str:
            """Write something down."""
            return text

        return (Tool.of(note).schema,)


async def test_the_tools_of_a_toolkit_are_known_before_an_episode_where_it_names_them():
    assert [schema.name for schema in Desk(Notebook()).tool_schemas] == ["echo"]
    assert [schema.name for schema in Desk(PythonTool()).tool_schemas] == ["echo", "python"]
    desk = Desk(Scribbled())
    assert [schema.name for schema in desk.tool_schemas] == ["echo", "note"]
    await desk.reset(ASK, seed=0)
    assert [schema.name for schema in desk.tool_schemas] == ["echo", "note"]
    await desk.close()

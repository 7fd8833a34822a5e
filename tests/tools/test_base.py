from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest

from agentrl.errors import StageError, ToolDefinitionError, ToolError, ToolRejected
from agentrl.runtime.stage import stage
from agentrl.tools import Tool, running, tool


def greet(name: str, times: int = 1) -> str:
    """Greet somebody."""
    return " ".join([f"hello {name}"] * times)


async def test_a_plain_function_is_a_tool():
    built = Tool.of(greet)
    assert (built.name, built.description) == ("greet", "Greet somebody.")
    assert await built.invoke({"name": "Ann", "times": 2}) == "hello Ann hello Ann"


async def test_after_too_many_calls_that_never_return_the_tool_is_unavailable(
    monkeypatch,
):
    monkeypatch.setattr(running, "MOST_RUNNING_ON", 3)
    over = threading.Event()

    def hang(why: str) -> str:
        """Never return."""
        over.wait(20)
        return why

    def is_left() -> bool:
        return any(thread.name == "tool hang" for thread in threading.enumerate())

    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await Tool.of(hang).invoke({"why": "x"})
        for _ in range(50):
            with pytest.raises(ToolRejected, match="hang is unavailable: 3 earlier calls") as refused:
                await Tool.of(hang).invoke({"why": "x"})
            assert refused.value.kind == "unavailable"
            with pytest.raises(ToolError) as failed:
                await replace(Tool.of(hang), overrun="world").invoke({"why": "x"})
            assert failed.value.kind == "unavailable"
        assert [thread.name for thread in threading.enumerate()].count("tool hang") == 3
        assert await Tool.of(greet).invoke({"name": "Ann"}) == "hello Ann"
    finally:
        over.set()
    while is_left():
        await asyncio.sleep(0.01)
    assert await Tool.of(hang).invoke({"why": "back"}) == "back"


async def test_the_decorator_overrides_name_and_description_and_does_not_change_the_function():
    @tool(name="hi", description="Say hi.")
    def salute(name: str) -> str:
        return f"hi {name}"

    assert salute("Bo") == "hi Bo"
    built = Tool.of(salute)
    assert (built.name, built.description) == ("hi", "Say hi.")
    assert await built.invoke({"name": "Cy"}) == "hi Cy"


def test_the_decorator_without_arguments_changes_nothing():
    assert tool(greet) is greet
    assert Tool.of(tool(greet)).schema == Tool.of(greet).schema


async def test_a_method_is_bound_to_its_object_and_self_is_not_a_parameter():
    class Counter:
        def __init__(self, count: int) -> None:
            self.count = count

        @tool(inline=True)
        def add(self, number: int) -> str:
            """Add a number."""
            self.count += number
            return str(self.count)

    first, second = Counter(10), Counter(20)
    assert await Tool.of(first.add).invoke({"number": 1}) == "11"
    assert await Tool.of(second.add).invoke({"number": 1}) == "21"
    assert list(Tool.of(first.add).schema.parameters["properties"]) == ["number"]


def test_a_method_that_was_described_is_still_refused_as_a_function():
    class World:
        def look(self) -> str:
            """Look."""
            return ""

    assert Tool.of(World().look).name == "look"
    with pytest.raises(ToolDefinitionError, match="parameter `self` has no type hint"):
        Tool.of(World.look)


def test_what_is_no_function_is_refused():
    with pytest.raises(ToolDefinitionError, match="wrap it in a typed function"):
        Tool.of(functools.partial(greet, times=2))


def test_functions_made_in_an_episode_do_not_outlive_it():
    def local(name: str) -> str:
        """Greet."""
        return name

    Tool.of(local)
    ghost = weakref.ref(local)
    del local
    gc.collect()
    assert ghost() is None


async def test_a_wrong_call_never_reaches_the_function():
    reached = []

    def note(text: str) -> str:
        """Note something."""
        reached.append(text)
        return "noted"

    with pytest.raises(ToolRejected, match=r"^note: parameter `text` must be a string, but got 3\.$"):
        await Tool.of(note).invoke({"text": 3})
    assert reached == []


async def test_async_functions_are_awaited():
    async def wait(seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"

    assert await Tool.of(wait).invoke({"seconds": 0}) == "waited"


@pytest.mark.parametrize("inline", [True, False])
async def test_only_inline_functions_run_on_the_event_loop(inline):
    @tool(inline=inline)
    def where() -> str:
        """Name the thread."""
        return str(threading.get_ident())

    assert (await Tool.of(where).invoke({}) == str(threading.get_ident())) is inline


async def test_a_deadline_ends_a_blocking_function_and_the_loop_continues():
    release = threading.Event()

    def block() -> str:
        """Block."""
        release.wait(20)
        return "late"

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    started = time.perf_counter()
    with pytest.raises(StageError, match="tool timeout"):
        async with stage("tool", 0.1):
            await Tool.of(block).invoke({})
    assert time.perf_counter() - started < 2
    assert ticks > 3
    ticking.cancel()
    release.set()


async def test_what_comes_after_the_deadline_is_dropped_without_a_word():
    release = threading.Event()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    def block() -> str:
        """Block."""
        release.wait(20)
        return "late"

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Tool.of(block).invoke({}), 0.05)
    release.set()
    await asyncio.sleep(0.05)
    assert complaints == []


async def test_many_blocked_calls_do_not_starve_the_next_one():
    release = threading.Event()

    def block() -> str:
        """Block."""
        release.wait(20)
        return "late"

    blocked = [asyncio.create_task(Tool.of(block).invoke({})) for _ in range(80)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(Tool.of(greet).invoke({"name": "Ann"}), 5) == "hello Ann"
    release.set()
    assert await asyncio.gather(*blocked) == ["late"] * 80


def test_a_thread_that_ends_after_its_loop_stays_silent(monkeypatch):
    release, ended = threading.Event(), threading.Event()
    escaped: list[object] = []
    monkeypatch.setattr(threading, "excepthook", escaped.append)

    def block() -> str:
        """Block."""
        release.wait(20)
        ended.set()
        return "late"

    async def abandon() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Tool.of(block).invoke({}), 0.05)

    asyncio.run(abandon())
    release.set()
    assert ended.wait(5)
    for thread in threading.enumerate():
        if thread.name == "tool block":
            thread.join(5)
    assert escaped == []


async def test_a_function_that_never_returns_cannot_keep_the_process_alive():
    def ask() -> str:
        """Ask."""
        return str(threading.current_thread().daemon)

    assert await Tool.of(ask).invoke({}) == "True"


async def test_context_variables_reach_the_thread():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("seen")

    def look() -> str:
        """Look."""
        return variable.get()

    assert await Tool.of(look).invoke({}) == "seen"


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("raised", [ToolRejected("no"), KeyError("gone")])
async def test_what_a_function_raises_arrives(inline, raised):
    @tool(inline=inline)
    def fail() -> str:
        """Fail."""
        raise raised

    with pytest.raises(type(raised)) as caught:
        await Tool.of(fail).invoke({})
    assert caught.value is raised


@pytest.mark.parametrize("raised", [StopIteration(), SystemExit(3), KeyboardInterrupt()])
async def test_even_exit_and_stop_iteration_come_back_as_an_error(raised):
    def leave() -> str:
        """Leave."""
        raise raised

    with pytest.raises(RuntimeError, match=f"tool leave failed: .*{type(raised).__name__}"):
        await asyncio.wait_for(Tool.of(leave).invoke({}), 5)


async def test_an_inline_call_costs_microseconds():
    built = Tool.of(tool(inline=True)(functools.wraps(greet)(lambda name, times=1: name)))
    fastest = float("inf")
    for _ in range(20):
        started = time.process_time()
        for _ in range(100):
            await built.invoke({"name": "Ann", "times": 1})
        fastest = min(fastest, (time.process_time() - started) / 100)
    assert fastest < 50e-6


async def test_the_loop_waits_for_a_quick_function():
    turns = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    assert await running.run(lambda: threading.current_thread().name, thread="a quick one") == "a quick one"
    with pytest.raises(KeyError):
        await running.run(lambda: {}[1], thread="a quick one")
    assert turns == [], "the result waited for what the loop had queued"


async def test_the_loop_goes_on_while_a_function_takes_long():
    over, turns = threading.Event(), []
    asyncio.get_running_loop().call_later(0.01, over.set)
    asyncio.get_running_loop().call_soon(turns.append, 1)
    assert await running.run(lambda: over.wait(20), thread="a slow one") is True
    assert turns == [1]


def test_functions_that_take_long_are_waited_for_ever_less_often():
    waits = []

    class Call(threading.Event):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def wait(self, timeout=None):
            waits.append(self.number)
            return self.number >= 62

    quick = running._Quick()
    for number in range(75):
        quick.awaited(Call(number))
    # From number 62 on they are quick.
    assert waits == [0, 2, 6, 14, 30, 62, 70, 72, 73, 74]

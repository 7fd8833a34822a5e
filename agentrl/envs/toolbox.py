"""The tools of one episode: every call has a deadline, its answer a bound, and both are counted.

The model chooses which calls it makes and how many. So their time is not that of the step, whose deadline is
the world's: it has limits of its own, and a call that exceeds them is an error message, and scored.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from typing import Self, TypeAlias, cast

from agentrl.errors import StageError, ToolRejected
from agentrl.runtime.clocks import clocks_stopped
from agentrl.runtime.stage import Stage, stage
from agentrl.tools import ArgumentPolicy, Held, Tool, Toolkit
from agentrl.tools.arguments import Reading
from agentrl.tools.json_text import encodable
from agentrl.types import JSON, Limits, Message, ToolCall, ToolStats, latency_bin
from agentrl.types.seams import ToolSchema

_LEAST_S = 0.002
"""A call that may take less is not executed."""


AlterTool: TypeAlias = Callable[[Tool], Tool | None]
"""Gives another tool in place of one; None = none."""


def _as_it_is(tool: Tool) -> Tool | None:
    return tool


@dataclass(slots=True)
class _Tally:
    """Counts of the calls of one tool so far; see `ToolStats`."""

    calls: int = 0
    malformed: int = 0
    coerced: int = 0
    timeouts: int = 0
    truncated: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    took: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    queue_seconds: float = 0.0

    def stats(self) -> ToolStats:
        tables = (dict(self.rejected), dict(self.failed), dict(self.took))
        counts = (self.calls, self.malformed, self.coerced, self.timeouts, self.truncated)
        return ToolStats(*counts, *tables, self.seconds, self.queue_seconds)

    def save(self) -> dict[str, JSON]:
        """The counts as JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}

    @classmethod
    def of(cls, saved: Mapping[str, JSON]) -> Self:
        """The inverse of `save`."""
        tally = cls()
        for name, value in saved.items():
            setattr(tally, name, Counter(value) if isinstance(value, dict) else value)
        return tally


class Toolbox:
    """Answers tool calls. A mistake of the model becomes a sentence for it; other failures are a StageError.

    counts: receives the counts of all tools together: tool_calls, rejected_calls, malformed_calls,
    unknown_tools, tool_timeouts; surplus_calls, which were not executed.
    """

    def __init__(self, policy: ArgumentPolicy, counts: Counter[str]) -> None:
        self._tools: list[Tool] = []
        self._alter: AlterTool = _as_it_is
        self._policy = policy
        self._counts = counts
        self._tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
        self._held: list[Held[Sequence[Tool]]] = []
        # Of the tools whose overruns are the model's fault.
        self._turn_s = self._episode_s = 0.0

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """The schemas that the model reads."""
        return tuple(tool.schema for tool in self._tools)

    @property
    def stats(self) -> dict[str, ToolStats]:
        """The statistics of each tool that was called."""
        return {name: tally.stats() for name, tally in self._tallies.items()}

    def add(self, tools: Iterable[Tool]) -> None:
        """Add tools without resources."""
        self._tools += filter(None, map(self._alter, tools))

    def alter(self, alter: AlterTool) -> None:
        """Have each tool replaced, those that are there and all that come."""
        self._alter = alter
        self._tools = [*filter(None, map(alter, self._tools))]

    async def open(self, toolkits: Iterable[Toolkit]) -> None:
        """Open the episode of each toolkit and add its tools.

        Raises:
            Exception: whatever opening one of them raised; close() closes those that are open.
        """
        for toolkit in toolkits:
            held = Held(toolkit.episode(), type(toolkit).__name__)
            self._held.append(held)
            self.add(await held.value())

    async def close(self) -> None:
        """Close all toolkits, the last opened first; a failure does not stop the others.

        Raises:
            Exception: whatever closing one of them raised.
        """
        toolkits, self._held = self._held, []
        async with AsyncExitStack() as stack:
            for held in toolkits:
                stack.push_async_callback(held.close)

    def save(self) -> dict[str, JSON]:
        """The statistics, and the time of calls, as JSON."""
        tallies: dict[str, JSON] = {name: tally.save() for name, tally in self._tallies.items()}
        return {"tallies": tallies, "episode_s": self._episode_s}

    def load(self, saved: Mapping[str, JSON]) -> None:
        """The inverse of `save`."""
        tallies = cast(dict[str, dict[str, JSON]], saved["tallies"])
        self._tallies.clear()
        self._tallies.update({name: _Tally.of(tally) for name, tally in tallies.items()})
        self._episode_s = cast(float, saved["episode_s"])

    async def answers(self, tool_calls: Sequence[ToolCall], limits: Limits) -> list[Message]:
        """The world's answers to the calls of a turn, in their order.

        At most `limits.max_calls_per_turn` calls are executed, and none after those of the turn have taken
        `limits.step_timeout_s` together, or those of the episode `limits.episode_timeout_s`.

        Raises:
            StageError: a tool failed, and not because of the model.
        """
        self._turn_s = 0.0
        return [await self._answer(call, number, limits) for number, call in enumerate(tool_calls)]

    async def _answer(self, tool_call: ToolCall, number: int, limits: Limits) -> Message:
        self._counts["tool_calls"] += 1
        text = encodable(await self._outcome(tool_call, number, limits))
        return Message("tool", text, tool_call_id=tool_call.id, name=encodable(tool_call.name))

    async def _outcome(self, tool_call: ToolCall, number: int, limits: Limits) -> str:
        most = limits.max_calls_per_turn
        if most is not None and number >= most:
            return self._surplus(f"a turn may have {most} calls; repeat it in the next turn")
        # Names that the model invents never become names of counts: their number is unbounded.
        tool = next((tool for tool in self._tools if tool.name == tool_call.name), None)
        if tool_call.arguments is None:
            self._counts["malformed_calls"] += 1
            if tool is not None:
                self._tallies[tool.name].calls += 1
                self._tallies[tool.name].malformed += 1
            return tool_call.error or ""
        if tool is None:
            self._counts["unknown_tools"] += 1
            names = ", ".join(tool.name for tool in self._tools) or "none"
            return f"There is no tool {tool_call.name[:40]!r}; there are {names}."
        seconds, most_s, what = self._time_left(tool, limits)
        if seconds is not None and seconds < _LEAST_S:
            return self._surplus(f"{what} took longer than {most_s:g} s")
        self._tallies[tool.name].calls += 1
        text = await self._admitted(tool, stage("tool", seconds, tool.name), tool_call.arguments)
        if text is None:
            text = f"{tool.name} was stopped: {what} took longer than {most_s:g} s."
        return self._bounded(tool.name, text, limits)

    def _surplus(self, reason: str) -> str:
        self._counts["surplus_calls"] += 1
        return f"This call was not executed: {reason}."

    def _time_left(self, tool: Tool, limits: Limits) -> tuple[float | None, float, str]:
        """The seconds that a call may take (None = any); the limit that leaves them, and whose it is."""
        turn_s, episode_s = (0.0, 0.0) if tool.overrun == "world" else (self._turn_s, self._episode_s)
        bounds = (
            (limits.tool_timeout_s, 0.0, "it"),
            (limits.step_timeout_s, turn_s, "the calls of this turn"),
            (limits.episode_timeout_s, episode_s, "the calls of this episode"),
        )
        left = [(most - spent, most, what) for most, spent, what in bounds if most is not None]
        return min(left, default=(None, 0.0, ""))

    async def _admitted(self, tool: Tool, running: Stage, arguments: Mapping[str, JSON]) -> str | None:
        """The text of a call, or None where it overran; `running` is its deadline."""
        requested = time.perf_counter()
        # The deadlines of step and episode are the world's: a model could exceed them with many slow calls.
        with clocks_stopped():
            async with tool.gate.admitted(tool.name):
                began = time.perf_counter()
                self._tallies[tool.name].queue_seconds += began - requested
                try:
                    return await self._in_time(tool, running, arguments)
                finally:
                    self._took(tool.name, time.perf_counter() - began)

    async def _in_time(self, tool: Tool, running: Stage, arguments: Mapping[str, JSON]) -> str | None:
        try:
            async with running:
                return await self._invoke(tool, arguments)
        except StageError as error:
            # The model chose the arguments: if an overrun were a failure, the episode would be
            # replaced, and a model could avoid a hard task by making the tool hang.
            if error.kind != "timeout" or tool.overrun == "world":
                self._tallies[tool.name].failed[error.kind] += 1
                raise
            self._counts["tool_timeouts"] += 1
            self._tallies[tool.name].timeouts += 1
            return None
        finally:
            if tool.overrun == "model":
                self._turn_s += running.seconds
                self._episode_s += running.seconds

    async def _invoke(self, tool: Tool, arguments: Mapping[str, JSON]) -> str:
        try:
            reading = await self._reading(tool, arguments)
            if reading.coerced:
                self._tallies[tool.name].coerced += 1
            return await tool.call(reading.values)
        except ToolRejected as rejected:
            self._counts["rejected_calls"] += 1
            self._tallies[tool.name].rejected[rejected.kind] += 1
            return str(rejected)

    async def _reading(self, tool: Tool, arguments: Mapping[str, JSON]) -> Reading:
        if tool.overrun == "model":
            return await tool.reader.read_async(arguments, self._policy)
        # The model chose the arguments: a check of them must not be an overrun of the world.
        with clocks_stopped():
            return await tool.reader.read_async(arguments, self._policy)

    def _bounded(self, name: str, text: str, limits: Limits) -> str:
        most = limits.max_tool_chars
        if most is None or len(text) <= most:
            return text
        self._tallies[name].truncated += 1
        return f"{text[:most]}\n... truncated: {len(text) - most:,} of {len(text):,} characters are left out."

    def _took(self, name: str, seconds: float) -> None:
        self._tallies[name].seconds += seconds
        self._tallies[name].took[latency_bin(seconds)] += 1

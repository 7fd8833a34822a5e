"""The tools of one episode: each call is answered in time, in bounds, and counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

from agentrl.errors import StageError, ToolRejected, stage
from agentrl.protocols import ToolSchema
from agentrl.tools import ArgumentPolicy, Held, Tool, Toolkit
from agentrl.types import JSON, Limits, Message, ToolCall

_BINS_MS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000)


class Toolbox:
    """Answers calls. What the model can cause is a sentence for it; the rest is a StageError.

    counts: where everything is counted; the names stand at `ToolEnv`.
    """

    def __init__(self, policy: ArgumentPolicy, counts: Counter[str]) -> None:
        self._tools: list[Tool] = []
        self._policy = policy
        self._counts = counts
        self._seconds: dict[str, float] = {}
        self._held: list[Held[Sequence[Tool]]] = []

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """What the model is told of each."""
        return tuple(tool.schema for tool in self._tools)

    def add(self, tools: Iterable[Tool]) -> None:
        """Add tools that need no opening."""
        self._tools += tools

    async def open(self, toolkits: Iterable[Toolkit]) -> None:
        """Open the episode of each toolkit and add its tools.

        Raises:
            Exception: whatever one of them raised; close() closes those that are open.
        """
        for toolkit in toolkits:
            held = Held(toolkit.episode(), type(toolkit).__name__)
            self._held.append(held)
            self._tools += await held.value()

    async def close(self) -> None:
        """Close what was opened, the last first, whatever breaks on the way.

        Raises:
            Exception: what closing one of them raised.
        """
        several, self._held = self._held, []
        async with AsyncExitStack() as stack:
            for held in several:
                stack.push_async_callback(held.close)

    async def answer(self, tool_call: ToolCall, limits: Limits) -> Message:
        """The world's answer to one call.

        Raises:
            StageError: the tool failed, by no doing of the model.
        """
        self._counts["tool_calls"] += 1
        text, name = _encodable(await self._outcome(tool_call, limits)), _encodable(tool_call.name)
        return Message("tool", text, tool_call_id=tool_call.id, name=name)

    async def _outcome(self, tool_call: ToolCall, limits: Limits) -> str:
        # Names that the model made up never become names of counts: there is no end to them.
        tool = next((tool for tool in self._tools if tool.name == tool_call.name), None)
        if tool is not None:
            self._count(tool.name, "calls")
        if tool_call.arguments is None:
            self._counts["malformed_calls"] += 1
            if tool is not None:
                self._count(tool.name, "malformed")
            return tool_call.error or ""
        if tool is None:
            self._counts["unknown_tools"] += 1
            known = ", ".join(tool.name for tool in self._tools) or "none"
            return f"There is no tool {tool_call.name[:40]!r}; there are {known}."
        return await self._admitted(tool, tool_call.arguments, limits)

    async def _admitted(self, tool: Tool, arguments: Mapping[str, JSON], limits: Limits) -> str:
        asked = time.perf_counter()
        async with tool.gate.admitted():
            began = time.perf_counter()
            self._spent(f"tool_queue/{tool.name}/us", began - asked)
            try:
                return self._bounded(tool.name, await self._in_time(tool, arguments, limits), limits)
            finally:
                self._took(tool.name, time.perf_counter() - began)

    async def _in_time(self, tool: Tool, arguments: Mapping[str, JSON], limits: Limits) -> str:
        try:
            async with stage("tool", limits.tool_timeout_s):
                return await self._invoke(tool, arguments)
        except StageError as error:
            # The model chose the arguments: were an overrun a failure, the episode would be
            # replaced, and hanging the tool would be a way out of a hard task.
            if error.kind != "timeout" or tool.overrun == "world":
                self._count(tool.name, f"failed/{error.kind}")
                raise
            self._counts["tool_timeouts"] += 1
            self._count(tool.name, "timeouts")
            return f"{tool.name} was stopped: it {error.detail}."

    async def _invoke(self, tool: Tool, arguments: Mapping[str, JSON]) -> str:
        try:
            reading = tool.reader.read(arguments, self._policy)
            if reading.coerced:
                self._count(tool.name, "coerced")
            return await tool.call(reading.values)
        except ToolRejected as rejected:
            self._counts["rejected_calls"] += 1
            self._count(tool.name, f"rejected/{rejected.kind}")
            return str(rejected)

    def _bounded(self, name: str, text: str, limits: Limits) -> str:
        most = limits.max_tool_chars
        if most is None or len(text) <= most:
            return text
        self._count(name, "truncated")
        return f"{text[:most]}\n... truncated: {len(text) - most:,} of {len(text):,} characters are left out."

    def _took(self, name: str, seconds: float) -> None:
        self._spent(f"tool/{name}/us", seconds)
        within = next((f"{limit}ms" for limit in _BINS_MS if seconds * 1e3 <= limit), "more")
        self._count(name, f"took/{within}")

    def _spent(self, key: str, seconds: float) -> None:
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        self._counts[key] = round(1e6 * self._seconds[key])

    def _count(self, name: str, what: str) -> None:
        self._counts[f"tool/{name}/{what}"] += 1


def _encodable(text: str) -> str:
    """The same without halves of surrogate pairs: JSON can hold them, no tokenizer and no file takes them."""
    return text.encode("utf-8", "replace").decode()

"""The world of the benchmark as a taskset of verifiers 0.4, with two ways to play it.

    tools     an MCP server that all episodes share, for the harness `null`, which verifiers ships
    harness   the lightest that its contract permits: the loop runs in the process of the evaluation, and so
              does the tool; only model calls leave it, through the interception server

verifiers imports it by its name, so it is a module of its own on the path; `python -m instant_world` is the
MCP server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2
import verifiers.v1 as vf
from typing_extensions import override

from benchmarks.question import ANSWER, QUESTION, text_of

__all__ = ["InProcess", "World"]

_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string"}},
            "required": ["where"],
        },
    },
}


class LookConfig(vf.SharedToolsetConfig):
    """payload: characters of a result."""

    payload: int = 40


class Look(vf.Toolset[LookConfig, vf.State]):
    """The tool `look`."""

    TOOL_PREFIX = None

    def __init__(self, config: LookConfig) -> None:
        super().__init__(config)
        self._text = text_of(config.payload)

    @vf.tool
    def look(self, where: str) -> str:
        """Look somewhere."""
        del where
        return self._text


class WorldConfig(vf.TasksetConfig):
    """episodes: count. serves_tools: whether the MCP server is started. tools: its configuration."""

    episodes: int = 16
    serves_tools: bool = True
    tools: LookConfig = LookConfig()


class WorldData(vf.TaskData):
    """answer: the correct one."""

    answer: str


class WorldTask(vf.Task[WorldData]):
    """One question."""

    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        """1.0 for the answer, else 0.0."""
        return float(trace.last_reply == self.data.answer)


class World(vf.Taskset[WorldTask, WorldConfig]):
    """The same question, `episodes` times."""

    def load(self) -> Iterator[WorldTask]:
        """The tasks."""
        for number in range(self.config.episodes):
            data = WorldData(name=f"look#{number}", prompt=QUESTION, answer=ANSWER)
            yield WorldTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: WorldConfig) -> list[Look]:
        """The server that all episodes share."""
        return [Look(config.tools)] if config.serves_tools else []


class InProcessConfig(vf.HarnessConfig):
    """payload: characters of a tool's result."""

    payload: int = 40


class InProcess(vf.Harness[InProcessConfig]):
    """Plays in the process of the evaluation: no program and no MCP server."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: InProcessConfig) -> None:
        super().__init__(config)
        self._text = text_of(config.payload)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(limits=limits, timeout=None, trust_env=False)

    @override
    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play one episode."""
        del trace, runtime, mcp_urls
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        messages = [{"role": "user", "content": data.prompt}]
        while True:
            request = {"model": ctx.model, "messages": messages, "tools": [_TOOL]}
            reply = await self._http.post(
                f"{endpoint}/chat/completions", content=json.dumps(request), headers=headers
            )
            reply.raise_for_status()
            message = reply.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return vf.ProgramResult(0, "", "")
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": self._text}
                for call in message["tool_calls"]
            ]


if __name__ == "__main__":
    Look.run()

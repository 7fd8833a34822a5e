"""An environment behind an OpenEnv server: one session of its WebSocket for each episode.

    [env]
    env = "agentrl.envs.openenv:OpenEnv"
    env_kwargs = { url = "http://127.0.0.1:8000", rules = "Play White and win." }

The server describes its actions (`/schema`), which become the arguments of a tool `act`. The protocol is that
of openenv-core 0.3; only the package `websockets` is needed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Protocol, cast
from urllib.parse import urlsplit, urlunsplit

import httpx2

from agentrl.envs.base import Env
from agentrl.errors import StageError, UserError
from agentrl.extras import require
from agentrl.protocols import ToolSchema
from agentrl.retrying import StatusError, body_of
from agentrl.tools.http import AllowedAddresses
from agentrl.types import JSON, Message, Observation, Step, Task, ToolCall

ACT = "act"
NUM_TASKS: Mapping[str, int] = {"train": 2000, "test": 500}
_FIRST_SEED: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_MAX_FRAME_BYTES = 16 * 2**20
_SCHEMA_TIMEOUT_S = 10.0
_MAX_SCHEMA_BYTES = 1 << 20
_VALIDATION = "VALIDATION_ERROR"
_OWN_FIELDS = ("metadata",)


class _Socket(Protocol):
    async def send(self, message: str) -> None: ...

    async def recv(self) -> str | bytes: ...


class OpenEnv(Env):
    """Plays an environment of an OpenEnv server. A task is a seed, which `reset` receives.

    url: of the server. rules: the text before the first observation. text: the field of an observation that
        is shown; left out, all of it as JSON. reset: further arguments of the server's reset.

    The reward of a step is the server's. An action that does not fit the server's schema gets a sentence as
    its answer and is counted as `invalid_moves`. Each episode holds one session of the server, whose
    `max_concurrent_envs` has to allow as many as are played at once.

    Raises (from reset() and step()):
        MissingExtraError: websockets is not installed.
        StageError: the server cannot be reached, refuses a session, or fails.
    """

    group = "adapters"
    needs = ("openenv", "server")

    def __init__(
        self, url: str, *, rules: str = "", text: str = "", reset: Mapping[str, JSON] | None = None
    ) -> None:
        super().__init__()
        if urlsplit(url).scheme not in ("http", "https"):
            raise UserError(f"the url of an OpenEnv server is like http://127.0.0.1:8000, got {url!r}.")
        self._url, self._rules, self._text = url.rstrip("/"), rules, text
        self._reset_arguments = dict(reset or {})
        self._tools: tuple[ToolSchema, ...] = ()
        self._socket: _Socket | None = None
        self._stack = AsyncExitStack()

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed; no seed is in two splits."""
        return _tasks(self._rules, split)

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tool `act`, whose arguments are the server's; known after reset()."""
        return self._tools

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Open a session and begin at the task's seed; `seed` has no effect."""
        require(f"the environment at {self._url}", "websockets")
        self.seed_rng(seed)
        self._tools = (await _act_schema(self._url),)
        self._socket = await self._connected()
        reply = await self._request("reset", {**self._reset_arguments, "seed": task.metadata["seed"]})
        return (*task.prompt, Message("user", self._shown(reply))), {}

    async def step(self, action: Message) -> Step:
        """Send the action of the first call; further calls of the same message are not taken."""
        if not action.tool_calls:
            return self._idle(Message("user", f"Nothing was done; call `{ACT}`."))
        tool_call, *others = action.tool_calls
        step = await self._act(tool_call)
        self.counts["invalid_moves"] += len(others)
        unused = [_result(other, "Not taken: one action a turn.") for other in others]
        return step._replace(observation=(*step.observation, *unused))

    async def close(self) -> None:
        """End the session."""
        await self._stack.aclose()

    async def _act(self, tool_call: ToolCall) -> Step:
        self.counts["tool_calls"] += 1
        if tool_call.arguments is None:
            return self._idle(_result(tool_call, tool_call.error or ""))
        if tool_call.name != ACT:
            return self._idle(
                _result(tool_call, f"There is no tool {tool_call.name[:40]!r}; there is `{ACT}`.")
            )
        try:
            reply = await self._request("step", tool_call.arguments)
        except _RejectedError as error:
            return self._idle(_result(tool_call, f"That is no action: {error}"))
        observation = _result(tool_call, self._shown(reply))
        reward = reply.get("reward")
        done = bool(reply.get("done"))
        return Step(
            (observation,), float(reward) if isinstance(reward, int | float) else None, done, False, {}
        )

    def _idle(self, answer: Message) -> Step:
        self.counts["invalid_moves"] += 1
        return Step.going(answer)

    def _shown(self, reply: Mapping[str, JSON]) -> str:
        observation = reply.get("observation")
        if self._text and isinstance(observation, dict):
            return str(observation.get(self._text, ""))
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    async def _connected(self) -> _Socket:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        parts = urlsplit(self._url)
        address = urlunsplit(
            parts._replace(scheme=parts.scheme.replace("http", "ws"), path=f"{parts.path}/ws")
        )
        try:
            socket = await self._stack.enter_async_context(connect(address, max_size=_MAX_FRAME_BYTES))
        except (OSError, WebSocketException, TimeoutError) as error:
            raise StageError("reset", "unavailable", f"{address} cannot be reached: {error}") from error
        return cast(_Socket, socket)

    async def _request(self, kind: str, data: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Send one message and await its reply."""
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None
        try:
            await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            reply = json.loads(await self._socket.recv())
        except (ConnectionClosed, json.JSONDecodeError) as error:
            raise StageError(kind, "unavailable", f"{self._url}: {error}") from error
        content: Mapping[str, JSON] = reply.get("data", {})
        if reply.get("type") == "observation":
            return content
        if kind == "step" and content.get("code") == _VALIDATION:
            raise _RejectedError(_reasons(content))
        raise StageError(kind, "error", f"{self._url}: {content.get('code')}: {content.get('message')}")


class _RejectedError(Exception):
    """An action that does not fit the server's schema; the reason is for the model."""


def _reasons(data: Mapping[str, JSON]) -> str:
    errors = data.get("errors")
    entries = [entry for entry in errors if isinstance(entry, dict)] if isinstance(errors, list) else []
    reasons = [f"{_path(entry.get('loc'))}: {entry.get('msg')}" for entry in entries[:3]]
    return "; ".join(reasons) or str(data.get("message"))


def _path(location: JSON) -> str:
    return ".".join(map(str, location)) if isinstance(location, list) and location else "the action"


def _result(tool_call: ToolCall, text: str) -> Message:
    return Message("tool", text, tool_call_id=tool_call.id, name=tool_call.name)


_schemas: dict[str, ToolSchema] = {}
"""By the url of a server, for the time of this process."""


async def _act_schema(url: str) -> ToolSchema:
    """The tool `act` by the server's own description of its actions."""
    if url in _schemas:
        return _schemas[url]
    try:
        async with AllowedAddresses(url).client(timeout_s=_SCHEMA_TIMEOUT_S) as client:
            body = await body_of(client, "GET", httpx2.URL(f"{url}/schema"), max_bytes=_MAX_SCHEMA_BYTES)
            schema = json.loads(body)["action"]
    except (httpx2.HTTPError, StatusError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise StageError("reset", "unavailable", f"{url}/schema: {error!r}") from error
    properties = {name: each for name, each in schema["properties"].items() if name not in _OWN_FIELDS}
    description = str(schema.get("description") or "Do something.").strip()
    _schemas[url] = ToolSchema(ACT, description, {**schema, "properties": properties})
    return _schemas[url]


@lru_cache(maxsize=64)
def _tasks(rules: str, split: str) -> tuple[Task, ...]:
    prompt = (Message("user", rules),) if rules else ()
    plain = Task("", prompt, None, {}, split)
    return tuple(
        replace(plain, id=f"{split}-{number}", metadata={"seed": _FIRST_SEED[split] + number})
        for number in range(NUM_TASKS[split])
    )

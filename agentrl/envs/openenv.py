"""An environment behind an OpenEnv server: one session of its WebSocket for each episode.

    [env]
    env = "agentrl.envs.openenv:OpenEnv"
    env_kwargs = { url = "http://127.0.0.1:8000", rules = "Play White and win." }

The server describes its actions (`/schema`), which become the arguments of a tool `act`. The protocol is that
of openenv-core 0.3; only the package `websockets` is needed here.

The server is untrusted: it may redirect to no other origin, and what it sends is bounded before it is parsed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast
from urllib.parse import urlsplit, urlunsplit

import httpx2

from agentrl.envs.base import Env
from agentrl.errors import StageError, ToolDefinitionError, ToolError, UserError
from agentrl.http.guarded import AllowedAddresses
from agentrl.http.requests import StatusError, body_of, check_values, json_of, off_loop
from agentrl.runtime.extras import require
from agentrl.tools.intake import check_parameters
from agentrl.tools.json_text import storable, text_of
from agentrl.types import JSON, Message, Observation, Step, Task, ToolCall
from agentrl.types.seams import ToolSchema

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

ACT = "act"
NUM_TASKS: Mapping[str, int] = {"train": 2000, "test": 500}
_FIRST_SEED: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_MAX_FRAME_BYTES = 16 * 2**20
_SCHEMA_TIMEOUT_S = 10.0
_MAX_SCHEMA_BYTES = 1 << 20
_VALIDATION = "VALIDATION_ERROR"
_OWN_FIELDS = ("metadata",)
_PART_BYTES = 1 << 13
_CLOSE_TIMEOUT_S = 2.0
_MAX_EXCERPT = 200
_MAX_REWARD = math.nextafter(math.inf, 0)


class _Socket(Protocol):
    async def send(self, message: str) -> None: ...

    async def recv(self, decode: bool) -> str | bytes: ...


class _Result(NamedTuple):
    """What a reset or a step led to. shown: the observation as text. reward: None = the server has none."""

    shown: str
    reward: float | None
    done: bool


class OpenEnv(Env):
    """Plays an environment of an OpenEnv server. A task is a seed, which `reset` receives.

    url: of the server. rules: the text before the first observation. text: the field of an observation that
        is shown; left out, all of it as JSON. reset: further arguments of the server's reset.

    The reward of a step is the server's. An action that does not fit the server's schema gets a sentence as
    its answer and is counted as `invalid_moves`. Each episode holds one session of the server, whose
    `max_concurrent_envs` has to allow as many as are played at once.

    Raises (from reset() and step()):
        MissingExtraError: websockets is not installed.
        StageError: `unavailable`, the server cannot be reached or has closed the session; `refused`, it
            redirects to another origin; `protocol`, its reply is invalid or too long; `error`, it failed.
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
        return (*task.prompt, Message("user", reply.shown)), {}

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
        return Step((_result(tool_call, reply.shown),), reply.reward, reply.done, False, {})

    def _idle(self, answer: Message) -> Step:
        self.counts["invalid_moves"] += 1
        return Step.going(answer)

    async def _connected(self) -> _Socket:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        parts = urlsplit(self._url)
        scheme = parts.scheme.replace("http", "ws")
        address = urlunsplit(parts._replace(scheme=scheme, path=f"{parts.path}/ws"))
        opening = connect(
            address,
            # Where the host and the port are given, redirects to others are refused.
            host=parts.hostname,
            port=parts.port or (443 if scheme == "wss" else 80),
            # None that the process's environment names, and nothing packed.
            proxy=None,
            compression=None,
            max_size=_MAX_FRAME_BYTES,
            close_timeout=_CLOSE_TIMEOUT_S,
            create_connection=_paced_connection(),
        )
        try:
            return cast(_Socket, await self._stack.enter_async_context(opening))
        except (OSError, WebSocketException, TimeoutError) as error:
            problem = f"{address} cannot be reached: {_excerpt(str(error))}"
            raise StageError("reset", "unavailable", problem) from error
        except ValueError as error:
            problem = f"{address} redirects elsewhere ({_excerpt(str(error))}); give the address itself"
            raise StageError("reset", "refused", problem) from error

    async def _request(self, kind: str, data: Mapping[str, JSON]) -> _Result:
        """Send one message and await its reply."""
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None
        try:
            await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            frame = cast(bytes, await self._socket.recv(decode=False))
            await check_values(frame)
            return await off_loop(self._read, frame)
        except ConnectionClosed as error:
            raise StageError(kind, "unavailable", f"{self._url}: {_excerpt(str(error))}") from error
        except _FailedError as error:
            raise StageError(kind, "error", f"{self._url}: {error}") from error
        except ValueError as error:
            raise StageError(kind, "protocol", f"{self._url}, in answer to `{kind}`: {error}") from error

    def _read(self, frame: bytes) -> _Result:
        """The result in a reply.

        Raises:
            _RejectedError: the action does not fit the server's schema.
            _FailedError: the server reports an error.
            ValueError: it is no reply; the message says why.
        """
        reply = storable(json_of(frame))
        content = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(reply, dict) or not isinstance(content, dict):
            raise ValueError("the reply is no object with a `type` and an object `data`")
        if reply.get("type") == "observation":
            return self._result_of(content)
        if reply.get("type") != "error":
            raise ValueError(f"the reply has the type {_excerpt(text_of(reply.get('type')))}")
        if content.get("code") == _VALIDATION:
            raise _RejectedError(_reasons(content))
        raise _FailedError(f"{_text(content.get('code'))}: {_text(content.get('message'))}")

    def _result_of(self, content: Mapping[str, JSON]) -> _Result:
        if "observation" not in content:
            raise ValueError("the reply holds no `observation`")
        observation, reward, done = content["observation"], content.get("reward"), content.get("done", False)
        if self._text and isinstance(observation, dict):
            observation = observation.get(self._text, "")
        if not isinstance(done, bool):
            raise ValueError(f"`done` of the reply is {_text(done)}, not true or false")
        if reward is not None and not (isinstance(reward, int | float) and abs(reward) <= _MAX_REWARD):
            raise ValueError(f"`reward` of the reply is {_text(reward)}, not a finite number")
        return _Result(text_of(observation), None if reward is None else float(reward), done)


class _RejectedError(Exception):
    """An action that does not fit the server's schema; the reason is for the model."""


class _FailedError(Exception):
    """An error that the server reports."""


def _reasons(data: Mapping[str, JSON]) -> str:
    errors = data.get("errors")
    entries = [entry for entry in errors[:3] if isinstance(entry, dict)] if isinstance(errors, list) else []
    reasons = [f"{_path(entry.get('loc'))}: {_text(entry.get('msg'))}" for entry in entries]
    return "; ".join(reasons) or _text(data.get("message"))


def _path(location: JSON) -> str:
    if not isinstance(location, list) or not location:
        return "the action"
    return _excerpt(".".join(map(text_of, location[:8])))


def _text(value: JSON) -> str:
    return _excerpt(text_of(value))


def _excerpt(text: str) -> str:
    """The beginning of a server's words, in one printable line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * _MAX_EXCERPT]).split())
    return line if len(line) <= _MAX_EXCERPT else f"{line[:_MAX_EXCERPT]}..."


@lru_cache(maxsize=1)
def _paced_connection() -> type[ClientConnection]:
    """A connection that takes what arrives in parts, between which other tasks get their turns.

    Frames without a message, such as pings, are answered where they arrive: 256 KiB of them, which asyncio
    hands over at once, would hold the event loop for a second.
    """
    from websockets.asyncio.client import ClientConnection

    class Paced(ClientConnection):
        """See `asyncio.Protocol`."""

        _rest = b""

        def data_received(self, data: bytes) -> None:
            is_waiting, self._rest = bool(self._rest), self._rest + data
            if not is_waiting:
                self._go_on()

        def _go_on(self) -> None:
            part, self._rest = self._rest[:_PART_BYTES], self._rest[_PART_BYTES:]
            super().data_received(part)
            if self._rest:
                self.transport.pause_reading()
                self.loop.call_soon(self._go_on)
            elif not self.recv_messages.paused:
                self.transport.resume_reading()

    return Paced


def _result(tool_call: ToolCall, text: str) -> Message:
    return Message("tool", text, tool_call_id=tool_call.id, name=tool_call.name)


_schemas: dict[str, ToolSchema] = {}
"""By the url of a server, for the time of this process."""


async def _act_schema(url: str) -> ToolSchema:
    """The tool `act` by the server's own description of its actions."""
    if url in _schemas:
        return _schemas[url]
    address = f"{url}/schema"
    try:
        async with (
            asyncio.timeout(_SCHEMA_TIMEOUT_S),
            AllowedAddresses(url).client(timeout_s=None) as client,
        ):
            body = await body_of(client, "GET", httpx2.URL(address), max_bytes=_MAX_SCHEMA_BYTES)
        _schemas[url] = await asyncio.to_thread(_read_schema, body)
    except ToolError as error:
        raise StageError("reset", error.kind, f"{address}: {error.detail}") from error
    except (httpx2.HTTPError, StatusError, TimeoutError) as error:
        problem = f"{address}: {_excerpt(str(error)) or type(error).__name__}"
        raise StageError("reset", "unavailable", problem) from error
    except (ValueError, ToolDefinitionError) as error:
        raise StageError("reset", "protocol", f"{address}: {error}") from error
    return _schemas[url]


def _read_schema(body: bytes) -> ToolSchema:
    """The tool `act`, from the reply of `/schema`.

    Raises:
        ValueError: it describes no action.
        ToolDefinitionError: it describes it by no JSON Schema of an object, or by one that is too large.
    """
    reply = storable(json_of(body))
    schema = reply.get("action") if isinstance(reply, dict) else None
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(properties, dict):
        raise ValueError("the reply holds no `action` with `properties`")
    description = schema.get("description")
    text = description.strip() if isinstance(description, str) else ""
    own = {name: each for name, each in properties.items() if name not in _OWN_FIELDS}
    tool = ToolSchema(ACT, text or "Do something.", {**schema, "properties": own})
    check_parameters(tool)
    return tool


@lru_cache(maxsize=64)
def _tasks(rules: str, split: str) -> tuple[Task, ...]:
    prompt = (Message("user", rules),) if rules else ()
    plain = Task("", prompt, None, {}, split)
    return tuple(
        replace(plain, id=f"{split}-{number}", metadata={"seed": _FIRST_SEED[split] + number})
        for number in range(NUM_TASKS[split])
    )

"""An environment behind an OpenEnv server: one session of its WebSocket for each episode.

    [env]
    env = "agentrl.envs.openenv:OpenEnv"
    env_kwargs = { url = "http://127.0.0.1:8000", rules = "Play White and win." }

The server describes its actions (`/schema`), which become the arguments of a tool `act`; where they are calls
of tools, it lists these, and each is a tool of the episode. The protocol is that of openenv 0.10;
only the package `websockets` is needed here.

The server is untrusted: it may redirect to no other origin, and what it sends is bounded before it is parsed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import httpx2

from agentrl.envs.base import Env
from agentrl.envs.openenv.replies import (
    CALL_TOOL,
    ActionForm,
    FailedError,
    FullError,
    RejectedError,
    StepReply,
    content_of,
    excerpt,
    form_of,
    step_of,
    tools_of,
)
from agentrl.errors import StageError, ToolDefinitionError, ToolError, UserError
from agentrl.http.guarded import AllowedAddresses
from agentrl.http.requests import Backoff, StatusError, body_of, check_values, off_loop
from agentrl.runtime.clocks import clocks_stopped
from agentrl.runtime.extras import require
from agentrl.types import JSON, Message, Observation, Step, Task, ToolCall
from agentrl.types.seams import ToolSchema

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

NUM_TASKS: Mapping[str, int] = {"train": 2000, "test": 500}
_FIRST_SEED: Mapping[str, int] = {"train": 0, "test": 1_000_000}
_MAX_FRAME_BYTES = 16 * 2**20
_SCHEMA_TIMEOUT_S = 10.0
_MAX_SCHEMA_BYTES = 1 << 20
_PART_BYTES = 1 << 13
_CLOSE_TIMEOUT_S = 2.0
_MOST_WAIT_S = 60.0
_WHILE_FULL = Backoff(attempts=1 << 30, first_wait_s=0.5, max_wait_s=5.0)
_T = TypeVar("_T")


class OpenEnv(Env):
    """Plays an environment of an OpenEnv server. A task is a seed, which `reset` receives.

    url: of the server. rules: the text before the first observation. text: the field of an observation that
        is shown; left out, all of it as JSON. reset: further arguments of the server's reset.
    answer: the field of an action that a message without a call fills; left out, such a message does nothing.
    headers: sent with every request; a run reads environment variables that they name, "Bearer $NAME".

    The reward of a step is the server's. An action that does not fit the server's schema gets a sentence as
    its answer and is counted as `invalid_moves`. Each episode holds one session of the server. Where that has
    as many as it takes (`max_concurrent_envs`), an episode waits for a place, a minute at most, which no
    deadline counts.

    Raises (from reset() and step()):
        MissingExtraError: websockets is not installed.
        StageError: `unavailable`, the server cannot be reached, has closed the session or has no place for
            one; `refused`, it redirects to another origin, or refuses the headers; `protocol`, its reply is
            invalid or too long; `error`, it failed.
    """

    group = "adapters"
    needs = ("openenv", "server")

    def __init__(
        self,
        url: str,
        *,
        rules: str = "",
        text: str = "",
        answer: str = "",
        reset: Mapping[str, JSON] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        if urlsplit(url).scheme not in ("http", "https"):
            raise UserError(f"the url of an OpenEnv server is like http://127.0.0.1:8000, got {url!r}.")
        self._server = _Server(url.rstrip("/"), dict(headers or {}))
        self._rules, self._text, self._answer = rules, text, answer
        self._reset_arguments = dict(reset or {})
        self._tools: tuple[ToolSchema, ...] = ()
        self._lists_tools = False
        self._session = _Session(self._server)

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed; no seed is in two splits."""
        return _tasks(self._rules, split)

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The server's tools, else the tool `act`, whose arguments are the server's; known after reset()."""
        return self._tools

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Open a session and begin at the task's seed; `seed` has no effect."""
        require(f"the environment at {self._server.url}", "websockets")
        self.seed_rng(seed)
        form = await self._server.form()
        reply = await self._begun({**self._reset_arguments, "seed": task.metadata["seed"]})
        listed = await self._session.tools() if form.has_tools else ()
        self._lists_tools = bool(listed)
        self._tools = listed or (form.act,)
        return (*task.prompt, Message("user", reply.shown)), {}

    async def step(self, action: Message) -> Step:
        """Send the calls of tools in their order, or the action of the first call of `act`: further ones are
        not taken."""
        if not action.tool_calls:
            return await self._said(action.text)
        observation: list[Message] = []
        reward: float | None = None
        done = False
        for number, tool_call in enumerate(action.tool_calls):
            if done or (number and not self._lists_tools):
                self.counts["invalid_moves"] += 1
                reason = "the episode has ended" if done else "one action a turn"
                observation.append(_result(tool_call, f"Not taken: {reason}."))
                continue
            step = await self._act(tool_call)
            observation.extend(step.observation)
            reward = step.reward if reward is None else reward + (step.reward or 0.0)
            done = step.terminated
        return Step(tuple(observation), reward, done, False, {})

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def _begun(self, arguments: Mapping[str, JSON]) -> StepReply:
        """The first observation of a session, once the server has a place for it."""
        began_s, failures = time.monotonic(), 0
        while True:
            await self._session.open()
            try:
                return await self._session.request("reset", arguments, self._text)
            except FullError as error:
                failures += 1
                wait_s = _WHILE_FULL.seconds(failures)
                if time.monotonic() + wait_s > began_s + _MOST_WAIT_S:
                    raise StageError("reset", "unavailable", f"{self._server.url}: {error}") from error
            await self._session.close()
            # Others have the places: that is no time of this episode.
            with clocks_stopped():
                await asyncio.sleep(wait_s)

    async def _said(self, text: str) -> Step:
        if not self._answer:
            names = " or ".join(f"`{tool.name}`" for tool in self._tools)
            return self._idle(Message("user", f"Nothing was done; call {names}."))
        try:
            reply = await self._session.request("step", {self._answer: text}, self._text)
        except RejectedError as error:
            return self._idle(Message("user", f"That is no action: {error}"))
        return Step((Message("user", reply.shown),), reply.reward, reply.done, False, {})

    async def _act(self, tool_call: ToolCall) -> Step:
        self.counts["tool_calls"] += 1
        if tool_call.arguments is None:
            return self._idle(_result(tool_call, tool_call.error or ""))
        names = [tool.name for tool in self._tools]
        if tool_call.name not in names:
            offered = " and ".join(f"`{name}`" for name in names)
            sentence = f"There is no tool {tool_call.name[:40]!r}; there is {offered}."
            return self._idle(_result(tool_call, sentence))
        action: Mapping[str, JSON] = tool_call.arguments
        if self._lists_tools:
            action = {"type": CALL_TOOL, "tool_name": tool_call.name, "arguments": dict(action)}
        try:
            reply = await self._session.request("step", action, self._text)
        except RejectedError as error:
            return self._idle(_result(tool_call, f"That is no action: {error}"))
        self.counts["invalid_moves"] += reply.is_refused
        return Step((_result(tool_call, reply.shown),), reply.reward, reply.done, False, {})

    def _idle(self, answer: Message) -> Step:
        self.counts["invalid_moves"] += 1
        return Step.going(answer)


class _Server:
    """The address of a server, and what it says of its environment."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url, self.headers = url, headers

    async def form(self) -> ActionForm:
        """The actions by the server's own description; asked once for an address, in this process."""
        if self.url in _forms:
            return _forms[self.url]
        address = f"{self.url}/schema"
        addresses = AllowedAddresses(self.url)
        try:
            async with (
                asyncio.timeout(_SCHEMA_TIMEOUT_S),
                addresses.client(timeout_s=None, headers=self.headers) as client,
            ):
                body = await body_of(client, "GET", httpx2.URL(address), max_bytes=_MAX_SCHEMA_BYTES)
            _forms[self.url] = await asyncio.to_thread(form_of, body)
        except ToolError as error:
            raise StageError("reset", error.kind, f"{address}: {error.detail}") from error
        except (httpx2.HTTPError, StatusError, TimeoutError) as error:
            is_refused = isinstance(error, StatusError) and error.status in _REFUSALS
            problem = f"{address}: {excerpt(str(error)) or type(error).__name__}"
            raise StageError("reset", "refused" if is_refused else "unavailable", problem) from error
        except (ValueError, ToolDefinitionError) as error:
            raise StageError("reset", "protocol", f"{address}: {error}") from error
        return _forms[self.url]


_REFUSALS = (401, 403)
_forms: dict[str, ActionForm] = {}
"""By the url of a server, for the time of this process."""


class _Socket(Protocol):
    async def send(self, message: str) -> None: ...

    async def recv(self, decode: bool) -> str | bytes: ...


class _Session:
    """A session of a server: its WebSocket."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._socket: _Socket | None = None
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        """Connect.

        Raises:
            StageError: see `OpenEnv`.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        parts = urlsplit(self._server.url)
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
            additional_headers=self._server.headers,
            max_size=_MAX_FRAME_BYTES,
            close_timeout=_CLOSE_TIMEOUT_S,
            create_connection=_paced_connection(),
        )
        try:
            self._socket = cast(_Socket, await self._stack.enter_async_context(opening))
        except (OSError, WebSocketException, TimeoutError) as error:
            is_refused = isinstance(error, InvalidStatus) and error.response.status_code in _REFUSALS
            problem = f"{address} cannot be reached: {excerpt(str(error))}"
            raise StageError("reset", "refused" if is_refused else "unavailable", problem) from error
        except ValueError as error:
            problem = f"{address} redirects elsewhere ({excerpt(str(error))}); give the address itself"
            raise StageError("reset", "refused", problem) from error

    async def close(self) -> None:
        """End it; `open` begins another one."""
        await self._stack.aclose()

    async def request(self, kind: str, data: Mapping[str, JSON], text: str) -> StepReply:
        """A reset or a step. text: the field of the observation that is shown.

        Raises:
            RejectedError: the action does not fit the server's schema.
            FullError: the server has as many sessions as it takes.
            StageError: see `OpenEnv`.
        """

        def read(frame: bytes) -> StepReply:
            return step_of(content_of(frame, "observation"), text)

        return await self._exchange(kind, kind, data, read)

    async def tools(self) -> tuple[ToolSchema, ...]:
        """The tools that the server lists; none where its environment has none.

        Raises:
            StageError: see `OpenEnv`.
        """
        listing: Mapping[str, JSON] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        return await self._exchange("reset", "mcp", listing, lambda frame: tools_of(content_of(frame, "mcp")))

    async def _exchange(
        self, stage: str, kind: str, data: Mapping[str, JSON], read: Callable[[bytes], _T]
    ) -> _T:
        from websockets.exceptions import ConnectionClosed

        url = self._server.url
        assert self._socket is not None
        try:
            await self._send(json.dumps({"type": kind, "data": dict(data)}))
            frame = cast(bytes, await self._socket.recv(decode=False))
            await check_values(frame)
            return await off_loop(read, frame)
        except ConnectionClosed as error:
            raise StageError(stage, "unavailable", f"{url}: {excerpt(str(error))}") from error
        except FullError:
            raise
        except FailedError as error:
            raise StageError(stage, "error", f"{url}: {error}") from error
        except (ValueError, ToolDefinitionError) as error:
            raise StageError(stage, "protocol", f"{url}, in answer to `{kind}`: {error}") from error

    async def _send(self, text: str) -> None:
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None
        try:
            await self._socket.send(text)
        except ConnectionClosed:
            # A session that is refused gets a reason, which is read next, and is closed.
            return


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


@lru_cache(maxsize=64)
def _tasks(rules: str, split: str) -> tuple[Task, ...]:
    prompt = (Message("user", rules),) if rules else ()
    plain = Task("", prompt, None, {}, split)
    return tuple(
        replace(plain, id=f"{split}-{number}", metadata={"seed": _FIRST_SEED[split] + number})
        for number in range(NUM_TASKS[split])
    )

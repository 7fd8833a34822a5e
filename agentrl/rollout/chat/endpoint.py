"""The connection to a chat endpoint: bounded, in time, patient where that helps, honest where it fails."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import httpx2

from agentrl.errors import ConfigError, EndpointError, did_you_mean
from agentrl.gate import Gate
from agentrl.protocols import ToolSchema
from agentrl.retrying import Backoff, Retrying, StatusError, body_of
from agentrl.rollout.chat.config import DEFAULT_KEY_ENV
from agentrl.rollout.chat.settings import ChatSettings
from agentrl.rollout.chat.wire import Body, ChatReply, error_code, error_text, is_out_of_room, read_reply
from agentrl.tools.http import AllowedAddresses
from agentrl.types import JSON, Finish, Message

_BUSY = frozenset({408, 429, *range(500, 600)})
_MAX_REPLY_BYTES = 32 << 20
_CONNECT_TIMEOUT_S = 20.0
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0
# Shorter ones, such as the EMPTY of a server without keys, are words that a model may say.
_SHORTEST_SECRET = 8
_HIDDEN = b"***"
_SHOWN_MODELS = 8
_PROBE = "Answer with one word: ready."


class ChatTurn(NamedTuple):
    """What a request brought, and how often it had to be sent again."""

    reply: ChatReply
    retries: int


@dataclass(frozen=True, kw_only=True)
class ChatEndpoint:
    """An OpenAI-compatible API at `url`: requests go to `url`/chat/completions and nowhere else.

    Redirects are not followed, proxies of the process's environment not used.

    key: sent as a bearer token; it stands in no error and no repr, and is blotted out of every reply.
    key_env: the environment variable that it came from, for sentences.
    timeout_s: for one turn from first to last: all attempts and the waits between them.
    attempts: how often a request is sent, at most. max_requests: requests at a time.

    Raises:
        ConfigError: the address is none, or the key cannot be sent in a header.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    key_env: str = DEFAULT_KEY_ENV
    timeout_s: float = 300.0
    attempts: int = 6
    max_requests: int = 16

    def __post_init__(self) -> None:
        if (
            not (self.timeout_s > 0 and math.isfinite(self.timeout_s))
            or min(self.attempts, self.max_requests) < 1
        ):
            raise ConfigError(
                "A chat endpoint needs a timeout_s above 0, attempts and max_requests of at least 1."
            )
        key = "none" if self.key is None else self.key
        if not (key.isascii() and key.isprintable() and key and key == key.strip()):
            raise ConfigError(
                f"The environment variable {self.key_env} holds no key; set it to the key alone."
            )
        AllowedAddresses(self.url)

    def address(self, path: str) -> httpx2.URL:
        """The URL of a part of the API."""
        url = httpx2.URL(self.url)
        return url.copy_with(path=f"{url.path.rstrip('/')}/{path}", fragment=None)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[ChatClient]:
        """Hold connections open for many turns."""
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        allowed = AllowedAddresses(self.url)
        async with allowed.client(timeout_s=None, max_connections=self.max_requests, headers=headers) as http:
            http.timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
            http.follow_redirects = False
            yield ChatClient(self, http)


class ChatClient:
    """Asks the endpoint, for many agents at once."""

    def __init__(self, endpoint: ChatEndpoint, http: httpx2.AsyncClient) -> None:
        self._endpoint = endpoint
        self._http = http
        self._gate = Gate(endpoint.max_requests)
        self._retrying = Retrying(Backoff(endpoint.attempts, _FIRST_WAIT_S, _LONGEST_WAIT_S), _is_passing)

    async def complete(self, request: Body) -> ChatTurn:
        """One turn. A conversation that has outgrown the model's context is an empty one, cut for length.

        Waits for: a place among `max_requests`, then the endpoint, `timeout_s` at most. On cancellation: the
        request's connection is closed.

        Raises:
            EndpointError: there was no turn, by no doing of the model.
        """
        url = self._endpoint.address("chat/completions")
        content = json.dumps(request).encode()
        errors: list[Exception] = []
        async with self._gate.admitted():
            try:
                async with asyncio.timeout(self._endpoint.timeout_s):
                    body = await self._retrying(lambda: self._sent("POST", url, content), errors.append)
                return ChatTurn(read_reply(body), len(errors))
            except StatusError as error:
                if is_out_of_room(error.status, error.body):
                    return ChatTurn(_NO_ROOM, len(errors))
                self._fail(error)
            except TimeoutError:
                last = f"; before that it {self._told(errors[-1])}" if errors else ""
                said = f"{self._endpoint.url} gave no turn in {self._endpoint.timeout_s:g} s{last}"
                raise EndpointError("timeout", said) from None
            except (httpx2.HTTPError, ValueError) as error:
                self._fail(error)

    async def check(self, settings: ChatSettings, tools: Sequence[ToolSchema]) -> None:
        """Ask for one short turn, just as agents will, so that what a person has to mend shows at once.

        Raises:
            ConfigError: the endpoint cannot be reached, or refuses the key, the model or the request.
        """
        asked: Body = {"role": "user", "content": _PROBE}
        try:
            await self.complete(settings.request([asked], tools, seed=0))
        except EndpointError as error:
            known = await self._models() if error.status in (400, 404, 422) else []
            raise ConfigError(_advice(self._endpoint, settings.model, error, known)) from None

    async def _models(self) -> list[str]:
        """Names of the endpoint's models, as far as it tells them."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                found: JSON = json.loads(await self._sent("GET", self._endpoint.address("models"), None))
        except (StatusError, httpx2.HTTPError, ValueError, RecursionError, TimeoutError):
            return []
        rows = found.get("data") if isinstance(found, dict) else None
        ids = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        return [id for id in ids if isinstance(id, str)]

    async def _sent(self, method: str, url: httpx2.URL, content: bytes | None) -> bytes:
        try:
            body = await body_of(self._http, method, url, content, most_bytes=_MAX_REPLY_BYTES)
        except StatusError as error:
            error.body = self._blotted(error.body)
            raise
        return self._blotted(body)

    def _blotted(self, body: bytes) -> bytes:
        key = self._endpoint.key or ""
        return body if len(key) < _SHORTEST_SECRET else body.replace(key.encode(), _HIDDEN)

    def _fail(self, error: Exception) -> NoReturn:
        kind, status = "protocol", error.status if isinstance(error, StatusError) else None
        match error:
            case StatusError(status=500):
                kind = "crashed"
            case StatusError(status=status) if status in _BUSY:
                kind = "unavailable"
            case StatusError(status=status) if status in (401, 403) or status // 100 == 3:
                kind = "refused"
            case httpx2.ReadError() | httpx2.WriteError() | httpx2.RemoteProtocolError():
                kind = "crashed"
            case httpx2.ConnectError() | httpx2.TimeoutException():
                kind = "unavailable"
        # The cause is cut off: an answer's beginning, which stands in it, may repeat the key.
        raise EndpointError(kind, f"{self._endpoint.url} {self._told(error)}", status) from None

    def _told(self, error: Exception) -> str:
        if isinstance(error, StatusError):
            return f"answered {error.status}: {error_text(error.body)}"
        said = error_text(self._blotted(str(error).encode())) or type(error).__name__
        return f"failed: {said}"


_NO_ROOM = ChatReply(
    Message("assistant"), {"role": "assistant", "content": ""}, Finish.LENGTH, "context_full", False, None
)


def _is_passing(error: StatusError) -> bool:
    # An account without money says 429, too, and goes on saying it.
    return error.status in _BUSY and error_code(error.body) != "insufficient_quota"


def _advice(endpoint: ChatEndpoint, model: str, error: EndpointError, known: Sequence[str]) -> str:
    if known and model not in known:
        some = ", ".join(known[:_SHOWN_MODELS]) + (", ..." if len(known) > _SHOWN_MODELS else "")
        return f"{endpoint.url} has no model `{model}`.{did_you_mean(model, known)} It has {some}."
    match error.status:
        case 401 | 403:
            which = "a" if endpoint.key is None else "the right"
            advice = f"put {which} key into the environment variable {endpoint.key_env}"
        case 404:
            advice = "check openai_model, and openai_url, which usually ends in /v1"
        case 400 | 422:
            advice = "change that with openai_body, or leave a field out with openai_omit"
        case int(status) if status // 100 == 3:
            advice = "redirects are not followed, so give the address that they lead to"
        case 402 | 429:
            advice = "wait, or have your limits there raised"
        case _:
            advice = "check openai_url, and that the server there answers"
    return f"{error.detail.rstrip('.')}; {advice}."

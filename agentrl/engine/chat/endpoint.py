"""The connection to a chat endpoint: requests with a concurrency limit, a timeout, retries and redaction."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import httpx2

from agentrl.engine.chat.config import DEFAULT_KEY_ENV
from agentrl.engine.chat.settings import ChatSettings
from agentrl.engine.chat.wire import Body, ChatReply, error_code, error_text, is_context_overflow, read_reply
from agentrl.errors import ConfigError, EndpointError, did_you_mean
from agentrl.http.guarded import AllowedAddresses, bearer
from agentrl.http.requests import Backoff, Retrying, StatusError, body_of, json_of, off_loop
from agentrl.runtime.gate import Gate
from agentrl.types import Finish, Message
from agentrl.types.seams import ToolSchema

_BUSY = frozenset({408, 429, *range(500, 600)})
_MAX_REPLY_BYTES = 16 << 20
_CONNECT_TIMEOUT_S = 20.0
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 60.0
# Shorter keys, such as the EMPTY of a server without keys, may be words of the model's own text.
_MIN_SECRET_CHARS = 8
_REDACTED = b"***"
_MAX_LISTED_MODELS = 8
_PROBE = "Answer with one word: ready."


class ChatTurn(NamedTuple):
    """The reply to a request, and the number of retries that it took."""

    reply: ChatReply
    retries: int


@dataclass(frozen=True, kw_only=True)
class ChatEndpoint:
    """An OpenAI-compatible API at `url`: requests go to `url`/chat/completions and nowhere else.

    Redirects are not followed, proxies of the process's environment not used.

    key: sent as a bearer token; errors and reprs do not contain it, and it is redacted from every reply.
    key_env: the environment variable that it came from, for error messages.
    timeout_s: for one turn: all attempts and the waits between them.
    attempts: how often a request is sent, at most. max_requests: requests at a time.

    Raises:
        ConfigError: the address is not valid, or the key cannot be sent in a header.
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
        self._headers()
        AllowedAddresses(self.url)

    def address(self, path: str) -> httpx2.URL:
        """The URL of a part of the API."""
        url = httpx2.URL(self.url)
        return url.copy_with(path=f"{url.path.rstrip('/')}/{path}", fragment=None)

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else bearer(self.key, self.key_env)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[ChatClient]:
        """Hold connections open for many turns."""
        allowed = AllowedAddresses(self.url)
        async with allowed.client(
            timeout_s=None, max_connections=self.max_requests, headers=self._headers()
        ) as http:
            http.timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
            http.follow_redirects = False
            yield ChatClient(self, http)


class ChatClient:
    """Sends the requests of many agents to the endpoint, concurrently."""

    def __init__(self, endpoint: ChatEndpoint, http: httpx2.AsyncClient) -> None:
        self._endpoint = endpoint
        self._http = http
        self._gate = Gate(endpoint.max_requests)
        self._retrying = Retrying(Backoff(endpoint.attempts, _FIRST_WAIT_S, _MAX_WAIT_S), _is_passing)

    async def complete(self, request: Body) -> ChatTurn:
        """Request one turn. Where the conversation exceeds the model's context, it is empty, cut for length.

        Waits for: a place among `max_requests`, then the endpoint, `timeout_s` at most. On cancellation: the
        request's connection is closed.

        Raises:
            EndpointError: the endpoint returned no turn, and the model is not the cause.
        """
        url = self._endpoint.address("chat/completions")
        content = json.dumps(request).encode()
        errors: list[Exception] = []
        async with self._gate.admitted("the endpoint"):
            try:
                async with asyncio.timeout(self._endpoint.timeout_s):
                    body = await self._retrying(lambda: self._sent("POST", url, content), errors.append)
                return ChatTurn(await off_loop(read_reply, body), len(errors))
            except StatusError as error:
                if is_context_overflow(error.status, error.body):
                    return ChatTurn(_CONTEXT_FULL, len(errors))
                self._fail(error)
            except TimeoutError:
                last = f"; before that it {self._described(errors[-1])}" if errors else ""
                detail = f"{self._endpoint.url} gave no turn in {self._endpoint.timeout_s:g} s{last}"
                raise EndpointError("timeout", detail) from None
            except (httpx2.HTTPError, ValueError) as error:
                self._fail(error)

    async def check(self, settings: ChatSettings, tools: Sequence[ToolSchema]) -> None:
        """Request one short turn as agents will, so that an error of configuration shows at once.

        Raises:
            ConfigError: the endpoint cannot be reached, or refuses the key, the model or the request.
        """
        probe: Body = {"role": "user", "content": _PROBE}
        try:
            await self.complete(settings.request([probe], tools, seed=0))
        except EndpointError as error:
            models = await self._models() if error.status in (400, 404, 422) else []
            raise ConfigError(_advice(self._endpoint, settings.model, error, models)) from None

    async def _models(self) -> list[str]:
        """Names of the endpoint's models; empty where it does not list them."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                body = await self._sent("GET", self._endpoint.address("models"), None)
                listing = await off_loop(json_of, body)
        except (StatusError, httpx2.HTTPError, ValueError, TimeoutError):
            return []
        rows = listing.get("data") if isinstance(listing, dict) else None
        ids = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        return [id for id in ids if isinstance(id, str)]

    async def _sent(self, method: str, url: httpx2.URL, content: bytes | None) -> bytes:
        try:
            body = await body_of(self._http, method, url, content, max_bytes=_MAX_REPLY_BYTES)
        except StatusError as error:
            error.body = self._redacted(error.body)
            raise
        return self._redacted(body)

    def _redacted(self, body: bytes) -> bytes:
        key = self._endpoint.key or ""
        return body if len(key) < _MIN_SECRET_CHARS else body.replace(key.encode(), _REDACTED)

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
        # The cause is dropped: it contains the beginning of the reply, which may repeat the key.
        raise EndpointError(kind, f"{self._endpoint.url} {self._described(error)}", status) from None

    def _described(self, error: Exception) -> str:
        if isinstance(error, StatusError):
            return f"answered {error.status}: {error_text(error.body)}"
        cause = error_text(self._redacted(str(error).encode())) or type(error).__name__
        return f"failed: {cause}"


_CONTEXT_FULL = ChatReply(
    Message("assistant"), {"role": "assistant", "content": ""}, Finish.LENGTH, "context_full", False, None
)


def _is_passing(error: StatusError) -> bool:
    # An account without money gets status 429, too, and a retry does not help.
    return error.status in _BUSY and error_code(error.body) != "insufficient_quota"


def _advice(endpoint: ChatEndpoint, model: str, error: EndpointError, models: Sequence[str]) -> str:
    if models and model not in models:
        listed = ", ".join(models[:_MAX_LISTED_MODELS]) + (
            ", ..." if len(models) > _MAX_LISTED_MODELS else ""
        )
        return f"{endpoint.url} has no model `{model}`.{did_you_mean(model, models)} It has {listed}."
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

"""Requests to a server or a router over few connections; failures are mapped to EngineErrors."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence

import httpx2

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.keepalive import (
    BrokenReplyError,
    Connections,
    Sink,
    UnreachableError,
    header_lines,
)
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError
from agentrl.http.requests import check_values

_CONTROL_TIMEOUT_S = 10.0
_MAX_REPLY_BYTES = 256 << 20
_MAX_CONTROL_BYTES = 8 << 20
# Of a reply that is shorter, the values cannot hold the event loop for long: pydantic parses them in C.
_COUNTED_BYTES = 1 << 20
_BUSY = {429, 503}
# sglang-router responds with 500 where a server dropped the connection.
_BROKEN = {500, 502, 504}
_NOT_FOUND = 404
_ERROR = b'{"error"'  # of a stream that had begun
_OK = 200


class UntouchedError(EngineUnavailableError):
    """No server has started the request: it may be sent again."""


class ServerConnection:
    """The connections to one address. Failures are EngineUnavailableErrors, refusals EngineErrors.

    url: the address. capacity: how many tokens a request may have; None before `facts` was called.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self.url = _base_of(address)
        certificates = ssl.create_default_context() if self.url.startswith("https") else None
        headers = {"accept-encoding": "identity", "content-type": "application/json", **headers}
        self._connections = Connections(headers, certificates, _MAX_REPLY_BYTES)
        self._is_server = self._behind_router = False
        self.capacity: wire.Capacity | None = None

    async def facts(self) -> tuple[int, wire.Capacity]:
        """The current version and the capacity; behind a router, the minimum over its servers.

        Raises:
            EngineError: the server uses another protocol, or the router has no servers.
        """
        workers = await self.workers()
        infos = [wire.read(wire.ServerInfo, await self._get(f"{url}/server_info"), url) for url in workers]
        model = wire.read(wire.ModelInfo, await self._get(f"{workers[0]}/model_info"), workers[0])
        capacities = [wire.capacity_of(info) for info in infos]
        self.capacity = wire.Capacity(
            min(each.total for each in capacities), min(each.prompt for each in capacities)
        )
        return wire.version_of(model.weight_version), self.capacity

    async def generate(
        self,
        body: bytes,
        session: str,
        bounds: wire.ReplyBounds,
        tell: Callable[[Sequence[int]], None] | None = None,
    ) -> wire.GenerateReply:
        """Send a request and wait for its reply. bounds: of the reply.

        tell: of a request for a stream: is called with the tokens so far, but for the last ones.

        Raises:
            UntouchedError: it may be sent again.
        """
        url = f"{self.url}/generate"
        headers = header_lines({wire.ROUTING_KEY: _header_value(session)})
        events = None if tell is None else wire.StreamedReply(tell, bounds.max_bytes)
        sink = None if events is None else events.feed
        status, answer = await self._send("POST", url, body, headers, bounds.max_bytes, sink)
        if status == _OK and events is not None:
            try:
                answer = events.whole(answer)
            except ValueError as error:
                raise EngineError(f"{url}: {error}.") from None
        if status != _OK or answer.startswith(_ERROR):
            raise _refused(url, status, answer)
        if len(answer) > _COUNTED_BYTES:
            try:
                await check_values(answer, bounds.max_values)
            except ValueError as error:
                raise EngineError(f"{url}: {error}.") from None
        return wire.read(wire.GenerateReply, answer, f"the reply of {url}")

    async def loads(self) -> list[wire.RankLoad]:
        """The load of every server, and of every data-parallel replica in it.

        Raises:
            EngineError: a server is not reachable, or does not report its load.
        """
        urls = [f"{url}/v1/loads?include=core" for url in await self.workers()]
        bodies = await asyncio.gather(*map(self._get, urls))
        replies = [wire.read(wire.ServerLoads, body, url) for url, body in zip(urls, bodies, strict=True)]
        return [load for reply in replies for load in reply.loads]

    async def abort(self, rid: str) -> None:
        """Abort a request on every server; also an unknown one, because it may not have arrived yet."""
        body = wire.abort_body(rid)
        calls = [self._control("POST", f"{url}/abort_request", body) for url in await self.workers()]
        # A server that is down must not keep the others from aborting.
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer

    async def call(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> bytes:
        """Send a request to the single server at this address; returns the response body.

        Raises:
            EngineUnavailableError: it is not reachable, dropped the connection, or exceeded timeout_s.
            EngineError: it refused.
        """
        status, answer = await self.answer(method, path, body, timeout_s=timeout_s)
        if status != _OK:
            raise _refused(f"{self.url}{path}", status, answer)
        return answer

    async def answer(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Send a request; returns status and body of the response.

        Raises:
            EngineUnavailableError: no server is reachable, it dropped the connection, or exceeded timeout_s.
        """
        return await self._control(method, f"{self.url}{path}", body, timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def workers(self) -> list[str]:
        """The URLs of the servers: this one, or those behind it, because a router forwards no control calls.

        Raises:
            EngineError: no server is reachable, the router has no servers, or it uses another protocol.
        """
        if self._is_server:
            return [self.url]
        if not self._behind_router:
            status, answer = await self._control("GET", f"{self.url}/server_info")
            if status == _OK:
                self._is_server = True
                return [self.url]
            if status != _NOT_FOUND:
                raise _refused(self.url, status, answer)
        self._behind_router = True
        router = wire.read(wire.RouterWorkers, await self._get(f"{self.url}/workers"), f"{self.url}/workers")
        if not router.workers:
            raise UntouchedError(f"the router at {self.url} has no servers; start one and add it.")
        return [worker.url for worker in router.workers]

    async def _get(self, url: str) -> bytes:
        status, body = await self._control("GET", url)
        if status != _OK:
            raise _refused(url, status, body)
        return body

    async def _control(
        self, method: str, url: str, body: bytes = b"", timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._send(method, url, body, b"", _MAX_CONTROL_BYTES)
        except TimeoutError:
            raise EngineUnavailableError(f"{url} did not answer in {timeout_s:g} s.") from None

    async def _send(
        self, method: str, url: str, body: bytes, headers: bytes, max_bytes: int, sink: Sink | None = None
    ) -> tuple[int, bytes]:
        try:
            return await self._connections.send(method, url, body, headers, max_bytes, sink)
        except ValueError as error:
            raise EngineError(f"{url}: {error}.") from None
        except UnreachableError as error:
            raise UntouchedError(f"{url} cannot be reached ({error}); is the server up?") from error
        except BrokenReplyError as error:
            raise EngineUnavailableError(f"{url} broke off: {error}.") from error


async def servers_at(addresses: Sequence[str]) -> list[str]:
    """The URLs of the servers at several addresses, each of a server or of a router, without repetition.

    Raises:
        ConfigError: an address is invalid.
        EngineError: no server answers at one of them, or it uses another protocol.
    """
    found: dict[str, None] = {}
    for address in addresses:
        connection = ServerConnection(address, {})
        try:
            found |= dict.fromkeys(await connection.workers())
        finally:
            await connection.close()
    return [*found]


def _refused(url: str, status: int, answer: bytes) -> EngineError:
    sentence = f"{url} {wire.refusal(status, answer)}"
    if status in _BUSY:
        return UntouchedError(sentence)
    return EngineUnavailableError(sentence) if status in _BROKEN else EngineError(sentence)


def _header_value(session: str) -> str:
    """A session's name, hex-encoded where it is not printable ASCII."""
    return session if session.isascii() and session.isprintable() else session.encode().hex()


def _base_of(address: str) -> str:
    try:
        url = httpx2.URL(address)
    except (httpx2.InvalidURL, ValueError):
        url = httpx2.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{address!r} is not an address; write one such as http://127.0.0.1:30000.")
    return str(url.copy_with(query=None, fragment=None)).rstrip("/")

"""Requests to a server or a router over few connections, and what their failures mean."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass

import httpx2

from agentrl.engine.sglang import wire
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError
from agentrl.retrying import whole

_CONNECT_TIMEOUT_S = 5.0
_CONTROL_TIMEOUT_S = 10.0
_PATIENT = {"timeout": httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S).as_dict()}
# Servers close connections that were idle for 5 s: one that is used just then would lose its request.
_KEEP_IDLE_S = 2.0
# A pool looks at all its connections whenever it begins or ends a request: with 64 of them that is a
# quarter of a request's cost. So several pools share them. They are httpx2's transports, without its client:
# cookies, redirects and authentication are not needed, and cost a tenth of a request.
_LANE_CONNECTIONS = 8
_MAX_REPLY_BYTES = 256 << 20
_BUSY = {429, 503}
# 500 is what sglang-router says of a server that broke off.
_BROKEN = {500, 502, 504}
_NOT_FOUND = 404
_OK = 200


class UntouchedError(EngineUnavailableError):
    """No server has begun with the request: it may be sent again."""


@dataclass(eq=False, slots=True)
class _Lane:
    pool: httpx2.AsyncHTTPTransport
    in_use: int = 0


class ServerConnection:
    """One address. Failures are EngineUnavailableErrors, refusals EngineErrors.

    capacity: what the server holds; None before `facts` found out.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self._url = _base_of(address)
        self._headers = {"accept-encoding": "identity", **headers}
        self._certificates = ssl.create_default_context() if self._url.startswith("https") else False
        self._lanes: list[_Lane] = []
        self._behind_router = False
        self.capacity: wire.Capacity | None = None

    async def facts(self) -> tuple[int, wire.Capacity]:
        """The version that serves and what fits; behind a router, what fits into every server.

        Raises:
            EngineError: it speaks another protocol, or the router has no servers.
        """
        workers = await self.workers()
        infos = [wire.read(wire.ServerInfo, await self._get(f"{url}/server_info"), url) for url in workers]
        model = wire.read(wire.ModelInfo, await self._get(f"{workers[0]}/model_info"), workers[0])
        capacities = [wire.capacity_of(info) for info in infos]
        self.capacity = wire.Capacity(
            min(each.total for each in capacities), min(each.prompt for each in capacities)
        )
        return wire.version_of(model.weight_version), self.capacity

    async def generate(self, body: bytes, session: str) -> wire.GenerateReply:
        """Send a request and wait for its reply.

        Raises:
            UntouchedError: it may be sent again.
        """
        headers = {"content-type": "application/json", wire.ROUTING_KEY: _header_value(session)}
        url = f"{self._url}/generate"
        status, answer = await self._sent("POST", url, body, headers)
        if status != _OK:
            raise _refused(url, status, answer)
        return wire.read(wire.GenerateReply, answer, f"what {url} answers")

    async def abort(self, rid: str) -> None:
        """Ask for the end of a request; of one that nobody knows, too, for it may be on its way."""
        body = wire.written_abort(rid)
        asked = [self._control("POST", f"{url}/abort_request", body) for url in await self.workers()]
        # One that is dead keeps no other from hearing it.
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer

    async def call(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> bytes:
        """Ask the one server at this address for something; gives what it answers.

        Raises:
            EngineUnavailableError: it is not there, broke off, or took longer than timeout_s.
            EngineError: it refused.
        """
        status, answer = await self.answer(method, path, body, timeout_s=timeout_s)
        if status != _OK:
            raise _refused(f"{self._url}{path}", status, answer)
        return answer

    async def answer(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Status and body of whatever is answered at this address.

        Raises:
            EngineUnavailableError: nobody is there, the answer broke off, or it took longer than timeout_s.
        """
        return await self._control(method, f"{self._url}{path}", body, timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        for lane in self._lanes:
            await lane.pool.aclose()

    async def workers(self) -> list[str]:
        """The servers: this address, or those behind it, for a router passes no control calls on.

        Raises:
            EngineError: nobody is there, the router has no servers, or it speaks another protocol.
        """
        if not self._behind_router:
            status, answer = await self._control("GET", f"{self._url}/server_info")
            if status == _OK:
                return [self._url]
            if status != _NOT_FOUND:
                raise _refused(self._url, status, answer)
        self._behind_router = True
        told = wire.read(wire.RouterWorkers, await self._get(f"{self._url}/workers"), f"{self._url}/workers")
        if not told.workers:
            raise UntouchedError(f"the router at {self._url} has no servers; start one and add it.")
        return [worker.url for worker in told.workers]

    async def _get(self, url: str) -> bytes:
        status, answer = await self._control("GET", url)
        if status != _OK:
            raise _refused(url, status, answer)
        return answer

    async def _control(
        self, method: str, url: str, body: bytes = b"", timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._sent(method, url, body, {"content-type": "application/json"})
        except TimeoutError:
            raise EngineUnavailableError(f"{url} did not answer in {timeout_s:g} s.") from None

    async def _sent(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        request = httpx2.Request(
            method, url, headers={**self._headers, **headers}, content=body, extensions=_PATIENT
        )
        lane = self._lane()
        lane.in_use += 1
        try:
            response = await lane.pool.handle_async_request(request)
            async with aclosing(response):
                return response.status_code, await whole(response.aiter_raw(), _MAX_REPLY_BYTES)
        except ValueError as error:
            raise EngineError(f"{url}: {error}.") from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise UntouchedError(f"{url} cannot be reached ({_said(error)}); is the server up?") from error
        except httpx2.TransportError as error:
            raise EngineUnavailableError(f"{url} broke off: {_said(error)}.") from error
        finally:
            lane.in_use -= 1

    def _lane(self) -> _Lane:
        """The first lane that has a connection to spare, or a new one."""
        for lane in self._lanes:
            if lane.in_use < _LANE_CONNECTIONS:
                return lane
        limits = httpx2.Limits(max_keepalive_connections=_LANE_CONNECTIONS, keepalive_expiry=_KEEP_IDLE_S)
        pool = httpx2.AsyncHTTPTransport(verify=self._certificates, trust_env=False, limits=limits)
        self._lanes.append(_Lane(pool))
        return self._lanes[-1]


def _refused(url: str, status: int, answer: bytes) -> EngineError:
    sentence = f"{url} {wire.refusal(status, answer)}"
    if status in _BUSY:
        return UntouchedError(sentence)
    return EngineUnavailableError(sentence) if status in _BROKEN else EngineError(sentence)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _header_value(session: str) -> str:
    """A session's name as a header can carry it."""
    return session if session.isascii() and session.isprintable() else session.encode().hex()


def _base_of(address: str) -> str:
    try:
        url = httpx2.URL(address)
    except (httpx2.InvalidURL, ValueError):
        url = httpx2.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{address!r} is not an address; write one such as http://127.0.0.1:30000.")
    return str(url.copy_with(query=None, fragment=None)).rstrip("/")

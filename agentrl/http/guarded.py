"""HTTP for tools: a client that reaches the addresses that a run allows, and no others.

A model may choose a URL, and a server may redirect: neither may lead a tool to a machine outside of the
allowed addresses. Addresses are compared as origins (scheme, host, port), on the URL of every request.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType

import httpx2

from agentrl.errors import ConfigError, ToolError, ToolRejected
from agentrl.http.requests import PACKED, content_coding

_PORTS = {"http": 80, "https": 443}
_MAX_CHARACTERS = 80
_SENT_BEFORE = "agentrl_sent_before"
_CODING = b"content-encoding"
_MAX_REPLY_BYTES = 256 << 20
_MAX_REDIRECT_BYTES = 1 << 16
_TURN_CHUNKS = 64
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a URL. host: in lower case, IP addresses in their shortest form."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def origin_of(url: httpx2.URL) -> Origin | None:
    """The origin of a URL; None where its scheme is neither http nor https, or it has no host.

    `127.1`, `2130706433` and `localhost.` stay as they are: other spellings of an allowed host are refused.
    """
    host = url.raw_host.decode("ascii", "replace").lower()
    if url.scheme not in _PORTS or not host:
        return None
    with suppress(ValueError):  # a name
        host = ipaddress.ip_address(host).compressed
    return Origin(url.scheme, host, _PORTS[url.scheme] if url.port is None else url.port)


def bearer(key: str, key_env: str) -> dict[str, str]:
    """The header that sends a key. key_env: the environment variable that holds it.

    Raises:
        ConfigError: it cannot be sent in a header; the message does not show it.
    """
    if not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(f"the environment variable {key_env} holds no key; set it to the key alone.")
    return {"authorization": f"Bearer {key}"}


_SENT_WITH: dict[Origin, Mapping[str, str]] = {}


@contextmanager
def sent_with(address: str, headers: Mapping[str, str]) -> Iterator[None]:
    """Guarded clients of this process send these headers to an origin, in place of their own of these names.

    A server that the run itself started asks for a key that no argument of an environment holds.

    Raises:
        ConfigError: the address is none.
    """
    origin = _configured(address)
    _SENT_WITH[origin] = {**headers}
    try:
        yield
    finally:
        del _SENT_WITH[origin]


def headers_to(address: str) -> Mapping[str, str]:
    """The headers of `sent_with` for the origin of an address; none where there are none."""
    return _SENT_WITH.get(_configured(address), _NO_HEADERS)


class AllowedAddresses:
    """The origins that a run's tools may reach: `AllowedAddresses("http://127.0.0.1:8000")`.

    addresses: URLs, of which only the origin counts. A host name is allowed as a
        name, whatever it resolves to.

    Raises:
        ConfigError: an address is not http or https, or holds credentials.
    """

    def __init__(self, *addresses: str) -> None:
        self._origins = frozenset(_configured(address) for address in addresses)

    def __str__(self) -> str:
        return ", ".join(sorted(str(origin) for origin in self._origins)) or "none"

    def why_not(self, url: httpx2.URL) -> str | None:
        """The reason why a URL may not be reached, in one sentence; None where it is allowed."""
        if origin_of(url) not in self._origins:
            return f"{_clipped(url)} is not an allowed address; allowed: {self}."
        if url.userinfo:
            return f"{_clipped(url)}: leave the user name and password out of the address."
        return None

    def check(self, address: str) -> httpx2.URL:
        """Parse a URL that a model wrote and check its origin. A tool that takes URLs calls this first.

        Raises:
            ToolRejected: it is no URL, or its origin is not allowed; the sentence names the allowed ones.
        """
        try:
            url = httpx2.URL(address)
        except (httpx2.InvalidURL, ValueError):
            raise ToolRejected(
                f"{address[:_MAX_CHARACTERS]!r} is not a URL; allowed addresses: {self}."
            ) from None
        if reason := self.why_not(url):
            raise ToolRejected(reason)
        return url

    def client(
        self,
        *,
        timeout_s: float | None = 30.0,
        max_connections: int = 100,
        headers: Mapping[str, str] | None = None,
        max_bytes: int | None = _MAX_REPLY_BYTES,
    ) -> httpx2.AsyncClient:
        """A client that reaches only these origins. The caller closes it.

        Redirects are followed. Proxies, certificates and passwords of the process's environment are not
        used. Replies must be sent as they are: a packed one (`Content-Encoding: gzip`) is refused.

        timeout_s: of each wait for the network (connect, read, write, a free connection), not of the
            whole request. None = none.
        max_bytes: of the body of a reply; of one that redirects, 64 KiB are. None = the caller bounds them.

        A request of it raises:
            ToolRejected: its URL has another origin.
            ToolError: `refused`, the server redirects to another origin.
            httpx2.HTTPError: the network or the server failed; a DecodingError: the reply is packed, or too
                long.
        """
        limits = httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        return httpx2.AsyncClient(
            transport=GuardedTransport(
                httpx2.AsyncHTTPTransport(trust_env=False, limits=limits), self, max_bytes
            ),
            timeout=timeout_s,
            headers={"accept-encoding": "identity", **(headers or {})},
            follow_redirects=True,
            trust_env=False,
        )


class _Packed(httpx2.AsyncByteStream):
    """The body of a reply whose content coding is refused."""

    def __init__(self, coding: str) -> None:
        self._coding = coding

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b""
        raise httpx2.DecodingError(PACKED.format(self._coding))


class _Bounded(httpx2.AsyncByteStream):
    """The body of a reply, up to a length. None = any.

    Thousands of chunks of one byte arrive at once: between them the event loop gets its turns.
    """

    def __init__(self, inner: httpx2.AsyncByteStream, max_bytes: int | None) -> None:
        self._inner, self._max_bytes = inner, max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        length = number = 0
        async for chunk in self._inner:
            length += len(chunk)
            if self._max_bytes is not None and length > self._max_bytes:
                raise httpx2.DecodingError(f"the reply is longer than {self._max_bytes:,} bytes")
            yield chunk
            number += 1
            if number % _TURN_CHUNKS == 0:
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Close the inner stream."""
        await self._inner.aclose()


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Passes only requests to allowed origins on to another transport, redirected requests included.

    max_bytes: of the body of a reply; None = any number.
    """

    def __init__(
        self,
        inner: httpx2.AsyncBaseTransport,
        allowed: AllowedAddresses,
        max_bytes: int | None = _MAX_REPLY_BYTES,
    ) -> None:
        self._inner = inner
        self._allowed = allowed
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request to an allowed origin.

        The body of a reply that is packed or too long raises httpx2.DecodingError when it is read.

        Raises:
            ToolRejected: its origin is not allowed.
            ToolError: `refused`, a server redirected it to an origin that is not allowed.
        """
        if reason := self._allowed.why_not(request.url):
            if _SENT_BEFORE in request.extensions:
                raise ToolError("refused", f"a server redirects elsewhere: {reason}")
            raise ToolRejected(reason)
        if (origin := origin_of(request.url)) is not None:
            request.headers.update(_SENT_WITH.get(origin, _NO_HEADERS))
        # The request that follows a redirect inherits the extensions of the first request.
        request.extensions[_SENT_BEFORE] = True
        response = await self._inner.handle_async_request(request)
        if coding := content_coding(response):
            await response.aclose()
            # The error is raised where the body is read: there every client of HTTP expects one.
            plain = [(key, value) for key, value in response.headers.raw if key.lower() != _CODING]
            return httpx2.Response(response.status_code, headers=plain, stream=_Packed(coding))
        if isinstance(response.stream, httpx2.AsyncByteStream):
            # A client that follows a redirect reads all of its body first, and throws it away.
            redirects = response.has_redirect_location
            response.stream = _Bounded(response.stream, _MAX_REDIRECT_BYTES if redirects else self._max_bytes)
        return response

    async def __aenter__(self) -> GuardedTransport:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


def _configured(address: str) -> Origin:
    try:
        url = httpx2.URL(address)
    except (httpx2.InvalidURL, ValueError):
        url = httpx2.URL("")
    origin = origin_of(url)
    if origin is None:
        raise ConfigError(f"{address!r} is not an address; write one such as http://127.0.0.1:8000.")
    if url.userinfo:
        raise ConfigError(f"The address of {origin} holds credentials; give them as headers.")
    return origin


def _clipped(url: httpx2.URL) -> str:
    text = str(origin_of(url) or url.copy_with(userinfo=b""))
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."

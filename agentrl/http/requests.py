"""HTTP requests with retries and backoff, and JSON from servers: bounded before it is parsed.

What a server sends is untrusted. Its bytes are bounded while they come in, and its values before they are
parsed. One event loop runs all episodes, and a parser in C holds all threads until its end: so long texts are
counted and parsed in a thread, and in steps between which the event loop gets its turn.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from json import scanner
from typing import TypeVar

import httpx2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from agentrl.types import JSON

BUSY = frozenset({429, 502, 503, 504})
MAX_VALUES = 200_000
"""Of a reply in JSON: parsing so many takes 10 to 200 ms."""
LONG_BYTES = 1 << 16
"""Texts above this are counted and parsed in a thread."""
TOO_MANY_VALUES = "the reply holds more than {:,} values"
PACKED = "the reply is packed with {!r}; the server must send it as it is"
_MAX_BODY_CHARS = 200
_MAX_CODING_CHARS = 40
_MAX_DIGITS = 400
_MARKS = (b",", b"[", b"{")
_MAX_CHUNKS = 100_000
T = TypeVar("T")


class StatusError(Exception):
    """The server returned another status than 200.

    body: of the reply. retry_after_s: the reply's Retry-After in seconds, or None.
    """

    def __init__(self, response: httpx2.Response, body: bytes) -> None:
        excerpt = " ".join(body[:_MAX_BODY_CHARS].decode("utf-8", "replace").split())
        super().__init__(f"answered {response.status_code}: {excerpt}")
        self.status = response.status_code
        self.body = body
        self.retry_after_s = _seconds(response.headers.get("retry-after", ""))


@dataclass(frozen=True, slots=True)
class Backoff:
    """The number of attempts of a request, and the waits between them.

    attempts: how often it is sent, at most.
    first_wait_s: the upper bound of the first wait. It doubles with every failure. Each wait is drawn from
        the upper half of its range, so that clients that failed together do not retry together.
    max_wait_s: the upper bound of every wait, also of one from the server (Retry-After).
    """

    attempts: int
    first_wait_s: float
    max_wait_s: float

    def is_last(self, failures: int) -> bool:
        """Whether no attempt is left after so many failures."""
        return failures >= self.attempts

    def seconds(self, failures: int, retry_after_s: float | None = None) -> float:
        """The wait before the next attempt. failures: so far. retry_after_s: the server's value, if any."""
        if retry_after_s is not None:
            return min(retry_after_s, self.max_wait_s)
        longest_s = min(self.max_wait_s, self.first_wait_s * 2 ** (failures - 1))
        return random.uniform(longest_s / 2, longest_s)

    async def wait(self, failures: int, retry_after_s: float | None = None) -> None:
        """Sleep for `seconds(failures, retry_after_s)`."""
        await asyncio.sleep(self.seconds(failures, retry_after_s))


def is_busy(error: StatusError) -> bool:
    """Whether a server is overloaded or not ready yet."""
    return error.status in BUSY


def failure_kind(error: Exception) -> str:
    """The kind of a ToolError or a GradingError that a failed request is.

    `unavailable`: no connection, no reply in time, or busy. `crashed`: the connection broke, or status 500.
    `refused`: 401 or 403. `protocol`: anything else.
    """
    match error:
        case StatusError(status=status) if status in BUSY:
            return "unavailable"
        case StatusError(status=401 | 403):
            return "refused"
        case (
            StatusError(status=500) | httpx2.ReadError() | httpx2.WriteError() | httpx2.RemoteProtocolError()
        ):
            return "crashed"
        case httpx2.ConnectError() | httpx2.TimeoutException():
            return "unavailable"
    return "protocol"


@dataclass(frozen=True, slots=True)
class Retrying:
    """Retries a request where the connection broke, or where `is_passing` holds for the error status."""

    backoff: Backoff
    is_passing: Callable[[StatusError], bool] = is_busy

    async def __call__(
        self, send: Callable[[], Awaitable[bytes]], on_retry: Callable[[Exception], None]
    ) -> bytes:
        """The body of the first successful reply. on_retry: called with each error before a retry.

        Raises:
            StatusError, httpx2.HTTPError: of the last attempt, or of one that is not worth a retry.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception(self._is_retryable),
            stop=stop_after_attempt(self.backoff.attempts),
            wait=self._seconds,
            before_sleep=lambda state: on_retry(_error_of(state)),
            reraise=True,
        )

        async def once() -> bytes:
            return await send()  # tenacity awaits only coroutine functions

        body: bytes = await retrying(once)
        return body

    def _seconds(self, state: RetryCallState) -> float:
        error = _error_of(state)
        retry_after_s = error.retry_after_s if isinstance(error, StatusError) else None
        return self.backoff.seconds(state.attempt_number, retry_after_s)

    def _is_retryable(self, error: BaseException) -> bool:
        if isinstance(error, StatusError):
            return self.is_passing(error)
        return isinstance(error, httpx2.TransportError)


def _error_of(state: RetryCallState) -> Exception:
    error = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(error, Exception), "only an error leads to another attempt"
    return error


async def body_of(
    http: httpx2.AsyncClient,
    method: str,
    url: httpx2.URL,
    content: bytes | None = None,
    *,
    max_bytes: int,
    max_values: int = MAX_VALUES,
) -> bytes:
    """Send one request, with a JSON body or none, and return the body of the reply.

    Raises:
        StatusError: the status is not 200.
        ValueError: the reply is packed, longer than `max_bytes`, or JSON of more than `max_values` values.
        httpx2.HTTPError: the network or the server failed.
    """
    headers = {"accept-encoding": "identity"}
    if content is not None:
        headers["content-type"] = "application/json"
    async with http.stream(method, url, content=content, headers=headers) as response:
        if packing := content_coding(response):
            raise ValueError(PACKED.format(packing))
        body = await read_all(response.aiter_raw(), max_bytes)
    await check_values(body, max_values)
    if response.status_code != httpx2.codes.OK:
        raise StatusError(response, body)
    return body


def content_coding(response: httpx2.Response) -> str:
    """The coding that a reply is packed with; empty for none. A few bytes may unpack to gigabytes."""
    coding: str = response.headers.get("content-encoding", "").strip().lower()
    return "" if coding == "identity" else coding[:_MAX_CODING_CHARS]


async def off_loop(work: Callable[[bytes], T], text: bytes) -> T:
    """The result of `work(text)`, which a long text gets in a thread."""
    return work(text) if len(text) <= LONG_BYTES else await asyncio.to_thread(work, text)


async def check_values(text: bytes, max_values: int = MAX_VALUES) -> None:
    """Count the values of a JSON text, before it is parsed.

    Raises:
        ValueError: they are more than `max_values`.
    """
    if await off_loop(partial(num_values, limit=max_values), text) > max_values:
        raise ValueError(TOO_MANY_VALUES.format(max_values))


def num_values(text: bytes, limit: int = MAX_VALUES) -> int:
    """The number of values in JSON, at most; the count ends above `limit`.

    Where it is above the limit, characters inside of strings are left out of the count.
    """
    number = 1
    for start in range(0, len(text), LONG_BYTES):
        number += sum(text.count(mark, start, start + LONG_BYTES) for mark in _MARKS)
        if number > limit:
            break
    if number <= limit:
        return number
    values = ValueCounter()
    for start in range(0, len(text), LONG_BYTES):
        if values.add(text[start : start + LONG_BYTES]) > limit:
            break
    return values.number


class ValueCounter:
    """The number of values in a JSON text that arrives in parts. Linear in their length."""

    def __init__(self) -> None:
        self.number = 1
        self._num_quotes = 0
        self._rest = b""

    def add(self, part: bytes) -> int:
        """Add the next part; returns the number so far, at most."""
        part = self._rest + part
        # A last backslash escapes what the next part begins with.
        num_last = len(part) - len(part.rstrip(b"\\"))
        self._rest = b"\\" * (num_last % 2)
        plain = part.removesuffix(self._rest).replace(b"\\\\", b"").replace(b'\\"', b"")
        between = plain.split(b'"')
        outside = b" ".join(between[self._num_quotes % 2 :: 2])
        self._num_quotes += len(between) - 1
        # JSON has at most two strings for each value: it and its key.
        self.number = max(self.number + sum(map(outside.count, _MARKS)), self._num_quotes // 4)
        return self.number


class _StepByStep(json.JSONDecoder):
    """Parses as `json` does without its C scanner: in steps, between which other threads get their turns."""

    def __init__(self) -> None:
        super().__init__(parse_int=_integer)
        self.scan_once = vars(scanner)["py_make_scanner"](self)


def json_of(text: bytes) -> JSON:
    """The value of a JSON text whose values were counted. Parse a long one in a thread (`off_loop`).

    Raises:
        ValueError: it is no JSON, is nested too deep, or holds a number of too many digits.
    """
    try:
        # UTF-8 alone, by which the values were counted: from bytes, json.loads would guess other encodings.
        value: JSON = json.loads(
            text.decode("utf-8-sig"), cls=_StepByStep if len(text) > LONG_BYTES else None
        )
    except (ValueError, RecursionError):
        raise ValueError("the reply is no JSON") from None
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("a number of too many digits")
    return int(digits)


async def read_all(chunks: AsyncIterator[bytes], max_bytes: int) -> bytes:
    """The concatenated chunks of a reply.

    Raises:
        ValueError: they are longer than `max_bytes`, or more than 100,000.
    """
    received, length = [], 0
    async for chunk in chunks:
        received.append(chunk)
        length += len(chunk)
        if length > max_bytes:
            raise ValueError(f"the reply is longer than {max_bytes:,} bytes")
        if len(received) > _MAX_CHUNKS:
            raise ValueError(f"the reply is longer than {_MAX_CHUNKS:,} chunks")
    return b"".join(received)


def _seconds(text: str) -> float | None:
    """Retry-After in seconds, from a number or a date; None where it is absent or neither."""
    if text.isascii() and text.isdigit() and len(text) < 6:
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None

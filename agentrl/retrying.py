"""Sending an HTTP request again where that may help, and reading no more of a reply than is wanted."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

BUSY = frozenset({429, 502, 503, 504})
_SHOWN_CHARACTERS = 200


class StatusError(Exception):
    """The server answered with another status than 200.

    body: of the answer. retry_after_s: how long the server asks to wait, or None.
    """

    def __init__(self, response: httpx2.Response, body: bytes) -> None:
        shown = " ".join(body[:_SHOWN_CHARACTERS].decode("utf-8", "replace").split())
        super().__init__(f"answered {response.status_code}: {shown}")
        self.status = response.status_code
        self.body = body
        self.retry_after_s = _seconds(response.headers.get("retry-after", ""))


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often a request is sent, and how long to wait in between.

    attempts: how often it is sent, at most.
    first_wait_s: the longest that the first wait may be. It doubles with every failure. Each wait is drawn
        from the upper half, so that clients that failed together do not come back together.
    longest_wait_s: no wait is longer, not even one that the server asks for (Retry-After).
    """

    attempts: int
    first_wait_s: float
    longest_wait_s: float

    def is_last(self, failures: int) -> bool:
        """Whether no attempt is left after so many failures."""
        return failures >= self.attempts

    def seconds(self, failures: int, asked_s: float | None = None) -> float:
        """How long to wait before the next attempt. failures: so far. asked_s: what the server asks for."""
        if asked_s is not None:
            return min(asked_s, self.longest_wait_s)
        longest_s = min(self.longest_wait_s, self.first_wait_s * 2 ** (failures - 1))
        return random.uniform(longest_s / 2, longest_s)

    async def wait(self, failures: int, asked_s: float | None = None) -> None:
        """Wait as long as `seconds` says."""
        await asyncio.sleep(self.seconds(failures, asked_s))


def is_busy(error: StatusError) -> bool:
    """Whether a server only has no time, or is not up yet."""
    return error.status in BUSY


@dataclass(frozen=True, slots=True)
class Retrying:
    """Sends a request again where the connection broke, or where the answer is one that `is_passing`."""

    backoff: Backoff
    is_passing: Callable[[StatusError], bool] = is_busy

    async def __call__(
        self, send: Callable[[], Awaitable[bytes]], on_retry: Callable[[Exception], None]
    ) -> bytes:
        """The first answer that is one. on_retry: gets each error that another attempt follows.

        Raises:
            StatusError, httpx2.HTTPError: the last attempt failed so, or another would be of no use.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception(self._passes),
            stop=stop_after_attempt(self.backoff.attempts),
            wait=self._seconds,
            before_sleep=lambda state: on_retry(_error_of(state)),
            reraise=True,
        )

        async def once() -> bytes:
            return await send()  # tenacity awaits only what it knows for a coroutine function

        body: bytes = await retrying(once)
        return body

    def _seconds(self, state: RetryCallState) -> float:
        error = _error_of(state)
        asked_s = error.retry_after_s if isinstance(error, StatusError) else None
        return self.backoff.seconds(state.attempt_number, asked_s)

    def _passes(self, error: BaseException) -> bool:
        if isinstance(error, StatusError):
            return self.is_passing(error)
        return isinstance(error, httpx2.TransportError)


def _error_of(state: RetryCallState) -> Exception:
    error = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(error, Exception), "only errors are followed by another attempt"
    return error


async def body_of(
    http: httpx2.AsyncClient, method: str, url: httpx2.URL, content: bytes | None = None, *, most_bytes: int
) -> bytes:
    """Send JSON, or nothing, once, and read the whole answer.

    Raises:
        StatusError: the status is not 200.
        ValueError: the answer is longer than `most_bytes`.
        httpx2.HTTPError: the network or the server failed.
    """
    headers = {} if content is None else {"content-type": "application/json"}
    async with http.stream(method, url, content=content, headers=headers) as response:
        body = await whole(response.aiter_bytes(), most_bytes)
    if response.status_code != httpx2.codes.OK:
        raise StatusError(response, body)
    return body


async def whole(pieces: AsyncIterator[bytes], most_bytes: int) -> bytes:
    """The pieces of a reply, put together.

    Raises:
        ValueError: they are longer than `most_bytes`.
    """
    kept, length = [], 0
    async for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length > most_bytes:
            raise ValueError(f"the reply is longer than {most_bytes:,} bytes")
    return b"".join(kept)


def _seconds(text: str) -> float | None:
    """Retry-After in seconds, whether it is a number or a date; None where it is absent or neither."""
    if text.isascii() and text.isdigit() and len(text) < 6:
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None

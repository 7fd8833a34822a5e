"""Sending an HTTP request again where that may help, and reading no more of an answer than is wanted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx2
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

BUSY = frozenset({429, 502, 503, 504})
_SHOWN_CHARACTERS = 200


class StatusError(Exception):
    """The server answered with another status than 200.

    body: what it said. retry_after_s: how long it asks to be left alone, or None.
    """

    def __init__(self, response: httpx2.Response, body: bytes) -> None:
        said = " ".join(body[:_SHOWN_CHARACTERS].decode("utf-8", "replace").split())
        super().__init__(f"answered {response.status_code}: {said}")
        self.status = response.status_code
        self.body = body
        self.retry_after_s = _seconds(response.headers.get("retry-after", ""))


@dataclass(frozen=True, slots=True)
class Resending:
    """When a request is sent again: the connection broke, or the answer is one that `is_passing`.

    attempts: how often it is sent, at most. first_wait_s: the upper end of the first wait, drawn by chance;
    it doubles. longest_wait_s: no wait is longer, not even one that the server asks for (Retry-After).
    """

    attempts: int
    is_passing: Callable[[StatusError], bool] = lambda error: error.status in BUSY
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    async def __call__(
        self, send: Callable[[], Awaitable[bytes]], told: Callable[[Exception], None]
    ) -> bytes:
        """The first answer that is one.

        Raises:
            StatusError, httpx2.HTTPError: the last attempt failed so, or another would be of no use.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception(self._is_worth_another),
            stop=stop_after_attempt(self.attempts),
            wait=self._wait_s,
            before_sleep=lambda state: told(_error_of(state)),
            reraise=True,
        )

        async def once() -> bytes:
            return await send()  # tenacity awaits only what it knows for a coroutine function

        body: bytes = await retrying(once)
        return body

    def _is_worth_another(self, error: BaseException) -> bool:
        return isinstance(error, httpx2.TransportError) or (
            isinstance(error, StatusError) and self.is_passing(error)
        )

    def _wait_s(self, state: RetryCallState) -> float:
        error = _error_of(state)
        asked = error.retry_after_s if isinstance(error, StatusError) else None
        back_off = wait_random_exponential(multiplier=self.first_wait_s, max=self.longest_wait_s)
        return back_off(state) if asked is None else min(asked, self.longest_wait_s)


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
        pieces, length = [], 0
        async for piece in response.aiter_bytes():
            pieces.append(piece)
            length += len(piece)
            if length > most_bytes:
                raise ValueError(f"the reply is longer than {most_bytes:,} bytes")
    if response.status_code != httpx2.codes.OK:
        raise StatusError(response, b"".join(pieces))
    return b"".join(pieces)


def _error_of(state: RetryCallState) -> Exception:
    error = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(error, Exception), "only errors are followed by another attempt"
    return error


def _seconds(text: str) -> float | None:
    """Retry-After in seconds, whether it is a number or a date; None where it is absent or neither."""
    if text.isascii() and text.isdigit() and len(text) < 6:
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None

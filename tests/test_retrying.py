"""Waits between attempts: they double, stay below a bound, and follow Retry-After. Replies are bounded."""

from __future__ import annotations

import gzip

import httpx2
import pytest

from agentrl.retrying import Backoff, body_of


@pytest.fixture
def slept(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("agentrl.retrying.asyncio.sleep", sleep)
    return waits


async def test_waits_double_up_to_a_bound_and_each_is_in_its_upper_half(slept):
    backoff = Backoff(attempts=9, first_wait_s=0.5, max_wait_s=3.0)
    for failures in range(1, 9):
        await backoff.wait(failures)
    longest = [0.5, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(slept, longest, strict=True))
    assert len(set(slept)) == len(slept), "random waits"


async def test_retry_after_is_respected_up_to_the_bound(slept):
    backoff = Backoff(attempts=3, first_wait_s=0.5, max_wait_s=3.0)
    for retry_after_s in (0.0, 2.5, 60.0):
        await backoff.wait(1, retry_after_s)
    assert slept == [0.0, 2.5, 3.0]


def test_the_last_attempt_is_the_one_that_reaches_the_limit():
    backoff = Backoff(attempts=3, first_wait_s=0.5, max_wait_s=3.0)
    assert [backoff.is_last(failures) for failures in range(1, 5)] == [False, False, True, True]


async def fetched(body: bytes, **headers: str) -> bytes:
    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.headers["accept-encoding"] == "identity"
        return httpx2.Response(200, stream=httpx2.ByteStream(body), headers=headers)

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http:
        return await body_of(http, "GET", httpx2.URL("http://127.0.0.1/"), max_bytes=1 << 24)


async def test_a_packed_reply_is_refused_and_not_unpacked():
    packed = gzip.compress(gzip.compress(bytes(10_000_000)))
    for coding in ("gzip", "gzip, gzip", "deflate", "br"):
        with pytest.raises(ValueError, match=f"the reply is packed with '{coding}'"):
            await fetched(packed, **{"content-encoding": coding})
    assert await fetched(packed, **{"content-encoding": "identity"}) == packed


@pytest.mark.parametrize("values", [b"[]", b"{}", b"1", b'"a"'])
async def test_a_reply_of_very_many_values_is_refused_before_it_is_parsed(values):
    with pytest.raises(ValueError, match="the reply holds more than 200,000 values"):
        await fetched(b"[" + b",".join([values] * 250_000) + b"]")


async def test_characters_inside_of_texts_are_no_values():
    marks = b"[,{" * 200_000
    for body in (b'["' + marks + b'"]', b'["' + b'\\"' * 300_000 + marks + b'"]', b'"' + marks):
        assert await fetched(body) == body

"""Waits between attempts: they double, stay below a bound, and follow Retry-After. Replies are bounded."""

from __future__ import annotations

import asyncio
import gzip
import json

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from agentrl.http import requests as retrying
from agentrl.http.requests import (
    LONG_BYTES,
    Backoff,
    ValueCounter,
    body_of,
    json_of,
    num_values,
    off_loop,
    read_all,
)

TEXTS = st.text(st.sampled_from('ab,[{"\\\n:é') | st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
NO_JSON = (
    b"",
    b"{",
    b"[1,]",
    b'{"a" 1}',
    b"[1 2]",
    b"nul",
    b'"\xff"',
    b"[" * 9_000,
    '["a"]'.encode("utf-16"),
)


@pytest.fixture
def slept(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("agentrl.http.requests.asyncio.sleep", sleep)
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


def size_of(value) -> int:
    """The number of values, by walking them."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(size_of, inner))


@given(VALUES, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_values_are_counted_outside_of_strings_however_the_text_is_cut(value, sizes, is_ascii):
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    values, at, turn = ValueCounter(), 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        values.add(text[at : at + size])
        at, turn = at + size, turn + 1
    # An empty list or object counts as two: it, and what it could hold.
    assert size_of(value) <= values.number <= 2 * size_of(value)
    assert size_of(value) <= num_values(text) <= text.count(b",") + text.count(b"[") + text.count(b"{") + 1


@pytest.mark.parametrize("flood", [b'"",' * 5_000_000, b"[]," * 5_000_000])
def test_a_count_ends_at_the_limit(flood, monkeypatch):
    parts = []
    add = ValueCounter.add
    monkeypatch.setattr(
        ValueCounter, "add", lambda counter, part: (parts.append(part), add(counter, part))[1]
    )
    assert num_values(b"[" + flood + b"1]", 200_000) > 200_000
    assert sum(map(len, parts)) < 1_500_000


@given(VALUES)
def test_a_long_text_is_parsed_as_any_other(value):
    padded = json.dumps({"value": value, "rest": " " * LONG_BYTES}).encode()
    assert json_of(padded)["value"] == from_json(padded)["value"] == value


@pytest.mark.parametrize("rest", [b"", b" " * LONG_BYTES])
@pytest.mark.parametrize("text", NO_JSON)
def test_what_is_no_json_is_one_clause(text, rest):
    with pytest.raises(ValueError, match=r"^the reply is no JSON$"):
        json_of(text + rest)


async def turns_during(work) -> int:
    """How often another task of the event loop gets its turn meanwhile."""
    turns, task = 0, asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


@pytest.mark.parametrize("value", [b"[]", b"1.5", b'"a"', b'{"a":1}'])
async def test_a_long_text_is_parsed_while_the_event_loop_goes_on(value):
    text = b"[" + b",".join([value] * 100_000) + b"]"
    # Before and after a scanner in C, which holds all threads, the loop has a turn or two.
    assert await turns_during(off_loop(json_of, text)) > 4


async def test_a_reply_of_too_many_chunks_is_refused():
    async def chunks():
        for _ in range(retrying._MAX_CHUNKS + 1):
            yield b"x"

    with pytest.raises(ValueError, match="the reply is longer than 100,000 chunks"):
        await read_all(chunks(), 1 << 20)

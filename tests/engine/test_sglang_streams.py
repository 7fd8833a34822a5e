"""Streamed replies of SGLang: what is shown of them, and that they are the replies of any request.

`engine/conformance` holds the same for real servers.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.wire import StreamedReply
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.types.seams import Sampling
from tests.engine.serving import ScriptedServer, generated

ENDED = {"type": "abort", "message": "Aborted"}
DONE = b"data: [DONE]\n\n"


def event(ids, **changes) -> bytes:
    """What SGLang sends of a request that runs: all tokens so far, and no reason of an end."""
    reply = generated(ids, **changes)
    if "finish" not in changes:
        reply["meta_info"]["finish_reason"] = None
    return b"data: " + json.dumps(reply).encode() + b"\n\n"


def whole(ids, finish=None) -> bytes:
    return b"data: " + json.dumps(generated(ids, finish)).encode() + b"\n\n"


async def sampled(*replies, tokens=4):
    """What is shown, and the completion, or what is raised."""
    server, told = ScriptedServer(*replies), []
    async with server.listening() as url:
        policy = SGLangPolicy(url, attempts=2)
        try:
            with policy.watched("a", told.append):
                completion = await policy.generate([1, 2], Sampling(tokens), session="a")
        finally:
            await policy.close()
    assert all(request["stream"] for request in server.requests)
    return told, completion


async def test_tokens_are_shown_with_their_events_and_the_completion_is_the_last_one():
    told, completion = await sampled([event([3]), event([3, 5]), event([3, 5, 7]), whole([3, 5, 7, 9]), DONE])
    assert told == [[3], [5], [7]]
    assert completion.token_ids.tolist() == [3, 5, 7, 9]
    assert completion.logprobs.tolist() == [-0.5] * 4


async def test_a_request_that_was_ended_shows_each_token_once_when_it_goes_on():
    first = [event([3]), whole([3, 5], ENDED), DONE]
    told, completion = await sampled(first, [event([7]), event([7, 9]), whole([7, 9, 11]), DONE], tokens=5)
    assert [token for ids in told for token in ids] == [3, 5, 7, 9]
    assert completion.token_ids.tolist() == [3, 5, 7, 9, 11]


async def test_a_server_that_does_not_stream_shows_nothing():
    told, completion = await sampled(generated([3, 5, 7, 9]))
    assert (told, completion.token_ids.tolist()) == ([], [3, 5, 7, 9])


async def test_who_is_not_watched_asks_for_no_stream():
    server = ScriptedServer(generated([3]))
    async with server.listening() as url:
        policy = SGLangPolicy(url)
        await policy.generate([1], Sampling(1), session="a")
        await policy.close()
    assert "stream" not in server.requests[0]


@pytest.mark.parametrize(
    ("chunks", "error", "message"),
    [
        ([event([3]), b'data: {"error": {"message": "no room"}}\n\n', DONE], EngineError, "no room"),
        ([event([3]), event([3, 5])], EngineUnavailableError, "broke off a stream"),
        ([event([3]), b"<html>\n\n", DONE], EngineError, "between two events"),
        ([b"data: " + b"x" * (2 << 20)], EngineError, "longer than"),
        ([b"data: 5\n\n", DONE], EngineError, "SGLang protocol"),
        ("data: 5\n\ndata: [DONE]\n\n", EngineError, "SGLang protocol"),
        ([event([3]), event([3, 5]), DONE], EngineError, "finish_reason"),
    ],
    ids=["an error", "no end", "no event", "too long", "no object", "no chunks", "no last event"],
)
async def test_a_stream_that_is_none_is_one_sentence(chunks, error, message):
    with pytest.raises(error, match=message):
        await sampled(chunks)


@given(st.lists(st.integers(1, 300), max_size=20))
def test_where_a_stream_is_cut_into_chunks_changes_nothing(sizes):
    stream = b"".join(event(list(range(n))) for n in range(1, 6)) + whole(list(range(6))) + DONE
    told: list[list[int]] = []
    events = StreamedReply(lambda ids: told.append(list(ids)), 1 << 16)
    for size in [*sizes, len(stream)]:
        events.feed(stream[:size])
        stream = stream[size:]
    assert json.loads(events.whole(b"")) == generated(list(range(6)))
    assert all(ids == list(range(len(ids))) and len(ids) < 6 for ids in told)
    assert told == sorted(told, key=len)

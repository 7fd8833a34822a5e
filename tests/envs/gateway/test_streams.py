"""A stream begins while its reply is sampled, and says what the whole reply says, in each protocol."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.types.seams import Sampling
from tests.engine.subjects import tiny
from tests.envs.gateway.test_wire import ASKED, RESPONSES_TOOL, SCHEMA, events
from tests.envs.gateway.worlds import TOOL, Showing, adds, played_by, says

BODIES = {
    "/chat/completions": {"messages": ASKED, "tools": [TOOL]},
    "/responses": {"input": "How many?", "tools": [RESPONSES_TOOL]},
    "/messages": {"messages": ASKED, "tools": [{"name": "add", "input_schema": SCHEMA}], "max_tokens": 500},
}
TURNS = {
    "a text and calls": says("Let me see. It is a number.", adds(2, 3), adds(4, 5)),
    "a call": says("", adds(2, 3)),
    "signs of calls": says("So it is < 6, and [5]."),
    "a thought": says("It is 5.", reasoning="Two and three are five."),
    "nothing": says(""),
}


def said(path, told):
    """The reasoning, content and calls in the events of a stream."""
    found = {"reasoning": "", "content": "", "calls": []}
    for _, data in told:
        if path == "/chat/completions" and data != "[DONE]" and data["choices"]:
            delta = data["choices"][0]["delta"]
            found["reasoning"] += delta.get("reasoning_content", "")
            found["content"] += delta.get("content") or ""
            calls = [call["function"] for call in delta.get("tool_calls", ())]
            found["calls"] += [(call["name"], json.loads(call["arguments"])) for call in calls]
        elif path == "/messages" and data["type"] == "content_block_start":
            found["calls"] += (
                [data["content_block"]["name"]] if data["content_block"]["type"] == "tool_use" else []
            )
        elif path == "/messages" and data["type"] == "content_block_delta":
            delta = data["delta"]
            found["reasoning"] += delta.get("thinking", "")
            found["content"] += delta.get("text", "")
            if "partial_json" in delta:
                found["calls"][-1] = (found["calls"][-1], json.loads(delta["partial_json"]))
        elif path == "/responses":
            found["reasoning"] += data["delta"] if data["type"] == "response.reasoning_text.delta" else ""
            found["content"] += data["delta"] if data["type"] == "response.output_text.delta" else ""
            if data["type"] == "response.function_call_arguments.done":
                found["calls"].append((data["name"], json.loads(data["arguments"])))
    return found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
async def test_parts_say_what_the_turn_says(path, turn):
    async def asks(url, key, task):
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=20) as client:
            reply = await client.post(f"{url}{path}", json={"model": "m", "stream": True, **BODIES[path]})
            told.extend(events(reply.text))
        return "5"

    told = []
    episode = await played_by(asks, Showing(turn))
    assert episode.failure is None, episode.failure
    calls = [(each.name, dict(each.arguments)) for each in turn.tool_calls]
    expected = {"reasoning": turn.reasoning or "", "content": turn.text, "calls": calls}
    assert said(path, told) == expected
    if path == "/responses":
        _items_are_those_of_the_reply(told)
    if path == "/messages":
        _blocks_follow_each_other(told)


def _items_are_those_of_the_reply(told):
    """What clients of OpenAI rely on: each item ends as it is in the last event, under one id."""
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    reply = told[-1][1]["response"]
    done = [data["item"] for _, data in told if data["type"] == "response.output_item.done"]
    added = [data["item"]["id"] for _, data in told if data["type"] == "response.output_item.added"]
    assert (done, added) == (reply["output"], [item["id"] for item in reply["output"]])
    assert told[0][1]["response"]["id"] == reply["id"]


def _blocks_follow_each_other(told):
    """What clients of Anthropic rely on: one block is open at a time, numbered from 0."""
    is_open, number = False, -1
    for name, data in told:
        if name == "content_block_start":
            assert (is_open, data["index"]) == (False, number + 1)
            is_open, number = True, data["index"]
        elif name == "content_block_stop":
            assert (is_open, data["index"]) == (True, number)
            is_open = False
        elif name == "content_block_delta":
            assert (is_open, data["index"]) == (True, number)
    assert not is_open
    assert number >= 0


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_reads_the_first_words_while_the_rest_is_sampled(path):
    policy = Showing(says("Let me see. It is a number."), held=12)

    async def asks(url, key, task):
        body = {"model": "m", "stream": True, **BODIES[path]}
        async with (
            httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=20) as client,
            client.stream("POST", f"{url}{path}", json=body) as reply,
        ):
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if "Let me" in line or '"Le' in line or '"L"' in line:
                    seen.append(policy.goes_on.is_set())
                    policy.goes_on.set()
        return "5"

    seen = []
    episode = await played_by(asks, policy)
    assert episode.failure is None, episode.failure
    # The policy was still waiting when the first word was read.
    assert seen[0] is False


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("ends", [0, 14])
async def test_an_engine_that_fails_ends_the_stream_with_an_error(path, ends, caplog):
    policy = Showing(says("Let me see. It is a number."), ends=ends)

    async def reads(url, key):
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=20) as client:
            return await client.post(f"{url}{path}", json={"model": "m", "stream": True, **BODIES[path]})

    async def asks(url, key, task):
        # The agent ends with its engine; who reads goes on.
        reading.append(asyncio.create_task(reads(url, key)))
        await asyncio.sleep(20)

    reading = []
    episode = await played_by(asks, policy)
    assert "it is gone" in episode.failure.detail
    assert not policy.watches
    reply = await reading[0]
    said = json.dumps([data for _, data in events(reply.text)][-1]) if ends else reply.text
    assert (reply.status_code, "has failed" in said) == (200 if ends else 500, True)
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_in_mid_stream_ends_its_request(path):
    policy = Showing(says("Let me see. It is a number."), held=14)

    async def asks(url, key, task):
        body = {"model": "m", "stream": True, **BODIES[path]}
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=20) as client:
            async with client.stream("POST", f"{url}{path}", json=body) as reply:
                await anext(reply.aiter_lines())
            await asyncio.wait_for(policy.left.wait(), 10)
            policy.held = None
            await client.post(f"{url}{path}", json={"model": "m", **BODIES[path]})
        return "5"

    episode = await played_by(asks, policy)
    assert episode.failure is None, episode.failure
    # Nothing of the reply that nobody has read is trained.
    assert len(episode.turns) == 1


async def test_what_depends_on_the_whole_reply_is_not_begun_before():
    async def asks(url, key, task):
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=20) as client:
            for more in ({"tool_choice": "required"}, {"logprobs": True}, {"n": 2}):
                body = {"model": "m", "stream": True, **BODIES["/chat/completions"], **more}
                replies.append(await client.post(f"{url}/chat/completions", json=body))
        return "5"

    replies = []
    await played_by(asks, Showing(says("No call.")))
    required, logprobs, both = replies
    assert (required.status_code, required.json()["error"]["code"]) == (400, "tool_choice_not_held")
    entries = [
        entry
        for _, data in events(logprobs.text)
        if data != "[DONE]"
        for choice in data["choices"]
        for entry in (choice["logprobs"] or {}).get("content", ())
    ]
    assert "".join(entry["token"] for entry in entries).startswith("No call.")
    indices = {
        choice["index"] for _, data in events(both.text) if data != "[DONE]" for choice in data["choices"]
    }
    assert indices == {0, 1}


async def test_the_embedded_engine_shows_each_token_before_its_completion():
    model = tiny("qwen3", vocab_size=64, max_position_embeddings=128)
    engine = EmbeddedEngine.from_model(model, max_slots=4, max_context_len=100)
    shown = {f"s{number}": [] for number in range(3)}

    async def sampled(session):
        with engine.watched(session, shown[session].append):
            return await engine.generate(range(1, 20), Sampling(12, seed=3), session=session)

    beside = engine.generate([1, 2], Sampling(30, seed=1), session="unwatched")
    *completions, _ = await asyncio.gather(*map(sampled, shown), beside)
    for session, completion in zip(shown, completions, strict=True):
        told = [token for ids in shown[session] for token in ids]
        ids = completion.token_ids.tolist()
        assert ids[: len(told)] == told
        # The last step ends the request.
        assert len(ids) - len(told) <= 2
        assert len(shown[session]) > 5
    assert not engine.scheduler._watches
    await engine.close()

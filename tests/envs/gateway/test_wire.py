"""The wire formats: what clients of each protocol send and read; bounds, and errors in its own form."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest
from openai import AsyncOpenAI

from agentrl.types import ToolCall
from tests.envs.gateway.worlds import TOOL, WORDS, adds, episode_of, post, says

OTHER = {
    "type": "function",
    "function": {"name": "other", "parameters": {"type": "object", "properties": {}}},
}
CALL = says("Let me see.", adds(2, 3), adds(4, 5))
ASKED = [{"role": "user", "content": "How many?"}]


async def replies_to(requests, *turns):
    """The replies to (path, body) in one episode."""
    replies = []

    async def asks(url, key, task):
        for path, body in requests:
            replies.append(await post(url, path, key, body(replies) if callable(body) else body))
        return "5"

    episode, policy = await episode_of(asks, *turns)
    assert episode.failure is None, episode.failure
    return replies, policy, episode


def events(text):
    """The data of server-sent events, and their names where they have some."""
    for block in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        yield lines.get("event"), lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])


async def test_openai_chat():
    body = {"model": "gpt-9", "messages": ASKED, "tools": [TOOL], "temperature": 0.3, "logprobs": True}
    (reply,), policy, episode = await replies_to([("/chat/completions", body)], CALL)
    whole = reply.json()
    (choice,) = whole["choices"]
    calls = choice["message"]["tool_calls"]
    assert (whole["object"], whole["model"], choice["finish_reason"]) == (
        "chat.completion",
        "gpt-9",
        "tool_calls",
    )
    assert choice["message"]["content"] == "Let me see."
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
    assert len({c["id"] for c in calls}) == 2
    ((prompt, ids),) = policy.asked
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    assert whole["usage"]["completion_tokens"] == len(ids) == len(choice["logprobs"]["content"])
    assert episode.counts == {"requests": 1, "overruled_temperature": 1}
    # The run's settings sample, whatever its client says.
    assert policy.samplings[0].temperature == 1.0


async def test_openai_chat_streams_what_it_replies():
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": "m", "messages": ASKED, "tools": [TOOL], **options}
    (reply,), _, _ = await replies_to([("/chat/completions", body)], CALL)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = [data for _, data in events(reply.text)]
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "add"), (1, "add")]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] > 0


async def test_several_replies_stops_and_lengths():
    requests = [
        ("/chat/completions", {"model": "m", "messages": ASKED, "n": 2}),
        ("/chat/completions", {"model": "m", "messages": ASKED, "stop": ["STOP"], "max_tokens": 3}),
    ]
    (two, cut), policy, episode = await replies_to(requests, says("one"), says("two"), says("a b c d e"))
    words = [choice["message"]["content"] for choice in two.json()["choices"]]
    assert words == ["one", "two"]
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    assert (policy.samplings[2].max_new_tokens, policy.samplings[2].stop[-1:]) == (3, ("STOP",))
    assert len(policy.asked[2][1]) == 3
    assert len(episode.trajectories) == 3


@pytest.mark.parametrize(
    ("choice", "turn", "status"),
    [
        ("auto", says("5"), 200),
        ("none", says("5"), 200),
        ("required", CALL, 200),
        ("required", says("5"), 400),
        ({"type": "function", "function": {"name": "add"}}, CALL, 200),
        ({"type": "function", "function": {"name": "add"}}, says("5"), 400),
        ({"type": "function", "function": {"name": "add"}}, says("", adds(2, 3), ToolCall("other", {})), 400),
        ({"type": "function", "function": {"name": "sub"}}, CALL, 400),
        ({"type": "allowed_tools"}, CALL, 400),
    ],
)
async def test_a_tool_choice_holds_or_is_an_error_that_says_so(choice, turn, status):
    body = {"model": "m", "messages": ASKED, "tools": [TOOL, OTHER], "tool_choice": choice}
    plain = {"model": "m", "messages": ASKED}
    requests = [("/chat/completions", body), ("/chat/completions", plain)]
    (reply, _), policy, episode = await replies_to(requests, turn, says("5"))
    assert reply.status_code == status
    if status == 400:
        assert "tool_choice" in reply.json()["error"]["message"]
    if choice == "required" and status == 400:
        # What the model has said in place of a call is trained on: it is what has to change.
        assert reply.json()["error"]["code"] == "tool_choice_not_held"
        assert len(episode.turns[0].tokens.completion.token_ids) == len(policy.asked[0][1])
    if choice == "none":
        assert "add" not in episode.turns[0].observation[0].text


SCHEMA = TOOL["function"]["parameters"]


async def test_anthropic_messages_and_their_results():
    tool = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}
    first = {
        "model": "m",
        "max_tokens": 200,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}],
        "tools": [tool],
    }

    def second(replies):
        content = replies[0].json()["content"]
        uses = [block for block in content if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": uses[0]["id"], "content": "5"},
            {"type": "tool_result", "tool_use_id": uses[1]["id"], "content": [{"type": "text", "text": "9"}]},
            {"type": "text", "text": "Well?"},
        ]
        turns = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
        return {**first, "messages": [*first["messages"], *turns], "stop_sequences": ["STOP"]}

    (reply, then, counted), policy, episode = await replies_to(
        [("/messages", first), ("/messages", second), ("/messages/count_tokens", first)], CALL, says("14")
    )
    whole = reply.json()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert whole["content"][1]["input"] == {"a": 2, "b": 3}
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "tool_use")
    assert then.json()["content"] == [{"type": "text", "text": "14"}]
    assert then.json()["stop_reason"] == "end_turn"
    (prompt, ids), (longer, _) = policy.asked
    assert longer[: len(prompt) + len(ids)] == (*prompt, *ids)
    assert whole["usage"]["input_tokens"] == counted.json()["input_tokens"] == len(prompt)
    assert len(episode.trajectories) == 1
    assert episode.counts == {"requests": 2}


async def test_anthropic_streams_what_it_replies():
    tool = {"name": "add", "input_schema": SCHEMA}
    body = {"model": "m", "max_tokens": 200, "messages": ASKED, "tools": [tool], "stream": True}
    (reply,), _, _ = await replies_to([("/messages", body)], CALL)
    told = list(events(reply.text))
    assert all(name == data["type"] for name, data in told)
    names = [name for name, _ in told]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    starts = [data["content_block"]["type"] for name, data in told if name == "content_block_start"]
    assert starts == ["text", "tool_use", "tool_use"]
    deltas = [data["delta"] for name, data in told if name == "content_block_delta"]
    assert deltas[0] == {"type": "text_delta", "text": "Let me see."}
    assert json.loads(deltas[1]["partial_json"]) == {"a": 2, "b": 3}
    assert told[-2][1]["delta"]["stop_reason"] == "tool_use"


RESPONSES_TOOL = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}


async def test_openai_responses_with_items_and_with_an_earlier_response():
    first = {"model": "m", "instructions": "Be brief.", "input": "How many?", "tools": [RESPONSES_TOOL]}

    def outputs(reply):
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        return [
            {"type": "function_call_output", "call_id": call["call_id"], "output": str(number)}
            for number, call in enumerate(calls)
        ]

    def items(replies):
        reply = replies[0].json()
        asked = {"role": "user", "content": [{"type": "input_text", "text": "How many?"}]}
        return {**first, "input": [asked, *reply["output"], *outputs(reply)]}

    def continued(replies):
        reply = replies[0].json()
        return {**first, "input": outputs(reply), "previous_response_id": reply["id"]}

    (reply, second, _), policy, episode = await replies_to(
        [("/responses", first), ("/responses", items), ("/responses", continued)], CALL, says("9"), says("8")
    )
    whole = reply.json()
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert (whole["object"], whole["status"]) == ("response", "completed")
    assert json.loads(whole["output"][1]["arguments"]) == {"a": 2, "b": 3}
    assert second.json()["output"][0]["content"][0]["text"] == "9"
    (prompt, ids), (longer, _), (again, _) = policy.asked
    assert longer[: len(prompt) + len(ids)] == (*prompt, *ids)
    assert again == longer
    assert episode.counts == {"requests": 3, "overruled_strict": 3}
    assert whole["usage"]["input_tokens"] == len(prompt)


async def test_openai_responses_streams_what_it_replies():
    body = {"model": "m", "input": "How many?", "tools": [RESPONSES_TOOL], "stream": True}
    (reply,), _, _ = await replies_to([("/responses", body)], CALL)
    told = list(events(reply.text))
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    names = [name for name, _ in told]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 3
    written = [data for name, data in told if name == "response.function_call_arguments.done"]
    assert [json.loads(data["arguments"]) for data in written] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
    text = "".join(data["delta"] for name, data in told if name == "response.output_text.delta")
    assert text == "Let me see."


@pytest.mark.parametrize("protocol", ["/chat/completions", "/responses", "/messages"])
async def test_errors_are_in_the_form_of_their_protocol(protocol):
    requests = [
        (protocol, {"model": "m"}),
        (protocol, {"model": "m", "max_tokens": 9, "messages": "x", "input": 3}),
        (protocol, {"model": "m", "messages": [{"role": "user", "content": "x"}] * 5000, "max_tokens": 9,
                    "input": [{"role": "user", "content": "x"}] * 5000}),
    ]  # fmt: skip
    replies, _, _ = await replies_to(
        [*requests, ("/chat/completions", {"model": "m", "messages": ASKED})], says("5")
    )
    for reply in replies[:3]:
        assert reply.status_code == 400, reply.text
        body = reply.json()
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].endswith((".", "..."))
        assert (body.get("type") == "error") == (protocol == "/messages")


async def test_bodies_headers_and_hosts_are_bounded():
    statuses = {}

    async def asks(url, key, task):
        body = {"model": "m", "messages": ASKED}
        statuses["fine"] = await post(url, "/chat/completions", key, body)
        long = {"model": "m", "messages": [{"role": "user", "content": "x" * (9 << 20)}]}
        statuses["long"] = await post(url, "/chat/completions", key, long)
        statuses["values"] = await post(
            url, "/chat/completions", key, {"model": "m", "messages": [0] * 300_000}
        )
        statuses["host"] = await post(url, "/chat/completions", key, body, host="evil.example")
        statuses["origin"] = await post(url, "/chat/completions", key, body, origin="null")
        deep = "[" * 100_000 + "]" * 100_000
        async with httpx2.AsyncClient() as client:
            named = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            address = f"{url}/chat/completions"
            statuses["deep"] = await client.post(address, content=deep, headers=named)
            statuses["header"] = await client.post(
                address, content="{}", headers={**named, "x-a": "a" * 70_000}
            )
        statuses["models"] = await _get(url, "/models", key)
        statuses["no key"] = await _get(url, "/models", "x")
        return "5"

    await episode_of(asks, says("5"))
    codes = {name: reply.status_code for name, reply in statuses.items()}
    assert codes == {
        **{"fine": 200, "long": 413, "values": 413, "host": 403, "origin": 403, "deep": 400, "header": 400},
        **{"models": 200, "no key": 401},
    }
    assert statuses["models"].json()["data"][0]["id"] == "policy"


async def _get(url, path, key):
    async with httpx2.AsyncClient() as client:
        return await client.get(f"{url}{path}", headers={"authorization": f"Bearer {key}"})


async def test_the_client_of_openai_reads_whole_replies_and_streams():
    seen = []

    async def asks(url, key, task):
        client = AsyncOpenAI(base_url=url, api_key=key)
        reply = await client.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])
        seen.append([call.function.name for call in reply.choices[0].message.tool_calls])
        messages = [*ASKED, reply.choices[0].message]
        calls = reply.choices[0].message.tool_calls
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
        stream = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        seen.append("".join(text))
        response = await client.responses.create(model="m", input="And?")
        seen.append(response.output_text)
        return seen[-1]

    episode, policy = await episode_of(asks, CALL, says("It is 5."), says("5"))
    assert seen == [["add", "add"], "It is 5.", "5"]
    (prompt, ids), (longer, _), _ = policy.asked
    assert longer[: len(prompt) + len(ids)] == (*prompt, *ids)
    assert episode.total_of() == 1.0
    assert [len(t.turns) for t in episode.trajectories] == [2, 1]
    await asyncio.sleep(0)


async def test_messages_of_the_system_between_others_are_the_users():
    """Few templates have a place for them; several at the beginning are one."""
    asked = [
        *({"role": "developer", "content": "Be brief."}, {"role": "developer", "content": "Use tools."}),
        *({"role": "user", "content": "How many?"}, {"role": "system", "content": "Agents: none."}),
        *({"role": "user", "content": "Go on."}, {"role": "assistant", "content": "3"}),
        *({"role": "user", "content": "And?"}, {"role": "user", "content": "Now?"}),
        {"role": "system", "content": "One turn is left."},
    ]
    anthropic = {"system": "Be brief.", "max_tokens": 9, "messages": [*asked[2:5], *asked[5:]]}
    requests = [("/chat/completions", {"messages": asked}), ("/messages", anthropic)]
    requests = [(path, {"model": "m", **body}) for path, body in requests]
    _, policy, _ = await replies_to(requests, says("4"))
    (first, _), (second, _) = policy.asked
    texts = [WORDS.decode(ids) for ids in (first, second)]
    assert texts[0].startswith(
        "<|im_start|>system\nBe brief.\n\nUse tools.<|im_end|>\n<|im_start|>user\nHow many?"
    )
    for text in texts:
        assert text.count("<|im_start|>system") == 1
        assert "user\nHow many?\n\nAgents: none.\n\nGo on.<|im_end|>" in text
        # Those of the user alone stay as they were.
        assert "user\nAnd?<|im_end|>\n<|im_start|>user\nNow?\n\nOne turn is left.<|im_end|>" in text


async def test_tools_that_a_server_of_the_vendor_runs_are_left_out_and_counted():
    schema = {"type": "object", "properties": {}}
    own = {"name": "look", "input_schema": schema}
    anthropic = {"max_tokens": 9, "tools": [{"type": "web_search_20250305", "name": "web_search"}, own]}
    settings = {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    openai = {"tools": [{"type": "web_search"}, {"type": "function", "name": "look", "parameters": schema}]}
    requests = [
        ("/messages", {"messages": ASKED, **anthropic, **settings, "context_management": keeps}),
        ("/responses", {"input": "How many?", **openai, "client_metadata": {"turn": "1"}}),
    ]
    replies, policy, episode = await replies_to(
        [(path, {"model": "m", **body}) for path, body in requests], says("4")
    )
    assert [reply.status_code for reply in replies] == [200, 200]
    assert episode.counts["overruled_server_tools"] == 2
    assert (episode.counts["overruled_thinking"], episode.counts["overruled_effort"]) == (1, 1)
    assert all("look" in WORDS.decode(ids) and "search" not in WORDS.decode(ids) for ids, _ in policy.asked)
    # What a client runs itself, and edits that drop something, are no others' to leave out.
    own = [{"type": "bash_20250124", "name": "bash"}]
    drops = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    refused = [
        ("/messages", {"messages": ASKED, "max_tokens": 9, "tools": own}),
        ("/messages", {"messages": ASKED, "max_tokens": 9, "context_management": drops}),
        ("/responses", {"input": "How many?", "tools": [{"type": "local_shell"}]}),
    ]
    replies, _, _ = await replies_to(
        [
            *((path, {"model": "m", **body}) for path, body in refused),
            ("/responses", {"model": "m", "input": "?"}),
        ],
        says("4"),
    )
    assert [reply.status_code for reply in replies] == [400, 400, 400, 200]


async def test_functions_of_a_namespace_are_offered_and_called_by_both_names():
    space = {"type": "namespace", "name": "math", "tools": [{"type": "function", **TOOL["function"]}]}
    called = {"type": "function_call", "call_id": "c1", "name": "add", "namespace": "math"}
    asked = [{"role": "user", "content": "How many?"}]

    def again(replies):
        (call,) = [item for item in replies[0].json()["output"] if item["type"] == "function_call"]
        assert {name: call[name] for name in ("name", "namespace")} == {"name": "add", "namespace": "math"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        back = {**called, "call_id": call["call_id"], "arguments": call["arguments"]}
        return {"model": "m", "tools": [space], "input": [*asked, back, result], "stream": True}

    first = {"model": "m", "tools": [space], "input": asked}
    call = ToolCall("math__add", {"a": 2, "b": 3})
    replies, policy, episode = await replies_to(
        [("/responses", first), ("/responses", again)], says("", call)
    )
    assert "math__add" in WORDS.decode(policy.asked[0][0])
    assert [trajectory.reason for trajectory in episode.trajectories] == [None]
    items = [data["item"] for _, data in events(replies[1].text) if "item" in data]
    assert {(item["name"], item["namespace"]) for item in items} == {("add", "math")}


async def test_tools_that_nobody_runs_elsewhere_are_not_counted_so():
    space = {"type": "namespace", "name": "math", "tools": []}
    (reply,), _, episode = await replies_to(
        [("/responses", {"model": "m", "input": "How many?", "tools": [space]})], says("4")
    )
    assert reply.status_code == 200, reply.text
    assert episode.counts == {"requests": 1}


THOUGHT = "2 and 3, hm. Let me add é."


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_the_tokens_of_reasoning(stream):
    responses = {"model": "m", "input": "How many?", "stream": stream}
    chat = {"model": "m", "messages": ASKED}
    replies, policy, _ = await replies_to(
        [("/responses", responses), ("/chat/completions", chat), ("/responses", responses)],
        says("It is 5.", reasoning=THOUGHT), says("It is 5.", reasoning=THOUGHT), says("It is 5."),
    )  # fmt: skip
    ids = list(policy.asked[0][1])
    # Up to the mark that ends it, which is a token.
    before = ids.index(WORDS.tokenizer.convert_tokens_to_ids("</think>"))
    said = [last_response(reply) if stream else reply.json() for reply in (replies[0], replies[2])]
    numbers = [reply["usage"]["output_tokens_details"]["reasoning_tokens"] for reply in said]
    assert WORDS.decode(ids[:before]).strip().endswith(THOUGHT)
    assert before - 2 <= numbers[0] <= before
    assert numbers[1] == 0
    details = replies[1].json()["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": numbers[0]}


def last_response(reply):
    """What the last event of a stream says."""
    *_, (_, last) = events(reply.text)
    return last["response"]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_the_logprobs_of_their_text(stream):
    wanted = {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"], "stream": stream}
    body = {"model": "m", "input": "How many?", "tools": [RESPONSES_TOOL], **wanted}
    turn = says("It is é, 5.", adds(2, 3), reasoning="Is it 5? It is.")
    (reply,), policy, _ = await replies_to([("/responses", body)], turn)
    whole = last_response(reply) if stream else reply.json()
    (message,) = [item for item in whole["output"] if item["type"] == "message"]
    told = message["content"][0]["logprobs"]
    read = b"".join(WORDS.tokenizer.decode([id]).encode() for id in policy.asked[0][1])
    assert "".join(each["token"] for each in told).replace("\ufffd", "").strip() == "It is , 5.", read
    assert all(each["logprob"] <= 0 for each in told)
    if stream:
        deltas = [data for name, data in events(reply.text) if name == "response.output_text.delta"]
        assert [delta["logprobs"] for delta in deltas] == [told]
    refused = {"model": "m", "input": "How many?", "include": ["file_search_call.results"]}
    replies, _, _ = await replies_to([("/responses", refused), ("/responses", body)], says("4"))
    assert [reply.status_code for reply in replies] == [400, 200]

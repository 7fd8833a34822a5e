"""A response of a server becomes text, a mistake of the model or a failure of the world."""

from __future__ import annotations

import asyncio
import sys

import pytest

from agentrl import Limits, ScriptedAgent, call, play, say
from agentrl.errors import ToolDefinitionError, ToolError, ToolRejected, UserError
from agentrl.tools.mcp import McpTools, connection, stdio
from agentrl.types import Ending
from tests.tools.mcp.watching import SDK, Desk, in_flight, opened, raw
from tests.worlds import ASK

PICTURE = """a dot
[image not shown: image/png, 8 bytes]
[audio not shown: audio/wav, 3 bytes]
[resource not shown: log, file:///log.txt]
[resource not shown: file:///a.txt, 12 characters]
[resource not shown: file:///b.bin, 2 bytes]"""


@pytest.fixture
def impatient(monkeypatch):
    """Servers that hang time out sooner than usual."""
    monkeypatch.setattr(stdio, "EXIT_S", 0.1)
    monkeypatch.setattr(connection, "ANSWERS_S", 0.5)


async def test_every_kind_of_result_is_text_and_none_is_empty():
    async with opened(raw()) as tools:
        assert await tools["remember"].invoke({"text": "one"}) == "one"
        assert await tools["remember"].invoke({"text": "two"}) == "one two"
        assert await tools["picture"].invoke({}) == PICTURE
        assert await tools["structured"].invoke({}) == '{"sum": 3, "of": ["ä"]}'
        assert await tools["nothing"].invoke({}) == "The tool returned nothing."


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fails", "no such table: cats"),
        ("fails_silently", "fails_silently failed and did not say why."),
        ("invalid", "invalid: `day` must be in the past"),
    ],
)
async def test_an_error_result_counts_as_the_models_mistake(name, sentence):
    env = Desk(raw())
    await env.reset(ASK, seed=0)
    step = await env.step(call(name))
    await env.close()
    assert step.observation[0].content == sentence
    assert env.counts["rejected_calls"] == env.tool_stats[name].rejected["tool"] == 1


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "detail"),
    [
        ("internal", {}, "protocol", "`internal` failed with JSON-RPC error -32603: KeyError: 'x'"),
        ("nonsense", {}, "protocol", "`nonsense` answered what MCP does not allow: content: field required"),
        ("babble", {"line": "hi"}, "protocol", "to `babble` it wrote 'hi', which is no message of MCP"),
        ("upstream", {}, "protocol", "`upstream` failed with JSON-RPC error -32000: Connection closed"),
        ("die", {"words": "disk full"}, "crashed", r"a call of `die`: .* \(its last words: disk full\)"),
    ],
)
async def test_what_no_model_can_cause_fails_the_episode(impatient, name, arguments, kind, detail):
    script = (action for action in [call(name, **arguments)])
    episode = await play(Desk(raw()), ScriptedAgent(script), ASK)
    assert episode.ending is Ending.FAILED
    assert (episode.failure.stage, episode.failure.kind) == ("tool", kind)
    with pytest.raises(ToolError, match=detail):
        raise ToolError(kind, episode.failure.detail)


async def test_an_answer_without_bounds_is_cut_off_and_the_session_goes_on():
    async with opened(raw()) as tools:
        assert len(await tools["flood"].invoke({"characters": 4_000_000})) == 4_000_000
        with pytest.raises(ToolRejected, match="the answer has more than 16,777,216 bytes; ask for less"):
            await tools["flood"].invoke({"characters": 17_000_000})
        assert await tools["remember"].invoke({"text": "still here"}) == "still here"


async def test_a_flood_of_values_or_parts_is_cut_off_and_an_output_schema_is_not_evaluated():
    async with opened(raw()) as tools:
        with pytest.raises(ToolRejected, match="the answer has more than 200,000 values; ask for less"):
            await tools["values"].invoke({})
        lines = (await tools["blocks"].invoke({})).splitlines()
        assert lines == ["a"] * 1_000 + ["[500 more parts not shown]"]
        assert await tools["unlike"].invoke({}) == f'{{"text": "{"a" * 40}b"}}'


async def test_schemas_are_the_servers_own():
    async with opened(raw()) as tools:
        schema = tools["remember"].schema
        assert schema.parameters["properties"] == {"text": {"type": "string"}}
        assert schema.description == "Remember a text and return all that is remembered."
        with pytest.raises(ToolRejected, match="remember: parameter `text` must be a string, but got 5"):
            await tools["remember"].invoke({"text": 5})


async def test_a_choice_of_tools_and_a_prefix():
    async with opened(raw(only=["remember"], prefix="raw_")) as tools:
        assert list(tools) == ["raw_remember"]
        assert await tools["raw_remember"].invoke({"text": "x"}) == "x"
    with pytest.raises(ToolDefinitionError, match=r"has no tool `remembr`\. Did you mean `remember`\?"):
        async with opened(raw(only=["remembr"])):
            pass


REFUSED = ("no_schema", "a_list", "no_object", "wrong_text", "wrong_type", "number 7", "number 8")


async def used(toolkit):
    async with opened(toolkit) as tools:
        assert await tools["remember"].invoke({"text": "a"}) == "a"
        assert await tools["flood"].invoke({"characters": 3}) == "xxx"
        return list(tools)


@pytest.mark.parametrize("stateful", [True, False])
async def test_a_tool_that_cannot_be_offered_takes_no_other_with_it(stateful):
    with pytest.warns(RuntimeWarning) as warned:
        assert await used(raw("garbles", stateful=stateful)) == ["remember", "flood"]
    sentences = [str(warning.message) for warning in warned]
    assert len(sentences) == len(REFUSED)
    assert all(any(f"tool `{name}` cannot" in sentence for sentence in sentences) for name in REFUSED)
    assert all(sentence.endswith("; without it the others are offered.") for sentence in sentences)


@pytest.mark.filterwarnings("error")
async def test_a_tool_that_is_not_chosen_may_be_described_by_anything():
    async with opened(raw("garbles", only=["flood"])) as tools:
        assert list(tools) == ["flood"]
    with pytest.raises(ToolDefinitionError, match=r"tool `no_schema` .*or leave it out of `only`\.$"):
        async with opened(raw("garbles", only=["flood", "no_schema"])):
            pass
    with pytest.raises(ToolDefinitionError, match="`no_schema` cannot be offered"):
        async with opened(raw("garbles_all")):
            pass


async def test_two_episodes_at_once_never_see_each_others_state():
    toolkit = raw()

    def script(word):
        for _ in range(3):
            text = yield call("remember", text=word)
        yield say("3" if text == f"{word} {word} {word}" else text)

    episodes = await asyncio.gather(*(play(Desk(toolkit), ScriptedAgent(script(w)), ASK) for w in "abc"))
    assert [episode.step_rewards[-1] for episode in episodes] == [1.0] * 3


async def test_a_call_that_overruns_counts_as_the_models_mistake_and_the_server_restarts(impatient, tmp_path):
    env = Desk(raw())
    env.limits = Limits(tool_timeout_s=0.3)
    await env.reset(ASK, seed=0)
    await env.step(call("remember", text="before"))
    step = await env.step(call("hang", mark=str(tmp_path / "mark")))
    assert step.observation[0].content == "hang was stopped: it took longer than 0.3 s."
    assert (tmp_path / "mark").exists()
    # The restart of the server takes longer than a call may, and is no part of it.
    text = (await env.step(call("remember", text="after"))).observation[0].content
    await env.close()
    assert text.splitlines()[1:] == ["after"]
    assert text.startswith("(The server was started again after the call before")
    assert "timeout" not in env.tool_stats["remember"].failed


async def test_a_server_that_takes_a_cancellation_keeps_what_it_remembers(tmp_path):
    toolkit = McpTools(command=sys.executable, args=[SDK])
    async with opened(toolkit) as tools:
        assert await tools["count"].invoke({}) == "1"
        waiting, _ = await in_flight(tools["wait"], tmp_path / "mark", seconds=600)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await tools["count"].invoke({}) == "2"
        with pytest.raises(ToolRejected, match="Error executing tool divide"):
            await tools["divide"].invoke({"a": 1, "b": 0})


@pytest.mark.parametrize(
    ("habits", "kind", "detail"),
    [
        (["ends"], "unavailable", r"did not start: .* \(its last words: the licence has expired\)"),
        (["mute"], "unavailable", r"was not ready within 0\.4 s"),
        (["loops"], "protocol", "the server lists more than 256 tools"),
        (["floods"], "protocol", "the server lists more than 256 tools"),
        (["bloats"], "protocol", "the server's schemas have more than 50,000 values together"),
    ],
)
async def test_a_server_that_does_not_come_up_is_a_failed_episode(habits, kind, detail):
    toolkit = raw(*habits, start_timeout_s=0.4 if "mute" in habits else 20.0)
    episode = await play(Desk(toolkit), ScriptedAgent(iter(())), ASK)
    assert (episode.failure.stage, episode.failure.kind) == ("tool", kind)
    with pytest.raises(ToolError, match=detail):
        raise ToolError(kind, episode.failure.detail)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "has either a `command`, a program to start, or a `url`"),
        ({"command": "x", "url": "http://127.0.0.1:1"}, "has either a `command`"),
        ({"command": "no-such-program"}, "there is no program `no-such-program` to start; install it"),
        ({"command": "sh", "headers": {"a": "b"}}, "`headers` belong to the `url`"),
        ({"url": "http://127.0.0.1:1", "args": ["x"]}, "belong to the `command`"),
        ({"url": "ftp://127.0.0.1"}, "is not an address"),
        ({"command": "sh", "start_timeout_s": 0}, "start_timeout_s must be above 0, got 0"),
    ],
)
def test_contradictory_settings_of_a_server_are_refused_at_once(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        McpTools(**settings)


async def test_a_server_gets_exactly_the_configured_environment(monkeypatch):
    monkeypatch.setenv("SECRET_OF_OURS", "token")
    async with opened(raw(env={"PLACE": "Köln"})) as tools:
        assert (await tools["environment"].invoke({})).strip("\0").split("\0") == ["PLACE=Köln"]
    async with opened(raw()) as tools:
        assert await tools["environment"].invoke({}) == "The tool returned nothing."


async def test_no_output_of_a_server_reaches_the_terminal(impatient, capfd):
    async with opened(raw("chatty")) as tools:
        with pytest.raises(ToolError):
            await tools["die"].invoke({"words": "ouch"})
    async with opened(raw()) as tools:
        with pytest.raises(ToolError):
            await tools["babble"].invoke({"line": "noise"})
    assert capfd.readouterr() == ("", "")


async def test_at_most_so_many_calls_at_a_time_over_all_tools():
    async with opened(raw(max_concurrency=2)) as tools:
        assert len({id(tool.gate) for tool in tools.values()}) == 1
    with pytest.raises(ValueError, match="at least 1"):
        raw(max_concurrency=0)

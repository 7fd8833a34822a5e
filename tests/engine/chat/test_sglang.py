"""A real SGLang server behind `/v1/chat/completions`: requests are accepted, replies are parsed."""

from __future__ import annotations

import asyncio
import math

import pytest

import agentrl
from agentrl import Limits, Message, Step, Task, ToolCall, play
from agentrl.assembly.model import fresh_source
from agentrl.assembly.sections import ModelSection
from agentrl.engine.chat.agent import ChatAgent
from agentrl.engine.chat.endpoint import ChatEndpoint
from agentrl.engine.chat.settings import ChatSettings
from agentrl.envs import Chat
from agentrl.errors import ConfigError
from agentrl.types import Ending, Restart
from agentrl.weights.hf.fresh import draw_weights
from tests.engine.serving import free_port, running, sglang_command
from tests.worlds import Parrot, Talk

pytestmark = pytest.mark.full
CONTEXT = 2048


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server of a tiny untrained model with a chat template."""
    folder = tmp_path_factory.mktemp("sglang")
    env = agentrl.make("Calculator-v0")
    section = ModelSection(num_layers=1, hidden_size=32, ffn_hidden_size=32, kv_channels=16)
    draw_weights(fresh_source(section, env, Chat(), seed=0, folder=folder / "model").directory, 0)
    # SGLang takes the port 10,000 above for another service of its own.
    port = next(port for port in iter(free_port, 0) if port < 55_000)
    command = sglang_command(folder / "model", port, context_length=CONTEXT)
    with running(command, f"http://127.0.0.1:{port}", "/health", folder / "log") as served:
        yield f"{served}/v1"


async def episode(url, env, **settings):
    async with ChatEndpoint(url=url, attempts=1, timeout_s=120).connected() as connection:
        return await play(
            env, ChatAgent(connection, ChatSettings("m", **settings)), Task.ask("t", "12 and 7?")
        )


async def test_an_evaluation_counts_what_the_server_counts(url):
    report = await asyncio.to_thread(
        agentrl.evaluate,
        "Calculator-v0",
        quiet=True,
        n=6,
        openai_url=url,
        openai_model="m",
        openai_max_tokens=8,
        price_prompt=1.0,
        price_completion=2.0,
    )
    assert (report.n, report.failures) == (6, {})
    assert sum(report.endings.values()) == 6
    used = report.usage
    assert used["prompt_tokens"] > 6
    assert 0 < used["completion_tokens"] <= 8 * report.turns * 6
    assert math.isclose(report.cost, (used["prompt_tokens"] + 2 * used["completion_tokens"]) / 1e6)


async def test_greedy_turns_are_reproducible_and_max_tokens_holds(url):
    first, second = [await episode(url, Parrot(), temperature=0.0, max_tokens=5) for _ in range(2)]
    assert first.turns[0].action == second.turns[0].action
    assert first.ending in (Ending.TRUNCATED, Ending.COMPLETED)
    if first.ending is Ending.TRUNCATED:
        assert first.usage.completion_tokens == 5


async def test_a_conversation_with_readable_and_unreadable_calls_is_accepted(url):
    calls = (
        ToolCall("echo", {"text": "a"}, id="a"),
        ToolCall("echo", None, raw='{"text', id="b", error="no JSON"),
        ToolCall("no such", None, raw="", id="c", error="no tool"),
    )
    history = (
        Message("system", "Be brief."),
        Message("user", "Say a."),
        Message("assistant", tool_calls=calls),
        Message("tool", "a", tool_call_id="a", name="echo"),
        Message("tool", "That is no JSON.", tool_call_id="b"),
    )

    class Rewritten(Talk):
        limits = Limits(max_turns=2, max_tokens=None)
        tool_schemas = Parrot().tool_schemas

        async def reset(self, task, *, seed):
            return Step.restarted(*history, reason=Restart.COMPACTED).observation, {}

    played = await episode(url, Rewritten(steps=[Step.finished(reward=1.0)]), max_tokens=4)
    assert played.failure is None
    assert played.usage.prompt_tokens > 20


async def test_a_conversation_longer_than_the_context_is_truncated_not_failed(url):
    class LongPrompt(Talk):
        async def reset(self, task, *, seed):
            return (Message("user", "12 and 7? " * CONTEXT),), {}

    played = await episode(url, LongPrompt())
    assert (played.ending, played.counts.get("chat/context_full")) == (Ending.TRUNCATED, 1)


async def test_a_wrong_path_or_port_is_an_error_message(url):
    async def checked(wrong):
        async with ChatEndpoint(url=wrong, attempts=1, timeout_s=60).connected() as connection:
            await connection.check(ChatSettings("m"), Parrot().tool_schemas)

    await checked(url)
    with pytest.raises(ConfigError, match=r"answered 404.*usually ends in /v1"):
        await checked(url.removesuffix("/v1"))
    with pytest.raises(ConfigError, match="check openai_url"):
        await checked("http://127.0.0.1:9/v1")

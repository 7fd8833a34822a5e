"""Every client against the same hostile servers: redirects, replies without end, floods."""

from __future__ import annotations

import json

import httpx2
import numpy as np
import pytest

from agentrl import Task
from agentrl.engine.chat.endpoint import ChatEndpoint
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.teacher import ServedTeacher
from agentrl.envs.graders.judge import JudgeGrader
from agentrl.envs.graders.remote import RemoteGrader
from agentrl.envs.openenv import OpenEnv
from agentrl.errors import AgentRLError
from agentrl.http.guarded import AllowedAddresses
from agentrl.tools import release_shared
from agentrl.tools.mcp import McpTools
from agentrl.tools.search.client import SearchClient
from agentrl.types import Author, Message
from agentrl.types.seams import Sampling
from tests.algorithms.test_distillation import row_of
from tests.hostile import attacking, endless, measured, redirected, replied

TASK = Task("t", (Message("user", "?"),), "4", {}, "train")
MAX_STEP_S = 0.5
MIB = 1 << 20


async def chat(url):
    async with ChatEndpoint(url=url, attempts=1).connected() as client:
        await client.complete({"model": "m"})


async def judge(url):
    await JudgeGrader(url=url, attempts=1, asks=1).grade(TASK, "4")


async def remote_grader(url):
    await RemoteGrader(url=url, attempts=1).grade(TASK, "4")


async def search(url):
    async with SearchClient(url, attempts=1).connected() as find:
        await find("who?")


async def teacher(url):
    authors = [Author.WORLD, Author.POLICY]
    sample = row_of(authors, token_ids=np.zeros(2, np.int32), temperatures=np.ones(2, np.float32))
    await ServedTeacher(urls=(url,), timeout_s=60).logprobs([sample], None)


async def sglang(url):
    policy = SGLangPolicy(url, attempts=1)
    try:
        await policy.generate([1, 2], Sampling(max_new_tokens=16), session="s")
    finally:
        await policy.close()


async def openenv(url):
    env = OpenEnv(url)
    await env.reset(env.tasks("train")[0], seed=0)


async def mcp(url):
    async with McpTools(url=f"{url}/mcp").episode():
        pass


async def tool(url):
    async with AllowedAddresses(url).client(max_bytes=MIB) as client:
        await client.get(f"{url}/page")


# The most bytes that each reads of a reply; a socket holds some more.
CLIENTS = {
    chat: 16 * MIB,
    judge: 16 * MIB,
    remote_grader: 8 * MIB,
    search: 32 * MIB,
    teacher: 2 * MIB,
    sglang: 2 * MIB,
    openenv: MIB,
    mcp: 16 * MIB,
    tool: MIB,
}
FACTS = {"/server_info": {"context_length": 4096}, "/model_info": {}, "/health": {}}


@pytest.fixture(params=CLIENTS, ids=lambda client: client.__name__)
async def client(request):
    yield request.param
    await release_shared()


def serving(attack):
    """A server that behaves, until it is asked for a reply."""

    def answer(path, body):
        return replied(json.dumps(FACTS[path]).encode()) if path in FACTS else attack()

    return attacking(answer)


async def failure_of(client, url, monkeypatch):
    """The error, and the longest step of the event loop."""
    with measured(monkeypatch) as cost, pytest.raises((AgentRLError, httpx2.HTTPError)) as caught:
        await client(url)
    assert cost.longest_s < MAX_STEP_S
    assert len(str(caught.value)) < 1_000
    return str(caught.value)


async def test_no_client_follows_a_redirect_to_another_origin(client, monkeypatch):
    with attacking(lambda path, body: replied(b"{}")) as other:
        with serving(lambda: redirected(f"{other.url}/secret")) as server:
            await failure_of(client, server.url, monkeypatch)
        assert server.requests
    assert other.requests == []


async def test_no_client_reads_a_reply_without_end(client, monkeypatch):
    with serving(endless) as server:
        assert "longer than" in await failure_of(client, server.url, monkeypatch) or client is mcp
        assert server.num_sent < CLIENTS[client] + 16 * MIB


async def test_no_client_reads_the_body_of_a_redirect_without_end(client, monkeypatch):
    def again():
        return endless("307 Go", "location: /again")

    with serving(again) as server:
        await failure_of(client, server.url, monkeypatch)
        assert server.num_sent < CLIENTS[client] + 16 * MIB


async def test_chunks_of_one_byte_do_not_hold_the_event_loop(client, monkeypatch):
    def chunks():
        # After them, what is no chunk: a client that takes all of them fails there.
        return [next(endless()), b"1\r\n \r\n" * 110_000, b"?\r\n"]

    with serving(chunks) as server:
        await failure_of(client, server.url, monkeypatch)


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1", b'""', b'{"a":1}'])
async def test_values_are_counted_before_they_are_parsed(client, value, monkeypatch):
    # The author of a tool parses what it gets.
    if client is not tool:
        with serving(lambda: replied(b"[" + b",".join([value] * 250_000) + b"]")) as server:
            sentence = await failure_of(client, server.url, monkeypatch)
        assert "200,000 values" in sentence or "longer than" in sentence or client in (sglang, teacher)

"""The client of `/retrieve`: few requests, classified failures, no leaked task or socket."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from agentrl import Limits, ScriptedAgent, Task, ToolEnv, call, play, say
from agentrl.data import Prompt
from agentrl.envs import Scorer
from agentrl.errors import ConfigError, ToolError
from agentrl.records import Entry, Journal, Outcome, read_journal
from agentrl.rollout.group import GroupPlayer
from agentrl.tools import RemoteSearchTool, release_shared
from agentrl.tools.search.client import SearchClient
from agentrl.types import Ending
from tests.tools.search.retriever import Retriever


def shown(hits):
    return [(hit.passage.id, hit.passage.contents, hit.score) for hit in hits]


@pytest.mark.parametrize("scores", [True, False])
async def test_both_shapes_of_a_reply_are_read(scores):
    async with (
        Retriever(scores=scores).serving() as server,
        SearchClient(server.url, k=2).connected() as search,
    ):
        score = 1.0 if scores else None
        assert shown(await search("a cat")) == [
            ("0", '"a cat"\ntext 0', score),
            ("1", '"a cat"\ntext 1', score),
        ]
        assert shown(await search("nothing")) == []
    assert server.requests[0] == {"queries": ["a cat"], "topk": 2, "return_scores": True}


async def test_concurrent_queries_share_requests_and_connections_and_keep_their_order():
    async with (
        Retriever().serving() as server,
        SearchClient(server.url, k=1, max_requests=2).connected() as search,
    ):
        server.gate.clear()
        first = [asyncio.create_task(search(f"early {n % 3}")) for n in range(6)]
        await server.arrived.wait()
        rest = [asyncio.create_task(search(f"late {n}")) for n in range(50)]
        await asyncio.sleep(0)
        server.gate.set()
        titles = [hits[0].passage.title for hits in await asyncio.gather(*first, *rest)]
        assert titles == [f'"early {n % 3}"' for n in range(6)] + [f'"late {n}"' for n in range(50)]
        assert server.counts["requests"] == 2
        assert server.requests[0]["queries"] == ["early 0", "early 1", "early 2"], "equal ones are asked once"
        for n in range(20):
            await search(f"alone {n}")
        assert server.counts["connections"] <= 2


async def test_requests_hold_no_more_queries_than_allowed():
    async with Retriever().serving() as server, SearchClient(server.url, max_batch=4).connected() as search:
        await asyncio.gather(*(search(f"q{n}") for n in range(10)))
        assert sorted(len(request["queries"]) for request in server.requests) == [2, 4, 4]


async def test_what_passes_is_tried_again_and_counted():
    client = None
    async with Retriever(429, 503, "drop", headers="Retry-After: 0\r\n").serving() as server:
        client = SearchClient(server.url, k=1, attempts=4)
        async with client.connected() as search:
            assert len(await search("q")) == 1
    assert server.counts["requests"] == 4
    assert client.counts == {"requests": 4, "retries": 3, "queries": 4}


@pytest.mark.parametrize(
    ("behaviour", "kind", "requests"),
    [
        *[(status, "unavailable", 2) for status in (429, 502, 503, 504)],
        ("drop", "crashed", 2),
        *[(500, "crashed", 1), (401, "refused", 1), (403, "refused", 1)],
        *[(status, "protocol", 1) for status in (400, 404, 422, 201, 301)],
        *[(body, "protocol", 1) for body in ("", "{", "[]", "null", '{"result": 1}', '{"result": []}')],
        *[(body, "protocol", 1) for body in ('{"result": [[], []]}', '{"result": [7]}', '{"result": [[7]]}')],
        *[(body, "protocol", 1) for body in ('{"result": [[{"document": {}}]]}', '{"detail": "no"}')],
        (json.dumps({"result": [[{"contents": 7}]]}), "protocol", 1),
        ("[" * 100_000, "protocol", 1),
    ],
)
async def test_every_failure_is_typed_and_none_is_an_empty_list(behaviour, kind, requests):
    server = Retriever(*[behaviour] * requests, headers="Retry-After: 0\r\n")
    async with server.serving(), SearchClient(server.url, attempts=2).connected() as search:
        with pytest.raises(ToolError, match=server.url) as failed:
            await search("q")
        assert failed.value.kind == kind
        assert server.counts["requests"] == requests
        assert await search("nothing") == (), "the next query finds the client as it was"


async def test_without_a_listening_server_it_is_unavailable():
    async with Retriever().serving() as server:
        pass
    client = SearchClient(server.url, attempts=2)
    async with client.connected() as search:
        with pytest.raises(ToolError) as failed:
            await search("q")
    assert (failed.value.kind, client.counts["retries"]) == ("unavailable", 1)


async def test_a_server_that_restarts_is_reached_again():
    async with Retriever().serving() as server, SearchClient(server.url, attempts=8).connected() as search:
        await search("before")
        await server.kill()
        searching = asyncio.create_task(search("meanwhile"))
        await asyncio.sleep(0.05)
        async with server.serving():
            assert len(await searching) == 3


async def test_a_hanging_server_is_unavailable_at_the_clients_own_deadline():
    server = Retriever("hang")
    async with server.serving(), SearchClient(server.url, timeout_s=0.2).connected() as search:
        with pytest.raises(ToolError, match=r"did not answer in 0\.2 s") as failed:
            await asyncio.wait_for(search("q"), 20)
        assert failed.value.kind == "unavailable"
        assert len(await search("another")) == 3


async def test_an_endless_reply_is_cut_off(monkeypatch):
    monkeypatch.setattr("agentrl.tools.search.client._MAX_REPLY_BYTES", 1000)
    async with Retriever("[" * 2000).serving() as server, SearchClient(server.url).connected() as search:
        with pytest.raises(ToolError, match="longer than 1,000 bytes"):
            await search("q")


async def test_a_redirect_to_elsewhere_is_refused():
    async with Retriever().serving() as other:
        headers = f"Location: {other.url}/retrieve\r\n"
        async with (
            Retriever(307, headers=headers).serving() as server,
            SearchClient(server.url).connected() as search,
        ):
            with pytest.raises(ToolError) as failed:
                await search("q")
    assert (failed.value.kind, other.counts["requests"]) == ("refused", 0)


async def test_the_cache_forgets_what_was_used_longest_ago_and_can_be_off():
    async with Retriever().serving() as server:
        client = SearchClient(server.url, cache_size=2)
        async with client.connected() as search:
            for query in ("a", "b", "a", "c", "a", "b"):
                await search(query)
        assert [request["queries"] for request in server.requests] == [["a"], ["b"], ["c"], ["b"]]
        assert client.counts["cached"] == 2
        async with SearchClient(server.url, cache_size=0).connected() as search:
            await search("a")
            await search("a")
        assert server.counts["requests"] == 6


async def test_a_failure_is_never_cached():
    async with Retriever(500).serving() as server, SearchClient(server.url).connected() as search:
        with pytest.raises(ToolError):
            await search("q")
        assert len(await search("q")) == 3


def sockets():
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.lexists(link))


async def test_cancelling_leaves_no_task_and_no_socket_and_affects_no_other_query():
    async with (
        Retriever().serving() as server,
        SearchClient(server.url, max_requests=1).connected() as search,
    ):
        await search("warm")
        tasks, open_sockets = asyncio.all_tasks(), sockets()
        server.gate.clear()
        server.arrived.clear()
        together = [asyncio.create_task(search(f"q{n}")) for n in range(3)]
        await server.arrived.wait()
        waiting = asyncio.create_task(search("in the next batch"))
        await asyncio.sleep(0)
        together[0].cancel()
        waiting.cancel()
        await asyncio.wait([together[0], waiting])
        server.gate.set()
        assert [len(await task) for task in together[1:]] == [3, 3]
        server.gate.clear()
        server.arrived.clear()
        last = asyncio.create_task(search("last"))
        await server.arrived.wait()
        last.cancel()
        await asyncio.wait([last])
        assert last.cancelled()
        server.gate.set()
        assert (
            asyncio.all_tasks()
            - tasks
            - {task for task in asyncio.all_tasks() if "_connection" in repr(task)}
            == set()
        )
        assert sockets() <= open_sockets
        assert [request["queries"] for request in server.requests[1:]] == [["q0", "q1", "q2"], ["last"]]


@pytest.mark.parametrize(
    "settings",
    [
        {"k": 0},
        {"attempts": 0},
        {"max_batch": 0},
        {"max_batch": 513},
        {"timeout_s": 0.0},
        {"timeout_s": float("inf")},
        {"cache_size": -1},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError):
        SearchClient("http://127.0.0.1:1", **settings)


class Library(ToolEnv):
    """One question, answered by one search."""

    limits = Limits(max_turns=3, max_tokens=None, tool_timeout_s=5.0)

    def __init__(self, toolkit):
        self.tools = (toolkit,)
        super().__init__()

    def tasks(self, split):
        return [Task.ask("q", "What does the library say?", answer="1.0")]

    def reward(self, task, answer):
        return float(answer.startswith("Doc 1(Title: "))


def reader(query="a cat"):
    text = yield call("search", query=query)
    yield say(text)


async def test_a_model_reads_documents_as_search_r1_shows_them_or_that_there_are_none():
    async with Retriever().serving() as server, RemoteSearchTool(server.url, k=2).episode() as (tool,):
        text = await tool.invoke({"query": " a \n cat "})
        assert text == 'Doc 1(Title: "a cat") text 0\nDoc 2(Title: "a cat") text 1\n'
        assert await tool.invoke({"query": "nothing"}) == "Nothing was found; try other words."
        assert tool.overrun == "world"
    await release_shared()


async def test_a_server_killed_in_mid_request_fails_the_episode_which_is_typed_and_can_be_played_again():
    async with Retriever().serving() as server:
        server.gate.clear()
        toolkit = RemoteSearchTool(server.url, attempts=2)
        played = asyncio.create_task(play(Library(toolkit), ScriptedAgent(reader()), Task.ask("q", "?")))
        await server.arrived.wait()
        await server.kill()
        episode = await played
        assert episode.ending is Ending.FAILED
        assert (episode.failure.stage, episode.failure.kind) == ("tool", "unavailable")
        assert episode.events["tool/search/failed/unavailable"] == 1
        server.gate.set()
        async with server.serving():
            again = await play(Library(toolkit), ScriptedAgent(reader()), Task.ask("q", "?"))
        assert again.step_rewards[-1] == 1.0
    await release_shared()


async def test_siblings_of_a_server_that_dies_in_mid_request_are_journalled_and_replaced(tmp_path):
    server = Retriever()
    async with server.serving():
        toolkit = RemoteSearchTool(server.url, attempts=1)
        player = GroupPlayer(
            lambda: Library(toolkit), lambda: ScriptedAgent(reader()), Scorer(()), size=3, retries=50, seed=0
        )
        server.gate.clear()
        playing = asyncio.create_task(player.play(Prompt(7, Task.ask("q", "?"), 1234), 0))
        await server.arrived.wait()
        await server.kill()
        server.gate.set()
        async with server.serving():
            outcome = await playing
    entries = [Entry(e, (), Outcome.DROPPED, "failed") for e in outcome.failed]
    async with Journal(tmp_path) as journal:
        path = await journal.write_step(0, entries)
    failures = [(entry.episode.failure.stage, entry.episode.failure.kind) for entry in read_journal(path)]
    assert len(failures) >= 3, "the siblings shared the request that broke"
    assert set(failures) <= {("tool", "crashed"), ("tool", "unavailable")}
    assert ("tool", "crashed") in failures
    assert [verdict.total for verdict in outcome.group.verdicts] == [1.0] * 3
    await release_shared()


async def test_siblings_share_a_client_and_see_no_difference():
    async with Retriever().serving() as server:
        toolkit = RemoteSearchTool(server.url)
        tasks = [play(Library(toolkit), ScriptedAgent(reader()), Task.ask("q", "?")) for _ in range(8)]
        episodes = await asyncio.gather(*tasks)
        observations = [[turn.observation for turn in episode.turns] for episode in episodes]
        assert all(observation == observations[0] for observation in observations)
        assert [episode.step_rewards[-1] for episode in episodes] == [1.0] * 8
        assert server.counts["requests"] == 1
    await release_shared()

"""Requests of several processes to the servers of one fleet: all are held, or none."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.clients import Clients
from agentrl.rollout.players import direct, messages
from agentrl.rollout.players.direct import DirectClient, DirectRequests
from agentrl.types.seams import Sampling
from tests.engine.serving import embedded_server
from tests.engine.subjects import VOCAB, text_of

PROMPT = [1, 10, 20]


def policy_at(url):
    return SGLangPolicy(url, vocab_size=VOCAB, decode=text_of)


class Player:
    """A player's requests and their driver's side, whose messages arrive a turn of the loop later."""

    def __init__(self, policy):
        loop = asyncio.get_running_loop()
        self.policy, self.sent, self.overdue = policy, [], 0
        self.client = DirectClient(lambda message: loop.call_soon(self._at_player, message), self._on_overdue)
        self.requests = DirectRequests(policy, lambda message: loop.call_soon(self.client.receive, message))

    def _at_player(self, message):
        self.sent.append(message)
        handle = self.requests.hold if isinstance(message, messages.Hold) else self.requests.release
        handle(message)

    def _on_overdue(self):
        self.overdue += 1
        self.client.end()


def start(policy, number=0):
    return asyncio.create_task(policy.generate(PROMPT, Sampling(200, seed=number), session=f"s{number}"))


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def sent(policy):
    return [pending.sent for pending in policy._pending]


async def test_a_hold_ends_the_requests_of_every_client_and_a_release_gives_them_the_salt():
    async with embedded_server() as (url, engine):
        own, theirs = policy_at(url), policy_at(url)
        clients, player = Clients(own), Player(theirs)
        clients.add(player.client)
        running = [start(own, 0), start(theirs, 1)]
        await until(lambda: sent(own) == sent(theirs) == [True])
        async with clients.held(engine.abort):
            waiting = start(theirs, 2)
            await asyncio.sleep(0.1)
            assert sent(own) == [False]
            assert sent(theirs) == [False, False]
            assert not any(task.done() for task in (*running, waiting))
            own.salt = "of the new weights"
        done = await asyncio.gather(*running, waiting)
        assert [len(completion.token_ids) for completion in done] == [200] * 3
        assert theirs.salt == "of the new weights"
        player.client.counts = player.requests.counts
        assert clients.counts["resumed"] == 2
        clients.remove(player.client)
        assert clients.counts["resumed"] == 2, "those of a client that has ended still count"
        await asyncio.gather(own.close(), theirs.close(), player.requests.close())


async def test_where_holds_overlap_a_client_goes_on_after_the_last_one():
    async with embedded_server() as (url, _):
        own, theirs = policy_at(url), policy_at(url)
        clients, player = Clients(own), Player(theirs)
        clients.add(player.client)
        async with clients.held():
            async with clients.held():
                request = start(theirs)
            await asyncio.sleep(0.1)
            assert sent(theirs) == [False]
        assert len((await request).token_ids) == 200
        await asyncio.gather(own.close(), theirs.close(), player.requests.close())


async def test_a_client_is_held_until_it_has_the_salt_also_where_it_is_added_during_a_hold():
    async with embedded_server() as (url, _):
        own, theirs = policy_at(url), policy_at(url)
        clients, player = Clients(own), Player(theirs)
        request = start(theirs)
        async with clients.held():
            clients.add(player.client)
            await asyncio.sleep(0.1)
            assert sent(theirs) == [False]
            own.salt = "7"
        await request
        assert (theirs.salt, player.sent) == ("7", [messages.Release("7")])
        await asyncio.gather(own.close(), theirs.close(), player.requests.close())


async def test_a_client_that_ends_or_does_not_answer_stops_no_update(monkeypatch):
    monkeypatch.setattr(direct, "HOLD_S", 0.1)
    async with embedded_server() as (url, _):
        own, theirs = policy_at(url), policy_at(url)
        clients, gone, hung = Clients(own), Player(theirs), Player(theirs)
        for player in (gone, hung):
            clients.add(player.client)
            player.requests.hold = lambda message: None
        async with asyncio.timeout(10):
            holding = asyncio.create_task(_held_once(clients))
            await until(lambda: gone.sent[1:] == [messages.Hold(1)])
            gone.client.end()
            await holding
        assert (gone.overdue, hung.overdue) == (0, 1)
        await asyncio.gather(own.close(), theirs.close(), gone.requests.close(), hung.requests.close())


async def _held_once(clients):
    async with clients.held():
        pass


@pytest.mark.parametrize(("waiting", "num_clients", "expected"), [(0, 4, 0), (1, 4, 1), (9, 4, 3), (9, 1, 9)])
def test_a_client_counts_its_part_of_the_queues(waiting, num_clients, expected):
    from agentrl.engine.sglang.concurrency import Load
    from agentrl.engine.sglang.wire import RankLoad

    ranks = [
        RankLoad.model_construct(num_waiting_reqs=waiting, token_usage=0.25),
        RankLoad.model_construct(num_waiting_reqs=0, token_usage=0.5),
    ]
    assert Load.of(ranks, num_clients) == (expected, 0.5)


async def test_a_client_answers_each_of_two_holds_that_begin_at_the_same_time(monkeypatch):
    """Both wait for a request that takes longer to end than one message."""
    monkeypatch.setattr(direct, "HOLD_S", 2.0)
    async with embedded_server() as (url, _):
        own, theirs = policy_at(url), policy_at(url)
        clients, player = Clients(own), Player(theirs)
        clients.add(player.client)
        request = start(theirs)
        await until(lambda: sent(theirs) == [True])
        async with asyncio.timeout(10):
            await asyncio.gather(_held_once(clients), _held_once(clients))
        assert player.overdue == 0
        assert len((await request).token_ids) == 200
        await asyncio.gather(own.close(), theirs.close(), player.requests.close())

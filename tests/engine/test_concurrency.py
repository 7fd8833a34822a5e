"""Requests in flight follow the servers' queues and caches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.embedded.scheduler import Scheduler
from agentrl.engine.sglang import SGLangPolicy, concurrency
from agentrl.engine.sglang.concurrency import AdaptiveLimit, Admission, Load
from agentrl.errors import EngineError
from agentrl.types import Finish
from tests.engine.fleets import until
from tests.engine.serving import ScriptedServer, embedded_server, generated
from tests.engine.subjects import HTTP_CAPS, VOCAB, remote_subject, text_of
from tests.engine.test_conformance_http import checked
from tests.engine.test_fleet import expect_exact, start_request

QUICK = ("more requests", "abort", "cancelling", "close")
"""The checks in which requests wait for a place, or end there."""


@dataclass(eq=False)
class Request:
    """A call that samples a token in each step that a server computes it. tokens, length: counts."""

    number: int
    length: int
    tokens: int = 0
    num_interrupted: int = 0
    interrupted: bool = False
    ticket: object = None
    returned: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def draft(self):
        return SimpleNamespace(ended=self.tokens == self.length)


class Simulation:
    """Calls that go through an admission to a server with slots and a cache of so many tokens.

    Every `period` steps the server reports its load. What must always hold is checked in every step.
    """

    def __init__(self, lengths, *, ceiling, slots, cache, period=1):
        self.requests = [Request(number, length) for number, length in enumerate(lengths)]
        self.limit = AdaptiveLimit(ceiling)
        self.admission = Admission(self.limit)
        self.ceiling, self.slots, self.cache, self.period = ceiling, slots, cache, period
        self.sent = []
        self.limits, self.usages = [], []

    @property
    def running(self):
        return self.sent[: self.slots]

    async def call(self, request):
        while request.tokens < request.length:
            assert await self.admission.enter(request)
            request.interrupted = False
            request.returned.clear()
            self.sent.append(request)
            await request.returned.wait()
            self.admission.leave(request)

    async def play(self):
        tasks = [asyncio.create_task(self.call(request)) for request in self.requests]
        steps = 0
        while not all(task.done() for task in tasks):
            await self.settle()
            self.compute()
            # The calls of requests that have ended give their places back.
            await self.settle()
            if steps % self.period == 0:
                self.report()
            steps += 1
            assert steps <= 10 * (1 + sum(request.length for request in self.requests)), "all of them end"
        await asyncio.gather(*tasks)
        assert all(request.tokens == request.length for request in self.requests)
        assert self.requests[0].num_interrupted == 0, "the oldest is never interrupted"

    async def settle(self):
        """Let the calls go on, and check who was admitted."""
        before = list(self.sent)
        for _ in range(4):
            await asyncio.sleep(0)
        admitted = [request for request in self.sent if request not in before]
        if admitted:
            assert len(self.sent) <= self.limit.value
            waiting = [r.number for r in self.requests if r.tokens < r.length and r not in self.sent]
            assert all(request.number < min(waiting, default=1 << 30) for request in admitted), "oldest first"

    def compute(self):
        limit, ended = self.limit.value, 0
        for request in self.running:
            request.tokens += 1
        self.usages.append(sum(request.tokens for request in self.running) / self.cache)
        for request in [request for request in self.running if request.tokens == request.length]:
            ended += 1
            self.sent.remove(request)
            request.returned.set()
        self.limits.append(limit)
        assert 1 <= limit <= self.ceiling
        assert ended or limit <= max(self.limits[-2:]), "only a completion raises the limit"

    def report(self):
        before = self.limit.value
        queue = len(self.sent) - len(self.running)
        usage = sum(request.tokens for request in self.running) / self.cache
        youngest = self.admission.report(Load(queue, usage))
        assert self.limit.value <= before, "a report never raises the limit"
        if youngest:
            stay = [request.number for request in self.sent if request not in youngest]
            assert usage >= 0.95
            assert stay
            assert max(stay) < min(request.number for request in youngest), "the youngest first"
        for request in youngest:
            request.num_interrupted += 1
            self.sent.remove(request)
            request.returned.set()


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(5, 300),
    st.integers(1, 4),
)
def test_every_request_ends_and_the_youngest_make_room(lengths, ceiling, slots, cache, period):
    asyncio.run(Simulation(lengths, ceiling=ceiling, slots=slots, cache=cache, period=period).play())


@pytest.mark.parametrize(
    ("slots", "cache", "lowest", "highest"),
    [(8, 1 << 20, 7, 10), (64, 500, 6, 16), (64, 1 << 20, 48, 48)],
    ids=["a queue", "a cache", "room for all"],
)
def test_the_limit_settles_where_the_servers_have_room(slots, cache, lowest, highest):
    # Requests of 50 tokens: from 10 that are about to end to 20 fill a cache of 500.
    lengths = np.random.default_rng(0).integers(20, 81, 300).tolist()
    simulation = Simulation(lengths, ceiling=48, slots=slots, cache=cache)
    asyncio.run(simulation.play())
    # Without the first requests, which begin at the same time, and the last ones.
    settled = slice(len(simulation.limits) // 3, -80)
    assert lowest <= min(simulation.limits[settled])
    assert max(simulation.limits[settled]) <= highest
    assert max(simulation.usages[settled]) <= 1.0
    if cache == 500:
        assert np.mean(simulation.usages[settled]) >= 0.6, "it is used, too"


async def test_the_load_of_a_server_is_its_queue_and_its_cache():
    async with embedded_server() as (url, engine):
        policy = SGLangPolicy(url, adaptive=True)
        running = [start_request(policy, number, 100) for number in range(6)]
        await until(lambda: engine.num_requests == 6)
        (load,) = await policy._connection.loads()
        assert load.num_waiting_reqs == 2
        assert 4 * 4 <= round(load.token_usage * 4 * 256) <= 4 * 104
        await expect_exact(running, 100)
        await policy.close()


async def test_the_youngest_requests_make_room_in_a_full_cache_and_go_on(monkeypatch):
    load = Scheduler.load

    def full_above_two_requests(scheduler):
        num_waiting, num_tokens = load.fget(scheduler)
        return num_waiting, 4 * 256 if len(scheduler.pending()) > 2 else num_tokens

    monkeypatch.setattr(Scheduler, "load", property(full_above_two_requests))
    monkeypatch.setattr(concurrency, "_LOAD_EVERY_S", 0.005)
    async with embedded_server() as (url, _):
        policy = SGLangPolicy(url, adaptive=True, vocab_size=VOCAB, decode=text_of)
        running = [start_request(policy, number, 200) for number in range(6)]
        await expect_exact(running, 200)
        assert policy.counts["interrupted"] >= 2
        assert policy.counts["resumed"] == 0
        assert policy._admission.limit.value <= 3
        # What waits for a place can be ended, too.
        running = [start_request(policy, number, 200) for number in range(8)]
        await until(lambda: policy._admission._waiting)
        await asyncio.wait_for(policy.abort(), 5)
        assert {(await task).finish for _, task in running} == {Finish.ABORT}
        await policy.close()


async def test_a_server_that_does_not_report_its_load_is_refused():
    async with ScriptedServer(generated([4])).listening() as url:
        for adaptive in (False, True):
            policy = SGLangPolicy(url, adaptive=adaptive)
            if adaptive:
                with pytest.raises(EngineError, match=r"/v1/loads.* does not follow the SGLang protocol"):
                    await start_request(policy, 1, 1)[1]
            else:
                await start_request(policy, 1, 1)[1]
            await policy.close()


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check.name.startswith(QUICK) else pytest.mark.full)
        for check in checked(HTTP_CAPS)
    ],
    ids=lambda check: check.name,
)
async def test_an_adaptive_policy_keeps_its_promise(check):
    async with embedded_server() as (url, engine):
        subject = remote_subject(url, HTTP_CAPS, 256, adaptive=True)
        await check.run(subject)
        await subject.engine.close()
        assert engine.num_requests == 0, "a request was left behind"

"""A fleet loses servers, really, in mid-generation, and loses no request and no version over it."""

from __future__ import annotations

import asyncio
import signal

import numpy as np
import pytest

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.fleet import Fleet, Health
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineUnavailableError
from agentrl.protocols import Sampling
from agentrl.types import Finish
from tests.engine.fleets import pids_at, served_fleet, sglang_fleet, strike, until
from tests.engine.serving import embedded_server
from tests.engine.subjects import delivery_of, logits_of, tiny

LONG = 1000  # fewer are through before anything can strike


async def publish(engine, version):
    """Send the weights of `tiny("qwen3", version)`."""
    sent = delivery_of(tiny("qwen3", version))
    async with engine.sink.begin(sent.manifest, version) as transaction:
        for bucket in sent.buckets:
            await transaction.put(bucket)
        await transaction.commit(sent.checksum)


def is_of_its_versions(prompt, completion):
    """Every greedy token is the best one, and has the logprob, of the model that its version names."""
    ids = [*prompt, *completion.token_ids.tolist()]
    rows = {v: logits_of(tiny("qwen3", v), ids).astype(np.float64) for v in set(completion.versions.tolist())}
    for t, token in enumerate(completion.token_ids.tolist()):
        row = rows[int(completion.versions[t])][len(prompt) + t - 1]
        best = row.max() - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert row.argmax() == token
        assert float(completion.logprobs[t]) == pytest.approx(best, abs=2e-5)


def asked(fleet, number, new=LONG):
    prompt = [number, 2, 3, 4]
    greedy = Sampling(new, temperature=0.0)
    return prompt, asyncio.create_task(fleet.generate(prompt, greedy, session=f"s{number}"))


async def all_right(asked_for):
    for prompt, task in asked_for:
        done = await asyncio.wait_for(task, 120)
        assert (len(done.token_ids), done.finish) == (LONG, Finish.LENGTH)
        is_of_its_versions(prompt, done)


@pytest.mark.full
async def test_a_server_that_dies_or_hangs_comes_back_with_the_weights_and_no_request_is_lost(tmp_path):
    async with served_fleet(tmp_path) as fleet:
        port = fleet.processes[0].port
        running = [asked(fleet, n) for n in range(3)]
        await until(lambda: fleet.policy._pending)
        await asyncio.sleep(0.05)
        await publish(fleet, 1)
        assert fleet.version == 1
        # Tokens had come when it struck: the update ended all requests, and they went on from their own.
        await until(lambda: fleet.policy.counts["resumed"] >= 1)
        assert any(pending.draft.ids for pending in fleet.policy._pending.values())
        strike(pids_at(port), signal.SIGKILL)
        await all_right(running)
        assert fleet.policy.counts["lost"] >= 1
        assert [incident.server for incident in fleet.incidents] == ["server-0"]
        assert "it ended (exit code" in fleet.incidents[0].reason

        running = [asked(fleet, n) for n in range(3, 6)]
        await until(lambda: any(pending.sent for pending in fleet.policy._pending.values()))
        strike(pids_at(port), signal.SIGSTOP)
        await all_right(running)
        assert "failed its health check of 1 s" in fleet.incidents[1].reason
        _, last = asked(fleet, 9)
        assert set((await last).versions.tolist()) == {1}, "it came back with the weights that it had"

        # New weights wait for it, too.
        strike(pids_at(port), signal.SIGKILL)
        await until(lambda: fleet._held_requests is not None, 10)
        running = [asked(fleet, 0)]
        await asyncio.sleep(0.3)
        assert not any(pending.rid for pending in fleet.policy._pending.values()), "nobody is there to ask"
        await asyncio.wait_for(publish(fleet, 2), 60)
        _, late = asked(fleet, 1)
        await all_right(running)
        assert set((await late).versions.tolist()) == {2}
    assert pids_at(port) == []


class Part:
    """A server of some role that can be away: others answer for it."""

    def __init__(self, role, url):
        self.name, self.role, self.url = role, role, url
        self.running, self.returncode = True, None
        self.may_start = asyncio.Event()

    async def start(self):
        await self.may_start.wait()
        self.running = True

    async def stop(self):
        self.running = False


async def test_requests_wait_while_a_role_has_no_server():
    """A request needs one that prefills and one that decodes."""
    async with embedded_server() as (url, _), embedded_server() as (other, _):
        policy = SGLangPolicy(url, resend_lost=True)
        parts = [Part("prefill", url), Part("decode", url), Part("decode", other)]
        fleet = Fleet(parts, None, policy, SharedMemory(), closed_by_others).watch()
        request = ([1, 2, 3], Sampling(4))
        try:
            parts[1].running = False
            await until(lambda: not fleet._members[1].routed)
            await fleet.generate(*request, session="one decodes still")
            parts[2].running = False
            await until(lambda: fleet._held_requests is not None)
            waiting = asyncio.create_task(fleet.generate(*request, session="none does"))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            parts[2].may_start.set()
            assert (await asyncio.wait_for(waiting, 60)).finish is Finish.LENGTH
            assert [incident.server for incident in fleet.incidents] == ["decode"]
        finally:
            await fleet.close()


async def closed_by_others():
    pass


@pytest.mark.full
async def test_a_server_that_does_not_come_back_is_no_secret(tmp_path):
    said = []
    async with served_fleet(tmp_path, Health(0.2, 1.0)) as fleet:
        fleet.on_event = said.append
        (tmp_path / "model" / "config.json").unlink()
        strike(pids_at(fleet.processes[0].port), signal.SIGKILL)
        await until(lambda: len(said) > 1)
        fleet.policy.timeout_s = 0.2
        with pytest.raises(EngineUnavailableError):
            await asked(fleet, 0)[1]
    assert "server-0: it ended (exit code 137); it is restarted." in said[0]
    assert "server-0 was not restarted" in said[1]
    assert "config.json" in said[1]


@pytest.mark.faults
async def test_one_of_two_real_servers_dies_in_mid_generation_and_is_replaced(tmp_path):
    async with sglang_fleet(tmp_path, 2, context_len=2048) as fleet:
        await publish(fleet, 1)
        victim = pids_at(fleet.processes[0].port)
        running = [asked(fleet, n) for n in range(6)]
        await until(lambda: sum(pending.sent for pending in fleet.policy._pending.values()) == 6)
        await asyncio.sleep(0.05)
        await publish(fleet, 2)
        await until(lambda: fleet.policy.counts["resumed"] >= 1)
        # Tokens had come: what goes on was ended by the update, and keeps what it had.
        assert any(pending.draft.ids for pending in fleet.policy._pending.values())
        strike(victim, signal.SIGKILL)
        await all_right(running)
        assert fleet.policy.counts["lost"] >= 1
        await until(lambda: fleet.incidents, 180)
        assert [incident.server for incident in fleet.incidents] == ["server-0"]
        after = [asked(fleet, n) for n in range(10, 22)]
        await all_right(after)
        assert {int(v) for _, task in after for v in task.result().versions} == {2}
        assert len(await fleet.router.workers()) == 2

        running = [asked(fleet, n) for n in range(30, 36)]
        await until(lambda: sum(pending.sent for pending in fleet.policy._pending.values()) == 6)
        strike(pids_at(fleet.router.port), signal.SIGKILL)
        await all_right(running)
        assert len(await fleet.router.workers()) == 2
        assert fleet.counts["restarts"] == 2
    assert pids_at(fleet.processes[0].port) == []

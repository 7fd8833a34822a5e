"""A fleet loses server processes in mid-generation, but no request and no version."""

from __future__ import annotations

import asyncio
import signal

import numpy as np
import pytest

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.fleet import Fleet, Health
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import ConfigError, EngineUnavailableError
from agentrl.records.status import processes_in
from agentrl.runtime.activity import ENDED, LOADS, OUT, RESTS, SERVES, STARTS, Activities
from agentrl.types import Finish
from agentrl.types.seams import Sampling
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, pack_buckets
from tests.engine.fleets import pids_at, send_signal, served_fleet, sglang_fleet, until
from tests.engine.scheduling import Scheduler, checkpoint
from tests.engine.serving import CONTROL, embedded_server, save_tiny
from tests.engine.subjects import delivery_of, logits_of, tiny

LONG = 1000  # too many to finish before a server is killed


async def publish(engine, version):
    """Send the weights of `tiny("qwen3", version)`."""
    sent = delivery_of(tiny("qwen3", version))
    async with engine.sink.begin(sent.manifest, version) as transaction:
        for bucket in sent.buckets:
            await transaction.put(bucket)
        await transaction.commit(sent.checksum)


def expect_versions(prompt, completion, tolerance=2e-5):
    """Expect each token to be the greedy one, with its logprob, of the model at the token's version.

    tolerance: of a logprob; where two tokens are nearer to each other, either may be the greedy one.
    """
    ids = [*prompt, *completion.token_ids.tolist()]
    rows = {v: logits_of(tiny("qwen3", v), ids).astype(np.float64) for v in set(completion.versions.tolist())}
    for t, token in enumerate(completion.token_ids.tolist()):
        row = rows[int(completion.versions[t])][len(prompt) + t - 1]
        logp = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert logp.max() - logp[token] <= 2 * tolerance
        assert float(completion.logprobs[t]) == pytest.approx(logp[token], abs=tolerance)


def start_request(fleet, number, new=LONG):
    prompt = [number, 2, 3, 4]
    greedy = Sampling(new, temperature=0.0)
    return prompt, asyncio.create_task(fleet.generate(prompt, greedy, session=f"s{number}"))


async def expect_exact(requests, new=LONG):
    """Expect requests to get all their tokens; returns the versions of each."""
    versions = []
    for prompt, task in requests:
        done = await asyncio.wait_for(task, 120)
        assert (len(done.token_ids), done.finish) == (new, Finish.LENGTH)
        expect_versions(prompt, done)
        versions.append(set(done.versions.tolist()))
    return versions


@pytest.mark.full
async def test_a_server_that_dies_or_hangs_is_restarted_with_the_weights_and_no_request_is_lost(tmp_path):
    async with served_fleet(tmp_path) as fleet:
        port = fleet.processes[0].port
        running = [start_request(fleet, n) for n in range(3)]
        await until(lambda: fleet.policy._pending)
        await asyncio.sleep(0.05)
        await publish(fleet, 1)
        assert fleet.version == 1
        # Tokens were sampled before the kill: the update ended all requests, and they resumed from their own.
        await until(lambda: fleet.policy.counts["resumed"] >= 1)
        assert any(pending.draft.ids for pending in fleet.policy._pending)
        send_signal(pids_at(port), signal.SIGKILL)
        await expect_exact(running)
        assert fleet.policy.counts["lost"] >= 1
        assert [incident.server for incident in fleet.incidents] == ["server-0"]
        assert "it ended (exit code" in fleet.incidents[0].reason

        running = [start_request(fleet, n) for n in range(3, 6)]
        await until(lambda: any(pending.sent for pending in fleet.policy._pending))
        send_signal(pids_at(port), signal.SIGSTOP)
        await expect_exact(running)
        assert "failed its health check of 1 s" in fleet.incidents[1].reason
        _, last = start_request(fleet, 9)
        assert set((await last).versions.tolist()) == {1}, "the restarted server has the weights from before"

        # An update waits for it, too.
        send_signal(pids_at(port), signal.SIGKILL)
        await until(lambda: fleet._supervisor._held_requests is not None, 10)
        running = [start_request(fleet, 0)]
        await asyncio.sleep(0.3)
        assert not any(pending.rid for pending in fleet.policy._pending), "no server is up"
        await asyncio.wait_for(publish(fleet, 2), 60)
        _, late = start_request(fleet, 1)
        await expect_exact(running)
        assert set((await late).versions.tolist()) == {2}
    assert pids_at(port) == []


class Part:
    """A server of a role that can be down, and restarts on a signal."""

    def __init__(self, role, url):
        self.name, self.role, self.url = role, role, url
        self.running, self.end_reason, self.left_s = True, "it ended", None
        self.may_start = asyncio.Event()

    async def start(self):
        await self.may_start.wait()
        self.running = True

    async def stop(self):
        self.running = False

    def log_tail(self):
        return ""


async def test_requests_wait_while_a_role_has_no_server():
    """A request needs a prefill and a decode server."""
    async with embedded_server() as (url, _), embedded_server() as (other, _):
        policy = SGLangPolicy(url, resend_lost=True)
        parts = [Part("prefill", url), Part("decode", url), Part("decode", other)]
        fleet = Fleet(parts, None, policy, SharedMemory(), no_op, headers=CONTROL).watch()
        request = ([1, 2, 3], Sampling(4))
        try:
            parts[1].running = False
            await until(lambda: not fleet._membership.members[1].routed)
            await fleet.generate(*request, session="one decodes still")
            parts[2].running = False
            await until(lambda: fleet._supervisor._held_requests is not None)
            waiting = asyncio.create_task(fleet.generate(*request, session="none does"))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            parts[2].may_start.set()
            assert (await asyncio.wait_for(waiting, 60)).finish is Finish.LENGTH
            assert [incident.server for incident in fleet.incidents] == ["decode"]
        finally:
            await fleet.close()


async def test_a_server_that_still_gets_its_weights_gets_no_requests_for_the_end_of_another(monkeypatch):
    async with embedded_server() as (url, _), embedded_server() as (other, _):
        parts = [Part("regular", url), Part("regular", other)]
        policy = SGLangPolicy(url, resend_lost=True)
        fleet = Fleet(parts, None, policy, SharedMemory(), no_op, headers=CONTROL).watch()
        restored = asyncio.Event()
        monkeypatch.setattr(fleet._sink, "restore", lambda server: restored.wait())
        try:
            parts[0].running = False
            parts[0].may_start.set()
            first = fleet._membership.members[0]
            await until(lambda: first.serves and not first.routed)
            parts[1].running = False
            await until(lambda: fleet._supervisor._held_requests is not None)
            restored.set()
            await until(lambda: fleet._supervisor._held_requests is None)
            assert first.routed
        finally:
            await fleet.close()


async def test_whatever_keeps_a_server_from_its_start_it_is_tried_again(monkeypatch):
    """Also what only its machine knows, such as an interpreter that is missing there."""
    monkeypatch.setattr(asyncio, "sleep", short(asyncio.sleep))
    events, problems = [], [ConfigError("no interpreter"), OSError("no process"), EngineUnavailableError("x")]

    class Late(Part):
        async def start(self):
            if problems:
                raise problems.pop(0)
            await super().start()

    async with embedded_server() as (url, _):
        part, policy = Late("regular", url), SGLangPolicy(url, resend_lost=True)
        part.may_start.set()
        fleet = Fleet([part], None, policy, SharedMemory(), no_op, on_event=events.append, headers=CONTROL)
        fleet.watch()
        try:
            part.running = False
            await until(lambda: fleet.incidents)
            assert (await fleet.generate([1, 2, 3], Sampling(4), session="x")).finish is Finish.LENGTH
        finally:
            await fleet.close()
    assert sum("was not restarted" in event for event in events) == 3


def short(sleep):
    """A sleep of no more than a tenth of a second."""
    return lambda seconds, result=None: sleep(min(seconds, 0.1), result)


async def test_the_timeline_of_a_run_has_the_service_of_each_server_and_its_updates(tmp_path):
    activities = Activities()
    async with embedded_server() as (url, _):
        part = Part("regular", url)
        with activities.observed():
            policy = SGLangPolicy(url, resend_lost=True)
            transport = Disk(tmp_path / "weights", model=save_tiny(tmp_path / "model"))
            fleet = Fleet([part], None, policy, transport, no_op, headers=CONTROL, title="eval ").watch()
        await publish(fleet, 1)
        served = processes_in(activities, {})["eval regular"]
        part.running = False
        await until(lambda: activities.processes["eval regular"].name == STARTS)
        part.may_start.set()
        await until(lambda: fleet.incidents)
        again = processes_in(activities, {})["eval regular"]
        await fleet.close()
    assert (served.where, served.version, served.doing.name) == (url, 1, "in service")
    assert (again.version, again.doing.name) == (1, "in service")
    stages = [(span.name, span.what) for span in activities.spans if span.process == "eval regular"]
    assert stages == [
        *((SERVES, ""), (LOADS, ""), (SERVES, ""), (OUT, "it ended"), (STARTS, ""), (LOADS, "")),
        (SERVES, ""),
    ]
    assert processes_in(activities, {})["eval regular"].doing.name == ENDED


async def test_a_server_that_is_replaced_while_memory_is_released_rests_as_the_others_do():
    activities = Activities()
    async with embedded_server() as (url, engine):
        part, policy = Part("regular", url), SGLangPolicy(url, resend_lost=True)
        with activities.observed():
            fleet = Fleet([part], None, policy, SharedMemory(), no_op, headers=CONTROL).watch()
        await fleet.release_memory(["kv_cache"])
        assert activities.processes["regular"].name == RESTS
        part.running = False
        part.may_start.set()
        await until(lambda: fleet.incidents)
        assert engine.memory.is_missing
        assert activities.processes["regular"].name == RESTS
        await fleet.resume_memory(["kv_cache"])
        assert activities.processes["regular"].name == SERVES
        await fleet.close()


async def test_a_request_goes_on_from_its_tokens_when_the_only_server_has_left_its_machine(monkeypatch):
    monkeypatch.setattr("agentrl.engine.sglang.fleet._POLL_S", 0.005)
    events = []
    async with embedded_server() as (url, _):
        policy = SGLangPolicy(url, resend_lost=True)
        part = Part("regular", url)
        fleet = Fleet([part], None, policy, SharedMemory(), no_op, headers=CONTROL, on_event=events.append)
        request = [1, 2, 3], Sampling(250, temperature=0.0)
        try:
            expected = await fleet.watch().generate(*request, session="undisturbed")
            running = asyncio.create_task(fleet.generate(*request, session="disturbed"))
            await until(lambda: any(pending.sent for pending in policy._pending))
            part.left_s = 30.0
            await until(lambda: not part.running)
            assert not running.done(), "it strikes in flight"
            (pending,) = policy._pending
            assert pending.draft.ids, "it keeps its tokens"
            part.left_s = None
            part.may_start.set()
            done = await asyncio.wait_for(running, 60)
        finally:
            await fleet.close()
    assert done.token_ids.tolist() == expected.token_ids.tolist()
    assert (policy.counts["lost"], policy.counts["resumed"]) == (0, 1)
    assert events[0] == (
        "regular: its machine is going away in 30 s, and its requests go on elsewhere; it is restarted."
    )


async def test_after_an_update_every_request_has_the_salt_of_the_new_weights():
    async with Scheduler().listening() as url:
        policy = SGLangPolicy(url)
        fleet = Fleet([Part("regular", url)], None, policy, SharedMemory(), no_op)
        salts = []
        for version in (1, 2, 1):
            tensors = checkpoint(3 if salts else 1)
            async with fleet.sink.begin(manifest_of(tensors), version) as transaction:
                for bucket in pack_buckets(tensors, 1 << 20):
                    await transaction.put(bucket)
                await transaction.commit(checksum(tensors))
            salts.append(policy.salt)
        await fleet.close()
    # Version 1 has come twice, with other weights: another run may use the same servers.
    assert [salt.partition(".")[0] for salt in salts] == ["1", "2", "1"]
    assert len(set(salts)) == 3


async def test_each_server_traces_into_a_folder_of_its_own(tmp_path):
    schedulers = [Scheduler(), Scheduler()]
    async with schedulers[0].listening() as url, schedulers[1].listening() as other:
        parts = [Part("regular", url), Part("regular", other)]
        fleet = Fleet(parts, None, SGLangPolicy(url), SharedMemory(), no_op)
        await fleet.profile(tmp_path, 7)
        schedulers[1].before = lambda path, body: setattr(schedulers[1], "dead", "it has no profiler")
        with pytest.raises(EngineUnavailableError, match="it has no profiler"):
            await fleet.profile(tmp_path, 7)
        await fleet.close()
    asked = [{"output_dir": str(tmp_path / f"server-{n}"), "num_steps": 7} for n in (0, 1)]
    assert [scheduler.profiled[0] for scheduler in schedulers] == asked


async def no_op():
    pass


@pytest.mark.full
async def test_a_failed_restart_is_reported(tmp_path):
    events = []
    async with served_fleet(tmp_path, Health(0.2, 1.0), events.append) as fleet:
        (tmp_path / "model" / "config.json").unlink()
        send_signal(pids_at(fleet.processes[0].port), signal.SIGKILL)
        await until(lambda: len(events) > 1)
        fleet.policy.timeout_s = 0.2
        with pytest.raises(EngineUnavailableError):
            await start_request(fleet, 0)[1]
    assert "server-0: it ended (exit code 137); it is restarted. the last lines of" in events[0]
    assert "server-0 was not restarted" in events[1]
    assert "config.json" in events[1]


@pytest.mark.faults
async def test_one_of_two_real_servers_dies_in_mid_generation_and_is_replaced(tmp_path):
    async with sglang_fleet(tmp_path, 2, context_len=2048) as fleet:
        await publish(fleet, 1)
        victim = pids_at(fleet.processes[0].port)
        running = [start_request(fleet, n) for n in range(6)]
        await until(lambda: sum(pending.sent for pending in fleet.policy._pending) == 6)
        await asyncio.sleep(0.05)
        await publish(fleet, 2)
        await until(lambda: fleet.policy.counts["resumed"] >= 1)
        # Tokens were sampled: requests were ended by the update, and keep their tokens.
        assert any(pending.draft.ids for pending in fleet.policy._pending)
        send_signal(victim, signal.SIGKILL)
        await expect_exact(running)
        assert fleet.policy.counts["lost"] >= 1
        await until(lambda: fleet.incidents, 180)
        assert [incident.server for incident in fleet.incidents] == ["server-0"]
        after = [start_request(fleet, n) for n in range(10, 22)]
        await expect_exact(after)
        assert {int(v) for _, task in after for v in task.result().versions} == {2}
        assert len(await fleet.router.workers()) == 2

        running = [start_request(fleet, n) for n in range(30, 36)]
        await until(lambda: sum(pending.sent for pending in fleet.policy._pending) == 6)
        send_signal(pids_at(fleet.router.port), signal.SIGKILL)
        await expect_exact(running)
        assert len(await fleet.router.workers()) == 2
        assert fleet.counts["restarts"] == 2
    assert pids_at(fleet.processes[0].port) == []

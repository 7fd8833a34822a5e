"""The benchmark of the engines: equal requests on all sides, correct counts, no leftover servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.slots import NOBODY
from agentrl.engine.served.app import EngineApp
from agentrl.engine.served.config import CONTROL_KEY
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineUnavailableError, UserError
from agentrl.http.serving import RequestChecks
from agentrl.types.seams import Sampling
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import pack_buckets, unpack
from benchmarks.compare import Duration, rates_of
from benchmarks.engines import client, killed, throughput, turns, weights
from benchmarks.engines.context import EngineContext, StubServer, up
from benchmarks.engines.everything import SECTIONS, bench_engines
from benchmarks.engines.settings import (
    CONCURRENT,
    SETTINGS,
    TINY_WORKLOADS,
    ClientLoad,
    EngineSettings,
    GenerationLoad,
    GenerationWorkload,
    KillLoad,
    ModelUnderTest,
    SessionLoad,
    UpdateLoad,
)
from benchmarks.models import save, seeded, tiny_model
from tests.engine.fleets import EAGER, pids_at, served_fleet
from tests.engine.scheduling import Scheduler, checkpoint
from tests.engine.serving import CODEC, KEY, ScriptedServer, generated, sglang_python
from tests.engine.subjects import VOCAB, text_of
from tests.listening import listening

EQUAL = {"concurrency": 3, "prompt": (4, 4), "new": (5, 5)}
WORKLOADS = (
    GenerationWorkload("equal", **EQUAL),
    GenerationWorkload("ragged", concurrency=3, prompt=(2, 6), new=(1, 9), is_target=True),
    GenerationWorkload("greedy", **EQUAL, temperature=0.0),
    GenerationWorkload("turns", **EQUAL, turns=2, world=3),
)
SMALL = EngineSettings(
    embedded=(ModelUnderTest("tiny", "float32", WORKLOADS, 2.0),),
    loads=(GenerationLoad(1, 1, 5, 4), GenerationLoad(3, 5, 6, 4)),
    client=ClientLoad(concurrency=3, requests=7, real_requests=7, prompt=5, new=4),
    turns=SessionLoad(sessions=3, turns=3, world=8, new=2, cache=4000, repeats=2),
    weights=UpdateLoad(dtypes=("bfloat16",)),
    killed=KillLoad(concurrency=2, prompt=4, new=64, steady=3, repeats=1),
    repeats=2,
)
RUNS = 1 + SMALL.repeats
# A process started in the background ignores SIGINT by inheritance; this one handles it.
HANDLING_SIGINT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from benchmarks.__main__ import main
main(sys.argv[1:])
"""


class Recording(EmbeddedEngine):
    """Records its requests."""

    @classmethod
    def serving(cls) -> Recording:
        engine = cls.from_model(seeded(tiny_model), max_slots=4, max_context_len=64, decode=text_of)
        engine.requests: list[tuple[tuple[int, ...], int, float]] = []
        return engine

    async def generate(self, prompt_ids, sampling, *, session, asker=NOBODY):
        request = (tuple(prompt_ids), sampling.max_new_tokens, sampling.temperature)
        self.requests.append(request)
        return await super().generate(prompt_ids, sampling, session=session, asker=asker)


@asynccontextmanager
async def recording_server():
    """A server over HTTP, and its engine."""
    engine = Recording.serving()
    app = EngineApp(engine, CODEC, name="tiny", checks=RequestChecks(control_key=KEY))
    async with listening(app.app) as url:
        yield url, engine


def context(folder: Path, settings: EngineSettings = SMALL) -> EngineContext:
    return EngineContext(Path(sys.executable), folder, settings, lambda sentence: None)


def test_rates_are_amounts_over_wall_time():
    result = rates_of({"a": [Duration(2.0, 9.0), Duration(1.0, 9.0), Duration(4.0, 9.0)]}, 8, "per_s")
    assert result.medians == {"a": 4.0}
    assert result.figures == {"a": {"per_s": [4.0, 8.0, 2.0], "median": 4.0, "spread": 1.5}}


def test_the_embedded_engine_needs_no_sglang_and_both_sides_are_timed():
    threads = torch.get_num_threads()
    result = bench_engines(Path("no-such-python"), only=["embedded"], settings=SMALL)
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(result)) == result
    assert list(result["summary"]) == [f"tiny float32, {workload.name}" for workload in WORKLOADS]
    assert [row["target"] for row in result["rows"]] == [None, 2.0, None, None]
    for row in result["rows"]:
        sides = row["sides"]
        assert {side: len(figures["tokens_per_s"]) for side, figures in sides.items()} == {
            "embedded": 2,
            "transformers": 2,
        }
        medians = [sides[side]["median"] for side in ("embedded", "transformers")]
        assert row["ratio"] == pytest.approx(medians[0] / medians[1])


def test_the_targets_are_every_concurrency_up_to_the_quickstarts():
    sampled = [workload for workload in CONCURRENT if workload.temperature == 1]
    assert [workload.concurrency for workload in sampled] == [32, 128, 256, 512]
    assert {(workload.prompt, workload.new, workload.is_target) for workload in sampled} == {
        ((24, 24), (64, 64), True)
    }
    assert set(CONCURRENT) <= set(TINY_WORKLOADS)


def test_the_cache_sizes_match_their_descriptions():
    turns, client = SETTINGS.turns, SETTINGS.client
    total = turns.sessions * turns.turns * (turns.world + turns.new)
    assert total / 2 < turns.cache < total == 18_432
    assert client.concurrency * (client.prompt + client.new) < client.cache


@pytest.mark.full
async def test_all_sides_get_equal_requests_with_new_prompts_in_every_run(tmp_path):
    async with recording_server() as (first_url, first), recording_server() as (second_url, second):
        rows = await throughput.measured(
            seeded(tiny_model), {"SGLang": first_url, "over HTTP": second_url}, context(tmp_path)
        )
    assert sorted(first.requests) == sorted(second.requests)
    assert len({prompt for prompt, _, _ in first.requests}) == len(first.requests) == RUNS * (1 + 5)
    assert {(len(prompt), new, t) for prompt, new, t in first.requests} == {(5, 4, 1.0), (6, 4, 1.0)}
    assert [row.name for row in rows] == ["throughput, 1 at once", "throughput, 3 at once"]
    for row in rows:
        sides = row.figures["sides"]
        assert set(sides) == {"SGLang", "over HTTP", "embedded", "transformers"}
        assert all(len(side["tokens_per_s"]) == 2 for side in sides.values())
        ratio = sides["SGLang"]["median"] / sides["transformers"]["median"]
        assert row.figures["ratios_to_transformers"]["SGLang"] == pytest.approx(ratio)


async def test_both_clients_send_the_same_bodies(tmp_path):
    server = ScriptedServer(generated([1, 2, 3, 4]))
    async with server.listening() as url:
        row = await client.measured("recording server", url, 7, context(tmp_path))
    request_ids = [body.pop("rid") for body in server.requests]
    bodies = [json.dumps(body) for body in server.requests]
    assert len(bodies) == RUNS * 2 * 7
    assert {bodies.count(body) for body in bodies} == {RUNS * 2 * 3, RUNS * 2 * 2}, "three prompts in turn"
    # The plain client repeats its request ids in every run, the other has a new one for each request.
    assert sorted({request_ids.count(id) for id in request_ids}) == [1, RUNS]
    assert len(row.figures["cpu_ms_a_request"]["client"]) == 2
    medians = [row.figures["sides"][side]["median"] for side in ("client", "plain")]
    assert row.figures["ratio"] == pytest.approx(medians[0] / medians[1])
    assert 0 < row.figures["cpu_ms"] < 1000


async def test_the_stub_server_follows_the_protocol_and_is_stopped_at_the_end(tmp_path):
    server = StubServer(tmp_path, 3)
    async with up(server) as url:
        command = Path(f"/proc/{killed.server_at(server.port)}/cmdline").read_bytes().split(b"\0")
        assert command[:3] == [sys.executable.encode(), b"-I", b"-S"]
        assert command[3].endswith(b"canned.py")
        policy = SGLangPolicy(url)
        requests = (policy.generate([1], Sampling(3), session=str(i)) for i in range(9))
        completions = await asyncio.gather(*requests)
        assert {len(completion.token_ids) for completion in completions} == {3}
        await policy.close()
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health", trust_env=False)


async def test_sessions_that_keep_their_key_find_all_that_they_have_computed(tmp_path, monkeypatch):
    monkeypatch.setenv(CONTROL_KEY, KEY)
    async with recording_server() as (url, engine):
        (row,) = await turns.measured(url, [url], context(tmp_path))
    assert len(engine.requests) == RUNS * 2 * 9
    lengths = [8, 18, 28]
    assert {len(prompt) for prompt, _, _ in engine.requests} == set(lengths)
    cached = row.figures["cached"]
    # All but the new tokens and the last sampled one, which was no input of the model.
    expected = (9 + 19) / sum(lengths)
    assert cached["sticky"]["shares"] == pytest.approx([expected] * 2)
    # Others find what a slot has that nobody has taken since, if it is long enough.
    assert all(share < expected for share in cached["a new key for every turn"]["shares"])
    assert len(row.figures["sides"]["sticky"]["turns_per_s"]) == 2


def version(seed: int) -> weights.Version:
    named = checkpoint(seed)
    return weights.Version(list(pack_buckets(named, 100)), checksum(named))


@pytest.mark.full
async def test_every_transport_is_timed_with_complete_updates(tmp_path):
    scheduler = Scheduler()
    transports = weights.transports(UpdateLoad().transports, tmp_path / "model")
    async with scheduler.listening() as url:
        rows = await weights.measured("tiny", url, (version(0), version(1)), transports, context(tmp_path))
    assert [row.name for row in rows] == [f"weights, tiny, {name}" for name in UpdateLoad().transports]
    assert scheduler.served == [(str(n), n % 2) for n in range(1, RUNS + 1)] * 4, "each version is complete"
    for row in rows:
        seconds = [row.figures["sides"][side]["seconds"] for side in ("update", "copy")]
        assert list(map(len, seconds)) == [2, 2]
        assert row.figures["num_bytes"] == version(0).num_bytes > 100
    assert len(list((tmp_path / "delta").glob("delta-*"))) == SMALL.repeats


def test_versions_differ_in_the_configured_share_of_values(tmp_path):
    settings = replace(SMALL, weights=UpdateLoad(changed=0.01, bucket_bytes=1 << 20))
    model = seeded(tiny_model)
    first, second = weights.versions(model, context(tmp_path, settings))
    flat = [
        np.concatenate([bucket.data for bucket in version.buckets]).view(np.float32)
        for version in (first, second)
    ]
    assert np.mean(flat[0] != flat[1]) == pytest.approx(0.01, abs=0.001)
    assert np.abs(flat[0] - flat[1]).max() < 1e-6
    for version in (first, second):
        assert version.checksum == checksum([named for b in version.buckets for named in unpack(b)])
    assert first.num_bytes == flat[0].nbytes == 4 * sum(p.numel() for p in model.parameters())


@asynccontextmanager
async def canned_fleet(folder: Path, **habits):
    """A fleet whose only server is a stub. habits: arguments of its policy."""
    process = StubServer(folder, SMALL.killed.new)
    await process.start()
    policy = SGLangPolicy(process.url, **habits)
    fleet = Fleet([process], None, policy, SharedMemory(folder), process.stop, EAGER).watch()
    try:
        yield fleet
    finally:
        await fleet.close()


async def test_a_killed_server_is_timed_until_its_recovery(tmp_path):
    async with canned_fleet(tmp_path, resend_lost=True, attempts=10) as fleet:
        (row,) = await killed.measured(fleet, VOCAB, context(tmp_path))
        (repeat,), (incident,) = row.figures["repeats"], fleet.incidents
        assert incident.server == "canned"
        assert repeat["back_s"] >= incident.down_s > 0
        assert row.figures["back_s"] == {"seconds": [repeat["back_s"]], "median": repeat["back_s"]}
        assert repeat["sent"] == repeat["answered"] >= 2 * SMALL.killed.steady
        assert repeat["lost"] == 0
        assert repeat["sampled_again"] + repeat["sent_again_untouched"] >= 1, "the kill hit running requests"
        port = fleet.processes[0].port
    with pytest.raises(EngineUnavailableError, match="no server"):
        killed.server_at(port)


async def test_a_request_that_fails_is_lost(tmp_path):
    async with canned_fleet(tmp_path, attempts=1) as fleet:
        (row,) = await killed.measured(fleet, VOCAB, context(tmp_path))
    (repeat,) = row.figures["repeats"]
    assert repeat["lost"] >= 1
    assert repeat["sent"] == repeat["answered"] + repeat["lost"]


async def test_a_server_that_does_not_recover_is_an_error(tmp_path):
    slow = replace(SMALL, killed=replace(SMALL.killed, steady=10**9, within_s=0.2))
    async with canned_fleet(tmp_path) as fleet:
        with pytest.raises(EngineUnavailableError, match=r"did not recover in 0\.2 s"):
            await killed.measured(fleet, VOCAB, context(tmp_path, slow))
        assert not fleet.policy._pending, "no request is pending"


@pytest.mark.full
async def test_every_request_to_a_killed_engine_is_accounted_for(tmp_path):
    async with served_fleet(tmp_path) as fleet:
        (row,) = await killed.measured(fleet, VOCAB, context(tmp_path))
        assert [incident.server for incident in fleet.incidents] == ["server-0"]
        (repeat,) = row.figures["repeats"]
        assert repeat["sent"] == repeat["answered"] >= 2 * SMALL.killed.steady
        assert repeat["lost"] == 0
        assert repeat["sampled_again"] >= 1, "the kill hit running requests"


@pytest.mark.parametrize(
    ("python", "only", "message"),
    [
        (sys.executable, ["turnz"], "no section `turnz`; there are embedded, throughput, .* mean `turns`"),
        (sys.executable, [], "does not run SGLang .it lacks sglang, sglang-router.; name the interpreter"),
        ("no-such-python", [], "does not run SGLang .No such file"),
    ],
)
def test_bad_input_is_an_error_message_before_anything_starts(python, only, message):
    with pytest.raises(UserError, match=message):
        bench_engines(Path(python), only=only)


@pytest.fixture
def versions(tmp_path) -> Iterator[Path]:
    """A fake interpreter that reports versions of SGLang's packages."""
    script = tmp_path / "python"
    names = ("python", "sglang", "sglang-router", "torch", "transformers")
    script.write_text(f"#!/bin/sh\necho '{json.dumps(dict.fromkeys(names, '0'))}'\n")
    script.chmod(0o755)
    return script


@pytest.mark.full
def test_ctrl_c_leaves_no_server_and_no_file(versions, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", HANDLING_SIGINT, "engines", "--only", "client"]
    environment = {**os.environ, "TMPDIR": str(scratch), "AGENTRL_SGLANG_PYTHON": str(versions)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "client (1 of 1)\n"
        port = int(process.stderr.readline().rpartition(":")[2])
        assert pids_at(port)
        assert list(scratch.glob("*/client/canned.log"))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
    assert pids_at(port) == []
    assert list(scratch.iterdir()) == []


def test_models_are_reproducible(tmp_path):
    first, second = (save(seeded(tiny_model), tmp_path / name) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


@pytest.mark.full
def test_all_sections_complete_on_real_servers():
    events: list[str] = []
    settings = replace(SMALL, repeats=1, turns=replace(SMALL.turns, sessions=6, turns=4))
    result = bench_engines(sglang_python(), settings=settings, on_event=events.append)
    assert json.loads(json.dumps(result)) == result
    rows = {row["name"]: row for row in result["rows"]}
    assert list(result["summary"]) == list(rows)
    assert [row["section"] for row in rows.values()] == [
        *["embedded"] * 4,
        *["throughput"] * 2,
        *["client"] * 2,
        "turns",
        *["weights"] * 4,
        "killed",
    ]
    assert result["settings"]["sections"] == list(result["settings"]["seconds"]) == list(SECTIONS)
    cached = rows["turns on two servers"]["cached"]
    assert cached["sticky"]["median"] > 0.5
    (repeat,) = rows["one of 2 servers killed"]["repeats"]
    assert (repeat["lost"], repeat["sent"]) == (0, repeat["answered"])
    assert events[0] == "embedded (1 of 6)"

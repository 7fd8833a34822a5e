"""The benchmark of the engines asks all sides the same, counts what it asked, and leaves nothing behind."""

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

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served.app import EngineApp
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineUnavailableError, UserError
from agentrl.protocols import Sampling
from agentrl.weights import checksum, pack_buckets, unpack
from benchmarks.compare import Spent, rates_of
from benchmarks.engine import tiny_model
from benchmarks.engines import client, killed, throughput, turns, weights
from benchmarks.engines.everything import SECTIONS, bench_engines
from benchmarks.engines.place import Canned, Place, save, seeded, up
from benchmarks.engines.settings import SETTINGS, Client, Killed, Load, Settings, Turns, Weights
from tests.engine.fleets import EAGER, pids_at, served_fleet
from tests.engine.scheduling import Scheduler, checkpoint
from tests.engine.serving import WORDS, Said, generated, listening, sglang_python
from tests.engine.subjects import VOCAB, text_of

SMALL = Settings(
    loads=(Load(1, 1, 5, 4), Load(3, 5, 6, 4)),
    client=Client(concurrency=3, requests=7, real_requests=7, prompt=5, new=4),
    turns=Turns(sessions=3, turns=3, world=8, new=2, cache=4000, repeats=2),
    weights=Weights(dtypes=("bfloat16",)),
    killed=Killed(concurrency=2, prompt=4, new=64, steady=3, repeats=1),
    repeats=2,
)
RUNS = 1 + SMALL.repeats
# A process started in the background inherits that SIGINT is ignored; this one hears it.
HEARING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from benchmarks.__main__ import main
main(sys.argv[1:])
"""


class Watched(EmbeddedEngine):
    """Keeps what it was asked for."""

    @classmethod
    def serving(cls) -> Watched:
        engine = cls.from_model(seeded(tiny_model), max_slots=4, max_context_len=64, decode=text_of)
        engine.asked: list[tuple[tuple[int, ...], int, float]] = []
        return engine

    async def generate(self, prompt_ids, sampling, *, session):
        asked = (tuple(prompt_ids), sampling.max_new_tokens, sampling.temperature)
        self.asked.append(asked)
        return await super().generate(prompt_ids, sampling, session=session)


@asynccontextmanager
async def watched():
    """A server over HTTP, and its engine."""
    engine = Watched.serving()
    async with listening(EngineApp(engine, WORDS, name="tiny").app) as url:
        yield url, engine


def place(folder: Path, settings: Settings = SMALL) -> Place:
    return Place(Path(sys.executable), folder, settings, lambda sentence: None)


def test_rates_are_amounts_over_the_time_on_the_wall():
    found = rates_of({"a": [Spent(2.0, 9.0), Spent(1.0, 9.0), Spent(4.0, 9.0)]}, 8, "per_s")
    assert found.medians == {"a": 4.0}
    assert found.told == {"a": {"per_s": [4.0, 8.0, 2.0], "median": 4.0, "spread": 1.5}}


def test_the_caches_are_as_large_as_they_are_said_to_be():
    played, asked = SETTINGS.turns, SETTINGS.client
    whole = played.sessions * played.turns * (played.world + played.new)
    assert whole / 2 < played.cache < whole == 18_432
    assert asked.concurrency * (asked.prompt + asked.new) < asked.cache


async def test_all_sides_are_asked_the_same_and_never_the_same_again(tmp_path):
    async with watched() as (one, first), watched() as (other, second):
        rows = await throughput.measured(
            seeded(tiny_model), {"SGLang": one, "over HTTP": other}, place(tmp_path)
        )
    assert sorted(first.asked) == sorted(second.asked)
    assert len({prompt for prompt, _, _ in first.asked}) == len(first.asked) == RUNS * (1 + 5)
    assert {(len(prompt), new, t) for prompt, new, t in first.asked} == {(5, 4, 1.0), (6, 4, 1.0)}
    assert [row.name for row in rows] == ["throughput, 1 at once", "throughput, 3 at once"]
    for row in rows:
        sides = row.figures["sides"]
        assert set(sides) == {"SGLang", "over HTTP", "embedded", "transformers"}
        assert all(len(side["tokens_per_s"]) == 2 for side in sides.values())
        ratio = sides["SGLang"]["median"] / sides["transformers"]["median"]
        assert row.figures["ratios_to_transformers"]["SGLang"] == pytest.approx(ratio)


async def test_both_clients_send_the_same_bodies(tmp_path):
    said = Said(generated([1, 2, 3, 4]))
    async with said.listening() as url:
        row = await client.measured("said", url, 7, place(tmp_path))
    names = [one.pop("rid") for one in said.seen]
    bodies = [json.dumps(one) for one in said.seen]
    assert len(bodies) == RUNS * 2 * 7
    assert {bodies.count(body) for body in bodies} == {RUNS * 2 * 3, RUNS * 2 * 2}, "three prompts in turn"
    # The bare client says the same names in every run, ours a new one for each request.
    assert sorted({names.count(name) for name in names}) == [1, RUNS]
    assert len(row.figures["cpu_ms_a_request"]["client"]) == 2
    medians = [row.figures["sides"][side]["median"] for side in ("client", "bare")]
    assert row.figures["ratio"] == pytest.approx(medians[0] / medians[1])
    assert 0 < row.figures["cpu_ms"] < 1000


async def test_the_server_that_costs_little_keeps_the_protocol_and_is_gone_at_the_end(tmp_path):
    server = Canned(tmp_path, 3)
    async with up(server) as url:
        words = Path(f"/proc/{killed.server_at(server.port)}/cmdline").read_bytes().split(b"\0")
        assert words[:3] == [sys.executable.encode(), b"-I", b"-S"]
        assert words[3].endswith(b"canned.py")
        policy = SGLangPolicy(url)
        done = await asyncio.gather(*(policy.generate([1], Sampling(3), session=str(i)) for i in range(9)))
        assert {len(one.token_ids) for one in done} == {3}
        await policy.close()
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health", trust_env=False)


async def test_sessions_that_keep_their_key_find_their_cache_and_others_none(tmp_path):
    async with watched() as (url, engine):
        (row,) = await turns.measured(url, [url], place(tmp_path))
    assert len(engine.asked) == RUNS * 2 * 9
    lengths = [8, 18, 28]
    assert {len(prompt) for prompt, _, _ in engine.asked} == set(lengths)
    cached = row.figures["cached"]
    # All but the new tokens, and the last sampled one, which no model has seen.
    expected = (9 + 19) / sum(lengths)
    assert cached["sticky"]["shares"] == pytest.approx([expected] * 2)
    assert cached["a new key for every turn"]["shares"] == [0, 0]
    assert len(row.figures["sides"]["sticky"]["turns_per_s"]) == 2


def version(seed: int) -> weights.Version:
    named = checkpoint(seed)
    return weights.Version(list(pack_buckets(named, 100)), checksum(named))


async def test_every_way_of_weights_is_timed_with_whole_updates(tmp_path):
    scheduler = Scheduler()
    ways = weights.transports(Weights().transports, tmp_path / "model")
    async with scheduler.listening() as url:
        rows = await weights.measured("tiny", url, (version(0), version(1)), ways, place(tmp_path))
    assert [row.name for row in rows] == [f"weights, tiny, {name}" for name in Weights().transports]
    assert scheduler.served == [(str(n), n % 2) for n in range(1, RUNS + 1)] * 4, "each version whole"
    for row in rows:
        seconds = [row.figures["sides"][side]["seconds"] for side in ("update", "copy")]
        assert list(map(len, seconds)) == [2, 2]
        assert row.figures["num_bytes"] == version(0).num_bytes > 100
    assert len(list((tmp_path / "delta").glob("delta-*"))) == SMALL.repeats


def test_versions_differ_in_the_share_of_values_that_was_asked_for(tmp_path):
    settings = replace(SMALL, weights=Weights(changed=0.01, bucket_bytes=1 << 20))
    model = seeded(tiny_model)
    first, second = weights.versions(model, place(tmp_path, settings))
    flat = [
        np.concatenate([bucket.data for bucket in one.buckets]).view(np.float32) for one in (first, second)
    ]
    assert np.mean(flat[0] != flat[1]) == pytest.approx(0.01, abs=0.001)
    assert np.abs(flat[0] - flat[1]).max() < 1e-6
    for one in (first, second):
        assert one.checksum == checksum([named for bucket in one.buckets for named in unpack(bucket)])
    assert first.num_bytes == flat[0].nbytes == 4 * sum(p.numel() for p in model.parameters())


@asynccontextmanager
async def canned_fleet(folder: Path, **habits):
    """A fleet whose only server costs little. habits: of the policy before it."""
    process = Canned(folder, SMALL.killed.new)
    await process.start()
    policy = SGLangPolicy(process.url, **habits)
    fleet = Fleet([process], None, policy, SharedMemory(folder), process.stop, EAGER).watch()
    try:
        yield fleet
    finally:
        await fleet.close()


async def test_a_killed_server_is_timed_until_it_is_back(tmp_path):
    async with canned_fleet(tmp_path, resend_lost=True, attempts=10) as fleet:
        (row,) = await killed.measured(fleet, VOCAB, place(tmp_path))
        (one,), (incident,) = row.figures["repeats"], fleet.incidents
        assert incident.server == "canned"
        assert one["back_s"] >= incident.down_s > 0
        assert row.figures["back_s"] == {"seconds": [one["back_s"]], "median": one["back_s"]}
        assert one["asked"] == one["answered"] >= 2 * SMALL.killed.steady
        assert one["lost"] == 0
        assert one["sampled_again"] + one["sent_again_untouched"] >= 1, "it struck while requests ran"
        port = fleet.processes[0].port
    with pytest.raises(EngineUnavailableError, match="no server"):
        killed.server_at(port)


async def test_a_request_that_fails_is_lost(tmp_path):
    async with canned_fleet(tmp_path, attempts=1) as fleet:
        (row,) = await killed.measured(fleet, VOCAB, place(tmp_path))
    (one,) = row.figures["repeats"]
    assert one["lost"] >= 1
    assert one["asked"] == one["answered"] + one["lost"]


async def test_a_server_that_does_not_come_back_is_no_figure(tmp_path):
    late = replace(SMALL, killed=replace(SMALL.killed, steady=10**9, within_s=0.2))
    async with canned_fleet(tmp_path) as fleet:
        with pytest.raises(EngineUnavailableError, match=r"not back in 0\.2 s"):
            await killed.measured(fleet, VOCAB, place(tmp_path, late))
        assert not fleet.policy._pending, "nobody asks any longer"


@pytest.mark.full
async def test_every_request_to_a_killed_engine_is_accounted_for(tmp_path):
    async with served_fleet(tmp_path) as fleet:
        (row,) = await killed.measured(fleet, VOCAB, place(tmp_path))
        assert [incident.server for incident in fleet.incidents] == ["server-0"]
        (one,) = row.figures["repeats"]
        assert one["asked"] == one["answered"] >= 2 * SMALL.killed.steady
        assert one["lost"] == 0
        assert one["sampled_again"] >= 1, "it struck while requests ran"


@pytest.mark.parametrize(
    ("python", "only", "says"),
    [
        (sys.executable, ["turnz"], "no section `turnz`; there are throughput, .* mean `turns`"),
        (sys.executable, [], "does not run SGLang .it lacks sglang, sglang-router.; name the interpreter"),
        ("no-such-python", [], "does not run SGLang .No such file"),
    ],
)
def test_bad_input_is_a_sentence_before_anything_starts(python, only, says):
    with pytest.raises(UserError, match=says):
        bench_engines(Path(python), only=only)


@pytest.fixture
def versions(tmp_path) -> Iterator[Path]:
    """What stands for an interpreter that has SGLang, as far as its versions go."""
    script = tmp_path / "python"
    names = ("python", "sglang", "sglang-router", "torch", "transformers")
    script.write_text(f"#!/bin/sh\necho '{json.dumps(dict.fromkeys(names, '0'))}'\n")
    script.chmod(0o755)
    return script


@pytest.mark.full
def test_ctrl_c_leaves_no_server_and_no_file(versions, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", HEARING, "engines", "--only", "client"]
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


def test_models_are_the_same_every_time(tmp_path):
    one, same = (save(seeded(tiny_model), tmp_path / name) for name in "ab")
    assert (one / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()


@pytest.mark.full
def test_all_sections_run_to_their_end_on_real_servers():
    said: list[str] = []
    settings = replace(SMALL, repeats=1, turns=replace(SMALL.turns, sessions=6, turns=4))
    result = bench_engines(sglang_python(), settings=settings, on_event=said.append)
    assert json.loads(json.dumps(result)) == result
    rows = {row["name"]: row for row in result["rows"]}
    assert list(result["summary"]) == list(rows)
    assert [row["section"] for row in rows.values()] == [
        *["throughput"] * 2,
        *["client"] * 2,
        "turns",
        *["weights"] * 4,
        "killed",
    ]
    assert result["settings"]["sections"] == list(result["settings"]["seconds"]) == list(SECTIONS)
    cached = rows["turns on two servers"]["cached"]
    assert cached["sticky"]["median"] > 0.5
    (one,) = rows["one of 2 servers killed"]["repeats"]
    assert (one["lost"], one["asked"]) == (0, one["answered"])
    assert said[0] == "throughput (1 of 5)"

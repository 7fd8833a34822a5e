"""The same suite on fleets, whose servers get new weights while requests run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentrl.engine.conformance import CHECKS, ConformanceCheck, EngineCaps, Subject, lack
from agentrl.engine.sglang.fleet import Fleet
from tests.engine.fleets import served_fleet, sglang_fleet
from tests.engine.subjects import HTTP_CAPS, SGLANG_CAPS, VOCAB, delivery_of, logits_of, text_of, tiny
from tests.engine.test_fleet import publish

SERVED_CAPS = replace(HTTP_CAPS, weight_updates=True, releases_memory=True)
FLEET_CAPS = replace(SGLANG_CAPS, weight_updates=True, releases_memory=True)
CLOSING = CHECKS[-1]


def subject_of(fleet: Fleet, caps: EngineCaps, max_context_len: int, tolerance: float = 2e-5) -> Subject:
    models = [tiny("qwen3", seed) for seed in (0, 1)]
    return Subject(
        engine=fleet,
        caps=caps,
        vocab_size=VOCAB,
        max_slots=4,
        max_context_len=max_context_len,
        logits=lambda ids, version: logits_of(models[version], ids),
        delivery=lambda version: delivery_of(models[version]),
        decode=text_of,
        tolerance=tolerance,
        sink=fleet.sink,
    )


async def keeps_all(subject: Subject, checks: Sequence[ConformanceCheck]) -> None:
    for check in checks:
        if lack(check, subject.caps) is None:
            await check.run(subject)
            if subject.engine.version:
                await publish(subject.engine, 0)
    await CLOSING.run(subject)


@pytest.mark.full
async def test_agentrls_own_servers_take_new_weights_while_requests_run(tmp_path):
    checks = [check for check in CHECKS if check.needs in ("weight_updates", "releases_memory")]
    assert len(checks) == 5
    async with served_fleet(tmp_path) as fleet:
        await keeps_all(subject_of(fleet, SERVED_CAPS, 1024), checks)


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
async def test_real_servers_keep_their_promises_under_new_weights(tmp_path, count):
    # Long enough that requests still run during the update.
    async with sglang_fleet(tmp_path, count, context_len=1024) as fleet:
        await keeps_all(subject_of(fleet, FLEET_CAPS, 1022), CHECKS[:-1])
        assert fleet.incidents == []


@pytest.mark.full
async def test_a_real_server_of_two_tensor_parallel_ranks_keeps_its_promises(tmp_path, monkeypatch):
    # SGLang binds each rank to cores, and asks a NUMA node for each where it is not told.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    async with sglang_fleet(tmp_path, 1, tp_size=2) as fleet:
        await keeps_all(subject_of(fleet, FLEET_CAPS, 254), CHECKS[:-1])
        assert fleet.incidents == []

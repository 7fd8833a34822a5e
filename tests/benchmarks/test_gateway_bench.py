"""The benchmark of the gateway with a small workload: every section, and the figures of its sides."""

from __future__ import annotations

import json

import pytest

from benchmarks.gateway import GatewayLoad, bench_gateway

SMALL = GatewayLoad(
    sizes=(8,),
    rounds=1,
    long=(5, 300, 8),
    streams=(1, 2),
    num_streams=2,
    first_s=0.005,
    next_s=0.002,
    repeats=2,
)


@pytest.mark.full
def test_every_side_is_measured():
    result = bench_gateway(SMALL)
    assert json.loads(json.dumps(result)) == result
    sides = ("gateway", "environment", "direct")
    cpu = result["summary"]["cpu_ms"]
    assert list(cpu) == [f"{name}, {side}" for name in ("8", "6 turns of 300 characters") for side in sides]
    # A request costs more than the turn inside of it, and that more than the policy.
    assert cpu["8, gateway"] > cpu["8, environment"] > cpu["8, direct"] > 0
    first = result["summary"]["first_ms"]
    cases = ("1 at once", "2 at once", "2 that begin together")
    assert list(first) == [f"{case}, {side}" for case in cases for side in ("gateway", "bare server")]
    # Nobody reads a word before the engine has said it.
    assert all(late > 0 for late in first.values())
    assert len(result["sections"]["first_ms"]["1 at once, gateway"]["repeats"]) == 2

"""Clients and frameworks of others play on a real SGLang: the journal has the tokens of the server's own log.

The same clients, tasks and model as in tests/envs/gateway/test_clients.py, on one server, which writes what
it has sampled for each request (`--log-requests`).
"""

from __future__ import annotations

import pytest

from tests.engine.serving import sglang_python
from tests.envs.gateway.boxes import WAYS, trained_model
from tests.envs.gateway.played import by_way, check, played
from tests.envs.gateway.sampled import logged_by_sglang

pytestmark = pytest.mark.full


def test_the_journal_has_what_sglang_says_that_it_has_sampled(tmp_path, tmp_path_factory):
    model, requests = trained_model(tmp_path_factory.getbasetemp().parent), tmp_path / "requests"
    logging = {"log_requests": True, "log_requests_level": 3, "log_requests_format": "json"}
    run = played(
        "",
        model,
        tmp_path,
        num_samples=1,
        engine="sglang",
        sglang_python=str(sglang_python()),
        sglang={**logging, "log_requests_target": [str(requests)], "max_total_tokens": 16_000},
        max_slots=8,
    )
    ways = by_way(check(run, logged_by_sglang(requests)))
    assert {*ways} == {(client, way) for client, ways in WAYS.items() for way in ways}
    assert any(found.shares[1] for found in ways.values()), "two calls in one turn"

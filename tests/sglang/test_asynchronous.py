"""On a real SGLang: concurrency that adapts, and evaluations beside training on a server of their own."""

from __future__ import annotations

import pytest

from agentrl.engine.sglang import SGLangPolicy, concurrency
from agentrl.engine.sglang.concurrency import Admission
from tests.engine.fleets import sglang_fleet
from tests.engine.serving import sglang_python
from tests.engine.subjects import VOCAB, text_of
from tests.engine.test_fleet import expect_exact, start_request
from tests.flow.test_asynchronous import accounted_for, served_versions
from tests.flow.test_evaluations import BATCH, IN_FLIGHT, evaluated, run, steps_logged
from tests.flow.worlds import Examined

pytestmark = pytest.mark.full

# The cache is full while its requests sample their last twentieth: as long as the time between two reports.
FIRST_LIMIT, SHORT, LONG = 16, 24, 900


async def test_requests_in_flight_grow_and_the_youngest_make_room_in_a_full_cache(tmp_path, monkeypatch):
    reports, report = [], Admission.report

    def recorded(admission, load):
        in_flight = sorted(admission._in_flight)
        youngest = report(admission, load)
        reports.append((load.cache_usage, in_flight, sorted(pending.number for pending in youngest)))
        return youngest

    monkeypatch.setattr(Admission, "report", recorded)
    monkeypatch.setattr(concurrency, "_LOAD_EVERY_S", 0.05)
    # Half of the long requests fit into the cache.
    limits = {"max_running_requests": 32, "max_total_tokens": 8 * LONG}
    async with sglang_fleet(tmp_path, 1, context_len=1024, **limits) as fleet:
        policy = SGLangPolicy(fleet.policy.url, adaptive=True, vocab_size=VOCAB, decode=text_of)
        await expect_exact([start_request(policy, number, SHORT) for number in range(48)], SHORT)
        assert policy._admission.limit.value > FIRST_LIMIT
        assert policy.counts["interrupted"] == 0
        reports.clear()
        await expect_exact([start_request(policy, number, LONG) for number in range(16)], LONG)
        assert policy.counts["interrupted"] >= 1
        assert max(usage for usage, _, _ in reports) >= 0.95
        ended = [(in_flight, youngest) for _, in_flight, youngest in reports if youngest]
        assert all(in_flight[-len(youngest) :] == youngest != in_flight for in_flight, youngest in ended)
        assert policy.counts["resumed"] == 0, "the server took no request back by an abort"
        assert fleet.incidents == []
        await policy.close()


def test_an_evaluation_on_a_server_of_its_own_scores_one_version_beside_training(tmp_path, monkeypatch):
    for name, value in {"hold": IN_FLIGHT + 2 * BATCH, "begun": 0, "until": None}.items():
        monkeypatch.setattr(Examined, name, value)
    servers = {"engine": "sglang", "sglang_python": str(sglang_python()), "max_slots": 8, "inline": False}
    folder = run(tmp_path, eval_interval=2, eval_engine="own", **servers)
    order, rows, served = steps_logged(folder), evaluated(folder), served_versions(folder)
    # The one after iteration 2 was held up until two more batches had been trained.
    assert order.index(-2) > order.index(4)
    assert {
        row[f"eval/{mode}/version_{which}"] - served[int(step)]
        for step, row in rows.items()
        for mode in ("sampled", "greedy")
        for which in ("min", "max")
    } == {0.0}
    assert len(set(served)) > 4
    assert accounted_for(folder).ahead == 0
    logs = sorted(
        str(path.relative_to(folder / "engine")) for path in (folder / "engine").rglob("server-*.log")
    )
    assert logs == ["evaluation/server-0.log", "server-0.log"]

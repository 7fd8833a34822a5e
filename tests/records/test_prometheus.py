"""What Prometheus reads of a run: its own parser reads it, over HTTP."""

from __future__ import annotations

import socket
from datetime import UTC, datetime

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentrl.assembly.load import load_config
from agentrl.errors import ConfigError, MissingExtraError
from agentrl.records import MetricLog
from agentrl.records.prometheus import PrometheusTracker
from agentrl.records.status import PlacesTaken, ProcessStatus, RunStatus, Utilisation
from agentrl.runtime import extras
from tests.flow.runs import train


def read(port, host="127.0.0.1"):
    """The gauges by name and labels."""
    reply = httpx2.get(f"http://{host}:{port}/metrics", trust_env=False)
    assert reply.status_code == 200
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


@pytest.fixture
def tracker(tmp_path):
    """Of a run named x."""
    tracker = PrometheusTracker(tmp_path / "x", "127.0.0.1", 0)
    yield tracker
    tracker.close()


def test_metrics_of_the_last_step_are_gauges_and_a_resumed_run_keeps_the_earlier_ones(tracker):
    assert read(tracker.port) == {}
    tracker.log(1, {"rollout/raw_reward": 0.25, "eval/pass@4": 0.5}, time_s=2.0)
    tracker.log(2, {"rollout/raw_reward": float("nan"), "rollout/hops=1/mean": 1.0}, time_s=3.5)
    found = read(tracker.port)
    run = ("run", "x")
    assert found.pop(("agentrl_rollout_raw_reward", run)) != found
    assert found == {
        ("agentrl_step", run): 2.0,
        ("agentrl_time_seconds", run): 3.5,
        ("agentrl_eval_pass_4", run): 0.5,
        ("agentrl_rollout_hops_1_mean", run): 1.0,
    }


def test_what_the_run_does_is_read_at_each_request(tracker, tmp_path):
    (tmp_path / "x").mkdir()
    for in_flight in (3, 5):
        RunStatus(
            time=datetime.now(UTC),
            pid=1,
            places=PlacesTaken(capacity=8, in_flight=in_flight, waiting=1, in_training=2, blocked_by=""),
            utilisation=Utilisation(seconds=1, engine=0.75, trainer=0.5, both=0.25),
            requests=4,
            working=(),
            episodes={"tool": 2, "generate": 6},
            processes={"server-0": ProcessStatus(version=in_flight), "rank 0": ProcessStatus()},
            idle_s=0.5,
        ).write(tmp_path / "x")
        found = read(tracker.port)
        assert found["agentrl_now_groups", ("place", "in_flight"), ("run", "x")] == in_flight
        assert found["agentrl_now_groups", ("place", "in_training"), ("run", "x")] == 2
        assert found["agentrl_now_utilisation", ("run", "x"), ("side", "engine")] == 0.75
        assert found["agentrl_now_episodes", ("run", "x"), ("stage", "generate")] == 6
        served = {key: value for key, value in found.items() if key[0] == "agentrl_now_versions"}
        assert served == {("agentrl_now_versions", ("process", "server-0"), ("run", "x")): in_flight}
        assert found["agentrl_now_requests", ("run", "x")] == 4
        assert found["agentrl_now_idle_seconds", ("run", "x")] == 0.5


def test_a_closed_tracker_has_freed_its_port_and_one_without_a_port_costs_no_run(tmp_path):
    tracker = PrometheusTracker(tmp_path, "127.0.0.2", 0)
    port = tracker.port
    assert read(port, "127.0.0.2") == {}
    with pytest.raises(httpx2.ConnectError):
        read(port)
    warnings = []
    with MetricLog(
        tmp_path,
        use_tensorboard=False,
        trackers={"prometheus": lambda: PrometheusTracker(tmp_path, "127.0.0.2", port)},
        on_event=warnings.append,
    ) as log:
        log.log(1, {"a": 1.0})
    assert "Address already in use" in warnings[0]
    tracker.close()
    with socket.create_server(("127.0.0.2", port)):
        pass


def test_a_run_serves_its_metrics_and_stops_when_it_ends(tmp_path, capsys, monkeypatch):
    read_in_run = []
    closing = PrometheusTracker.close

    def close(tracker):
        read_in_run.append(read(tracker.port))
        closing(tracker)

    monkeypatch.setattr(PrometheusTracker, "close", close)
    train("Talkative", tmp_path, "x", num_rollout=1, use_prometheus=True, prometheus_port=0, quiet=False)
    assert "Prometheus: http://127.0.0.1:" in capsys.readouterr().out
    (found,) = read_in_run
    assert found["agentrl_step", ("run", "x")] == 1
    assert ("agentrl_rollout_raw_reward", ("run", "x")) in found


def test_the_port_needs_the_setting_and_the_setting_its_extra(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="prometheus_port has no effect without use_prometheus; add it"):
        load_config(None, {"env": "Calculator-v0", "prometheus_port": 1})
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "prometheus_client" else name)
    with pytest.raises(MissingExtraError, match=r"use_prometheus needs .*'agentrl\[prometheus\]'"):
        train("Talkative", tmp_path, "x", use_prometheus=True)
    assert not (tmp_path / "x").exists()

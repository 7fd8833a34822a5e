import json
import os
import subprocess
import sys
import warnings

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl.records import MetricLog, read_metrics
from tests.disks import file_size_limit


class Broken:
    def __init__(self):
        self.calls = 0

    def log(self, step, metrics, *, time_s):
        self.calls += 1
        raise ConnectionError("no route")

    def close(self):
        raise ConnectionError("still no route")


class Recorder:
    def __init__(self):
        self.calls = []

    def log(self, step, metrics, *, time_s):
        self.calls.append((step, dict(metrics), time_s))

    def close(self):
        self.calls.append("closed")


def test_each_step_is_a_line_with_its_time(tmp_path):
    now = iter([100.0, 101.5, 103.25])
    log = MetricLog(tmp_path, use_tensorboard=False, clock=lambda: next(now))
    log.log(0, {"rollout/raw_reward": 0.5})
    log.log(1, {"rollout/raw_reward": 1, "train/loss": -0.25})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "time_s": 1.5, "rollout/raw_reward": 0.5},
        {"step": 1, "time_s": 3.25, "rollout/raw_reward": 1.0, "train/loss": -0.25},
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_step_is_on_disk_before_the_next_begins(tmp_path):
    log = MetricLog(tmp_path, use_tensorboard=False)
    log.log(0, {"a": 1.0})
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_numbers_that_are_not_finite_become_null(tmp_path):
    log = MetricLog(tmp_path, use_tensorboard=False)
    log.log(0, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 0.0})
    line = (tmp_path / "metrics.jsonl").read_text()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    record = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert [record[k] for k in "abcd"] == [None, None, None, 0.0]


def test_an_incomplete_last_line_is_skipped(tmp_path):
    log = MetricLog(tmp_path, use_tensorboard=False)
    log.log(0, {"a": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "a"')
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0]
    log.log(1, {"a": 2.0})
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_tensorboard_reads_the_same_numbers(tmp_path):
    with MetricLog(tmp_path) as log:
        for step in range(3):
            log.log(step, {"rollout/raw_reward": step / 2, "train/loss": float("nan")})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/raw_reward")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert len(events.Scalars("train/loss")) == 3


def test_a_failing_tracker_causes_one_warning_and_the_others_go_on(tmp_path):
    broken, recorder = Broken(), Recorder()
    trackers = {"faraway": lambda: broken, "mine": lambda: recorder}
    log = MetricLog(tmp_path, use_tensorboard=False, trackers=trackers)
    with pytest.warns(RuntimeWarning) as warned:
        log.log(0, {"a": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.log(1, {"a": 2.0})
        log.close()
    assert "The tracker `faraway` stopped (ConnectionError: no route); the run goes on" in str(
        warned[0].message
    )
    assert broken.calls == 1
    assert [entry[:2] for entry in recorder.calls[:2]] == [(0, {"a": 1.0}), (1, {"a": 2.0})]
    assert recorder.calls[2] == "closed"
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_a_tracker_that_cannot_close_does_not_stop_the_run(tmp_path):
    log = MetricLog(tmp_path, use_tensorboard=False, trackers={"faraway": Broken})
    with pytest.warns(RuntimeWarning, match="still no route"):
        log.close()


def test_a_folder_where_events_cannot_be_written_costs_only_the_events(tmp_path):
    (tmp_path / "tensorboard").write_text("a file in the way")
    with pytest.warns(RuntimeWarning, match="`tensorboard` stopped"):
        log = MetricLog(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.log(0, {"a": 1.0})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_tensorboard_is_imported_only_when_it_is_used(tmp_path):
    program = (
        "import sys, pathlib; from agentrl.records import MetricLog;"
        "log = MetricLog(pathlib.Path(sys.argv[1]), use_tensorboard=sys.argv[2] == 'yes');"
        "log.log(0, {'a': 1.0}); log.close();"
        "print('tensorboard' in sys.modules, 'torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    for use, expected in (("no", "False False False"), ("yes", "True False False")):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), use],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        assert done.stdout.strip() == expected


def test_a_record_that_cannot_be_written_ends_the_run_and_is_not_torn(tmp_path):
    """metrics.jsonl is a record as the journal is; a tracker that fails with it causes no further warning."""
    log = MetricLog(tmp_path, use_tensorboard=False, trackers={"faraway": Broken})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with file_size_limit(100), pytest.raises(OSError, match="File too large"):
            log.log(0, {f"metric{n}": float(n) for n in range(50)})
        log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    MetricLog(tmp_path, use_tensorboard=False).log(0, {"a": 1.0})
    assert [row["a"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]

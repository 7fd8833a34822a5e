"""The benchmark of the algorithms: weights are delayed by the lag, and gains are of paired seeds."""

from __future__ import annotations

import json
import os
import signal
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import tomli_w
from scipy import stats

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.estimator_choice import ESTIMATORS, GrpoConfig
from agentrl.assembly.load import load_config
from agentrl.errors import EngineError, RunExistsError, UserError
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.view.console import RunConsole
from benchmarks.algorithms.delayed import DelayedSink
from benchmarks.algorithms.everything import bench_algorithms, compare, gain
from benchmarks.algorithms.run import Job, run_job
from benchmarks.algorithms.settings import LAGS, AlgorithmArm, controls, estimators, lags, variants
from benchmarks.cache import cached_result
from benchmarks.config import AlgorithmsBench
from tests.flow.runs import TINY, WARM, journal_of

MANIFEST = (TensorSpec("w", (2,), "uint8"),)


class RecordingSink:
    """A sink that records complete versions."""

    def __init__(self):
        self.versions = []

    @asynccontextmanager
    async def begin(self, manifest, version):
        data = []
        sent = SimpleNamespace(checksum=None)

        async def put(bucket):
            data.append(bucket.data.tobytes())

        async def commit(checksum):
            if checksum < 0:
                raise EngineError("damaged")
            sent.checksum = checksum

        yield SimpleNamespace(put=put, commit=commit)
        self.versions.append((version, tuple(manifest), tuple(data), sent.checksum))


async def send(sink, version, checksum=None):
    async with sink.begin(MANIFEST, version) as transaction:
        for part in (version, version + 100):
            await transaction.put(Bucket(MANIFEST, np.array([part, 0], np.uint8)))
        await transaction.commit(7 * version if checksum is None else checksum)


@pytest.mark.parametrize("lag", [0, 1, 3])
async def test_every_version_is_forwarded_complete_after_the_lag(lag):
    inner = RecordingSink()
    delayed = DelayedSink(inner, lag)
    for version in range(1, 6):
        await send(delayed, version)
        assert [number for number, *_ in inner.versions] == list(range(1, version - lag + 1))
    for version, manifest, data, checksum in inner.versions:
        assert (manifest, checksum) == (MANIFEST, 7 * version)
        assert data == (bytes([version, 0]), bytes([version + 100, 0]))


async def test_weights_without_a_commit_are_never_forwarded():
    inner = RecordingSink()
    delayed = DelayedSink(inner, 1)
    async with delayed.begin(MANIFEST, 1):
        pass
    for version in (2, 3):
        await send(delayed, version)
    assert [number for number, *_ in inner.versions] == [2]


async def test_damaged_weights_raise_when_they_are_forwarded():
    delayed = DelayedSink(RecordingSink(), 1)
    await send(delayed, 1, checksum=-1)
    with pytest.raises(EngineError, match="damaged"):
        await send(delayed, 2)


def test_intervals_are_those_of_student():
    for n in range(2, 11):
        differences = np.random.default_rng(n).normal(0.5, 0.1, n)
        interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        assert gain(differences) == pytest.approx((differences.mean(), *interval), abs=1e-3)


def row(mean, **metrics):
    return {"score": {"mean": mean}, "metrics": metrics}


def test_an_arm_is_compared_with_the_warm_start_of_the_same_seed():
    comparison = compare([row(0.1), row(0.5)], [row(0.4, x=1.0, y=2.0), row(0.8, x=3.0)])
    # Pairs: without them the seeds' own difference would widen the interval.
    assert comparison.gain == pytest.approx((0.3, 0.3, 0.3))
    assert comparison.as_json() == {
        "before": [0.1, 0.5],
        "after": [0.4, 0.8],
        "gain": pytest.approx({"mean": 0.3, "low": 0.3, "high": 0.3}),
        "metrics": {"x": 2.0, "y": 2.0},
    }


def config_of(arm):
    return load_config("examples/hop_search/run.toml", arm.settings)


def test_the_arms_are_all_estimators_controls_and_every_correction_at_every_lag():
    by_name = {arm.name: config_of(arm).algorithm.advantage_estimator.name for arm in estimators()}
    assert by_name == {name: name for name in ESTIMATORS}
    shuffled, still = (config_of(arm) for arm in controls())
    assert shuffled.rollout.shuffle_rewards
    assert still.trainer.lr < 1e-9
    lagged = {(arm.lag, arm.name.split(" ", 2)[2]): AlgorithmConfig(**arm.settings) for arm in lags()}
    assert {lag for lag, _ in lagged} == {0, 1, 4} == set(LAGS)
    to_engine = {"engine's logprobs", "cispo to engine", "dppo", "vespo"}
    for lag in (1, 4):
        configs = {name: config for (at, name), config in lagged.items() if at == lag}
        assert {name: config.correction.name for name, config in configs.items()} == {
            **{"none": "none", "TIS": "tis", "MIS": "mis", "icepop": "icepop", "OPSM": "opsm"},
            **{"TIS with gate": "tis", "TIS normalized": "tis"},
            **dict.fromkeys(to_engine, "none"),
        }
        assert {name for name, config in configs.items() if not config.rescores(is_async=False)} == to_engine
        assert configs["TIS with gate"].gate_statistic.name == "k3"


def test_every_variant_differs_from_its_estimator():
    plain = {arm.name: config_of(arm) for arm in estimators()}
    configs = {arm.name: config_of(arm) for arm in variants()}
    for config in configs.values():
        assert config != plain[config.algorithm.advantage_estimator.name]
    assert len({config.model_dump_json() for config in configs.values()}) == len(configs)
    names = [arm.name for arm in (*estimators(), *variants(), *controls(), *lags())]
    assert len(set(names)) == len(names)


@pytest.fixture
def bench(tmp_path):
    """Tiny runs in a tiny environment."""
    settings = {**TINY, **WARM, "env": "tests.flow.worlds:Bandit"}
    sections = {}
    config = load_config(None, settings).model_dump(mode="json")
    for section, values in config.items():
        sections[section] = {name: values[name] for name in values if name in settings}
    run_file = tmp_path / "run.toml"
    run_file.write_text(tomli_w.dumps(sections))
    return AlgorithmsBench(
        run_file=str(run_file),
        seeds=(0, 1),
        num_rollout=4,
        episodes=64,
        only=("grpo",),
        output_dir=str(tmp_path / "runs"),
        jobs=2,
    )


@pytest.mark.full
def test_a_lagged_run_plays_with_the_weights_of_lag_updates_ago(bench):
    job = Job(bench, AlgorithmArm("lag 2", {"use_tis": True}, lag=2), seed=1)
    warm = run_job(job.warm_start)
    lagged = run_job(job)
    for step in range(4):
        entries = journal_of(job.folder, f"step_{step + 1:0>6}")
        turns = [
            turn for entry in entries for part in entry["episode"]["trajectories"] for turn in part["turns"]
        ]
        versions = {version for turn in turns for version in turn["tokens"]["completion"]["versions"]}
        assert versions == {max(0, step - 2)}
    assert lagged["metrics"]["train/train_rollout_kl_k3"] > 1e-4, "the policy has changed since"
    assert set(warm["metrics"]) == set(), "no iterations"
    assert lagged["score"]["n"] == 64
    assert lagged["settings"]["arm"] == {"name": "lag 2", "settings": {"use_tis": True}, "lag": 2}
    assert run_job(job) == lagged, "read, not run again"


@pytest.mark.full
def test_every_arm_runs_over_every_seed_once(bench):
    result = bench_algorithms(bench, RunConsole(quiet=True))
    assert json.loads(json.dumps(result)) == result
    assert list(result["summary"]) == ["grpo"]
    assert len(result["runs"]) == 4
    assert result["arms"]["grpo"]["before"] != result["arms"]["grpo"]["after"]
    assert bench_algorithms(bench, RunConsole(quiet=True)) == result


def killed(_job):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_is_an_error_message(bench, monkeypatch):
    monkeypatch.setattr("benchmarks.algorithms.everything.run_job", killed)
    with pytest.raises(
        UserError, match=r"warm-start-seed., or of a concurrent job, was killed; call the command"
    ):
        bench_algorithms(bench, RunConsole(quiet=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"only": "grpoo"}, "no arm `grpoo`; there are grpo, .* mean `grpo`"),
        ({"seeds": "3"}, "needs 2 to 10 seeds; mend --seeds"),
    ],
)
def test_an_invalid_comparison_is_refused_before_anything_runs(tmp_path, settings, message):
    invalid = AlgorithmsBench.model_validate({"output_dir": str(tmp_path / "runs"), **settings})
    with pytest.raises(UserError, match=message):
        bench_algorithms(invalid, RunConsole(quiet=True))
    assert not (tmp_path / "runs").exists()


def never():
    raise AssertionError("it ran")


def test_a_result_is_measured_once(tmp_path):
    folder = tmp_path / "arm"
    first = cached_result(folder, {"seed": 1}, lambda: {"score": 0.5})
    assert first == {"settings": {"seed": 1}, "score": 0.5}
    assert cached_result(folder, {"seed": 1}, never) == first
    with pytest.raises(RunExistsError, match="measured with other settings; choose another --output-dir"):
        cached_result(folder, {"seed": 2}, never)


def test_an_interrupted_run_starts_over(tmp_path):
    folder = tmp_path / "arm"

    def interrupted():
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_result(folder, {}, interrupted)
    assert (folder / "half").exists()
    assert (
        cached_result(folder, {}, lambda: {"is_leftover": (folder / "half").exists()})["is_leftover"] is False
    )


def test_a_folder_without_results_of_a_benchmark_is_not_touched(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(RunExistsError, match="not a benchmark's"):
        cached_result(tmp_path, {}, never)
    assert (tmp_path / "mine").exists()


def test_the_recipe_of_dapo_is_the_arm_of_that_name():
    arm = next(arm for arm in variants() if arm.name == "dapo")
    weighting, (low, high) = GrpoConfig().own_weighting, GrpoConfig().bounds
    written = {"advantage_estimator": "grpo", "loss_weighting": weighting, "eps_clip": low}
    settings = {**arm.settings, **written, "eps_clip_high": high, "num_steps_per_rollout": 1}
    by_flags = load_config("examples/hop_search/run.toml", {**settings, "name": "quickstart-dapo"})
    assert load_config("examples/hop_search/dapo.toml", {}) == by_flags

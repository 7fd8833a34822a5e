"""The fit finds the numbers that a simulated engine and trainer were made with."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from agentrl.assembly.config import RunConfig
from agentrl.config import parse, read_toml
from agentrl.errors import ConfigError
from agentrl.records.history import METRICS
from agentrl_simulate.config import ModelFile, SimulateSection, Spread
from agentrl_simulate.engine import SimulatedEngine
from agentrl_simulate.fitting import described, fitted
from agentrl_simulate.recorded import PlayedTurn, RecordedInterval, RecordedRun, TrainedBatch, read_recorded
from agentrl_simulate.request import requested, save_model
from agentrl_simulate.virtual_time import now_s, run_in_virtual_time
from agentrl_simulate.workload import EpisodePlan, GivenWorkload, GroupPlan, TurnPlan

ENGINE = SimulateSection(
    decode_step_s=0.004, decode_request_s=0.0003, prefill_tok_per_s=9_000, request_s=0.02, engine_slots=64
)
GROUP = GroupPlan([EpisodePlan([TurnPlan(11, 10, 0.1), TurnPlan(4, 30, 0.3)])])


def played(slowdown=0.0):
    """The turns of 200 requests that begin at random, and spans in which a trainer made the engine slower."""
    rng, turns, training = random.Random(3), [], []

    async def turn(engine, number):
        await asyncio.sleep(rng.uniform(0, 60))
        start_s, prompt, size = now_s(), rng.randint(1, 400), rng.randint(1, 120)
        await asyncio.sleep(ENGINE.request_s)
        await engine.generate(f"s{number}", prompt, size)
        turns.append(PlayedTurn(RecordedInterval(start_s, now_s()), prompt, prompt, size))

    async def trainer(engine):
        while slowdown:
            await asyncio.sleep(rng.uniform(1, 3))
            start_s = now_s()
            engine.slow_down(1.0 + slowdown)
            await asyncio.sleep(rng.uniform(1, 3))
            engine.slow_down(1.0)
            training.append(RecordedInterval(start_s, now_s()))

    async def program():
        engine = SimulatedEngine(ENGINE)
        beside = asyncio.create_task(trainer(engine))
        await asyncio.gather(*(turn(engine, number) for number in range(200)))
        beside.cancel()

    run_in_virtual_time(program())
    return turns, training


def recorded(turns, training=(), batches=None):
    batches = batches or [TrainedBatch(0.1, 0.5 + n / 1000, n, 1, 0.0, 0.25) for n in range(500, 900, 50)]
    publishing = [RecordedInterval(1000.0 + n, 1000.5 + n) for n in range(5)]
    return RecordedRun(RunConfig(), [GROUP], 1, 4, turns, training, publishing, batches)


def test_the_speed_of_an_engine_is_found():
    model = fitted([recorded(played()[0])])
    assert model["decode_step_s"] == pytest.approx(0.004, rel=0.05)
    assert model["decode_request_s"] == pytest.approx(0.0003, rel=0.2)
    assert model["prefill_tok_per_s"] == pytest.approx(9_000, rel=0.2)
    assert model["request_s"] == pytest.approx(0.02, rel=0.3)
    assert model["play_slowdown"] == 0.0


def test_how_much_a_trainer_slows_it_down_is_found_from_runs_with_and_without():
    model = fitted([recorded(played()[0]), recorded(*played(slowdown=0.8))])
    assert model["play_slowdown"] == pytest.approx(0.8, abs=0.15)
    assert model["decode_step_s"] == pytest.approx(0.004, rel=0.15)


def test_the_speed_of_a_trainer_is_found():
    alone = [TrainedBatch(0.1, 2 * 0.5 + n / 1000, n, 2, 0.0, 0.25) for n in range(500, 900, 50)]
    beside = [batch._replace(update_s=batch.update_s * 1.3, overlap=0.6) for batch in alone]
    model = fitted([recorded(played()[0], batches=[*alone, *beside])])
    assert model["train_tok_per_s"] == pytest.approx(1000, rel=0.01)
    assert model["optimizer_step_s"] == pytest.approx(0.5, rel=0.01)
    assert model["train_slowdown"] == pytest.approx(0.5, abs=0.051)
    assert model["publish_s"] == pytest.approx(0.5)
    assert model["between_s"] == pytest.approx(0.25)
    assert model["failed_episodes_ratio"] == 0.25


def test_a_run_without_turns_is_refused():
    with pytest.raises(ConfigError, match="no timeline has turns"):
        fitted([recorded([])])


def test_a_folder_without_enough_iterations_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text("")
    for rows in ("", '{"step": 0, "time_s": 1.0, "eval/before/reward": 0.5}\n'):
        (tmp_path / METRICS).write_text(rows)
        with pytest.raises(ConfigError, match="has 0 trained iterations"):
            read_recorded(tmp_path)


def test_episodes_that_are_drawn_have_the_given_medians_and_quantiles():
    given = SimulateSection(turns=6, turns_p95=12, turn_len=300, turn_len_p95=900, env_s=0.2, env_s_p95=1)
    workload = GivenWorkload(given, 2, 0)
    found = described([workload.group(index) for index in range(1500)])
    for name in ("turn_len", "turn_len_p95", "env_s", "env_s_p95"):
        assert found[name] == pytest.approx(getattr(given, name), rel=0.15), name
    assert found["turns"] == pytest.approx(6, abs=1)
    assert Spread(300, 900).mean == pytest.approx(
        np.mean([turn.sampled for n in range(1500) for e in workload.group(n).episodes for turn in e.turns]),
        rel=0.1,
    )


def test_siblings_have_their_share_of_the_variance_in_common():
    def correlation(share):
        section = SimulateSection(turns=1, turns_p95=1, sibling_correlation=share)
        pairs = [GivenWorkload(section, 2, 0).group(index).episodes for index in range(800)]
        logs = np.log([[episode.turns[0].sampled for episode in pair] for pair in pairs])
        return np.corrcoef(logs.T)[0, 1]

    assert correlation(0.0) == pytest.approx(0.0, abs=0.15)
    assert correlation(0.7) == pytest.approx(0.7, abs=0.15)


def test_a_model_that_was_written_is_the_one_that_is_read(tmp_path):
    path = tmp_path / "model.toml"
    section = requested(None, {"turns": "7", "turns_p95": "9", "rollout_gpus": "4"}).section
    save_model(section, path)
    assert parse(ModelFile, read_toml(path), source="it").simulate == section
    assert requested(None, {}, model=str(path)).section == section
    assert requested(None, {"rollout_gpus": "8"}, model=str(path)).section.rollout_gpus == 8


@pytest.mark.full
def test_a_real_run_is_read_and_simulated(tmp_path):
    import agentrl

    place = {"output_dir": str(tmp_path), "name": "real"}
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 8}
    agentrl.train(
        None,
        env="benchmarks.asynchronous.worlds:Brief",
        quiet=True,
        eval_interval=100,
        eval_episodes=1,
        **sizes,
        **place,
    )
    run = read_recorded(Path(tmp_path / "real"))
    assert len(run.batches) == 8
    assert len(run.groups) == 4 * 8
    assert len(run.turns) == 2 * 4 * 8
    assert all(turn.sampled > 0 and turn.span.seconds > 0 for turn in run.turns)
    assert len(run.publishing) >= 1
    sweep = requested(str(tmp_path / "real"), {"iterations": "12"}, [str(tmp_path / "real")])
    (row,) = sweep.over_staleness([0])
    assert row.run is not None
    assert row.run.groups["trained"] == 12 * 4

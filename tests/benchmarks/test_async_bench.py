"""The benchmark of asynchronous training: its arithmetic, its sides, and its worlds."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

import agentrl
from agentrl.algorithms.correction_config import TisConfig
from agentrl.assembly.load import load_config
from agentrl.assembly.model import fresh_source
from agentrl.assembly.policy import build_renderer
from agentrl.assembly.sections import ModelSection
from agentrl.envs import ScriptedAgent
from agentrl.rendering.config import RenderingConfig
from agentrl.run.demonstrations import demonstrate
from agentrl.types import Ending
from benchmarks.asynchronous import comparisons
from benchmarks.asynchronous.comparisons import ASYNC, PLAIN, SYNC, TWO_THREADS, compared, report
from benchmarks.asynchronous.runs import DRIVER, ENGINE, STEADY, TRAINER, Speed, Usage
from benchmarks.asynchronous.worlds import LONG, LONG_SHARE, SHORT, Brief, Tailed, coin
from benchmarks.config import AsyncBench

ALL = {
    name: getattr(comparisons, name)
    for name in dir(comparisons)
    if isinstance(getattr(comparisons, name), comparisons.Comparison)
}
START = {"hf_checkpoint": "model", "warm_start_steps": 0}


def row(step, time_s, *, wait=0.0, score=0.0, train=0.0, lag=0.0):
    names = ("rollout_time", "log_probs_time", "actor_train_time", "update_weights_time", "step_time")
    values = dict(zip(names, (wait, score, train, 0.25, 9.0), strict=True))
    times = {f"perf/{name}": value for name, value in values.items()}
    return {"step": step, "time_s": time_s, "perf/event_loop_lag_max": lag, **times}


ROWS = [
    {"step": 0, "time_s": 1.0, "eval/sampled": 0.5},
    row(1, 11.0, wait=100.0, lag=7.0),
    row(2, 13.0, wait=3.0, score=1.0, train=1.0, lag=0.5),
    {"step": 2, "time_s": 13.5, "eval/sampled": 0.5},
    row(3, 15.0, wait=1.0, score=2.0, train=3.0),
    row(4, 19.0, wait=2.0, score=0.0, train=4.0),
    row(5, 90.0, wait=100.0, lag=8.0),
]


def usage(iterations, at_s, driver, engine, trainer):
    return Usage(iterations, at_s, {DRIVER: driver, ENGINE: engine, TRAINER: trainer})


def test_a_run_is_timed_without_its_first_and_last_iterations():
    usages = [usage(1, 50.0, 1.0, 2.0, 3.0), usage(3, 54.0, 9.0, 9.0, 9.0), usage(4, 60.0, 2.0, 7.0, 13.0)]
    speed = Speed.of(ROWS, usages, first=1, last=4)
    # Three iterations from 11 s to 19 s.
    assert speed.steps_per_s == 3 / 8
    assert (speed.wait_s, speed.train_s, speed.publish_s) == (2.0, 4.0, 0.25)
    assert speed.lag_s == 0.5
    # In ten seconds.
    assert speed.busy == {DRIVER: 0.1, ENGINE: 0.5, TRAINER: 1.0}
    assert json.loads(json.dumps(speed.as_json()))["busy"] == speed.busy


def test_usage_that_was_noted_too_rarely_is_left_out():
    assert Speed.of(ROWS, [usage(5, 50.0, 1.0, 2.0, 3.0)], first=1, last=4).busy == {}


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 3), (2, 6)])
def test_a_run_that_is_too_short_is_refused(first, last):
    with pytest.raises(ValueError, match="of 5 iterations"):
        Speed.of(ROWS, (), first=first, last=last)


def speed(steps_per_s, **others):
    defaults = {"wait_s": 1.0, "train_s": 2.0, "publish_s": 0.0, "busy": {TRAINER: 0.5}, "lag_s": 0.1}
    return Speed(**{"steps_per_s": steps_per_s, **defaults, **others})


def test_the_ratio_is_that_of_medians_against_the_fastest_baseline():
    comparison = dataclasses.replace(comparisons.SPEEDUP, to=(SYNC, PLAIN), groups=10)
    rates = {
        SYNC: (1.0, 2.0, 9.0),
        PLAIN: (3.0, 4.0, 5.0),
        TWO_THREADS: (8.0, 8.0, 8.0),
        ASYNC: (6.0, 2.0, 10.0),
    }
    result = report(comparison, {side: [speed(rate) for rate in each] for side, each in rates.items()})
    summary = result["summary"]
    assert (summary["ratio"], summary["against"], summary["target"]) == (1.5, PLAIN, 1.7)
    assert summary["repeats"] == [0.5, 2.0]
    assert summary["ratios"] == {SYNC: 3.0, PLAIN: 1.5, TWO_THREADS: 0.75}
    assert summary["groups/s"][ASYNC] == 60.0
    assert summary["steps/s"][SYNC] == f"2 (spread {8 / 2:.0%})"
    assert [run["steps_per_s"] for run in result["runs"][ASYNC]] == [6.0, 2.0, 10.0]
    assert json.loads(json.dumps(result)) == result


def test_the_anatomy_has_medians_and_the_longest_stall():
    runs = [speed(1.0, wait_s=w, busy={TRAINER: b}, lag_s=w) for w, b in ((1.0, 0.9), (5.0, 0.1), (2.0, 0.3))]
    assert comparisons.anatomy(runs) == {
        **{"wait_s": 2.0, "train_s": 2.0, "publish_s": 0.0},
        **{"busy": {TRAINER: 0.3}, "longest_stall_s": 5.0},
    }
    # A repeat whose usage is missing is left out.
    assert comparisons.anatomy([*runs, speed(1.0, busy={})])["busy"] == {}


@pytest.mark.parametrize("name", ALL)
def test_the_sides_are_valid_runs_that_differ_in_what_they_name(name):
    comparison = ALL[name]
    start = {} if comparison.warm_start is None else START
    for own in comparison.sides.values():
        settings = {**STEADY, **comparison.shared, **start, **own, "num_rollout": 8}
        config = load_config(comparison.run_file, settings)
        assert {
            key: value
            for section in ("run", "rollout", "algorithm")
            for key, value in getattr(config, section).effective().items()
            if key in own
        } == own
        assert config.trainer.lr == STEADY["lr"]
        assert config.run.num_threads in (1, 2)
    if comparison.warm_start is not None:
        load_config(comparison.run_file, {**comparison.shared, **comparison.warm_start})
    assert {comparison.of, *comparison.to} <= set(comparison.sides)
    # Above max_staleness 0 a correction is set, and the baseline of the figure has the same one.
    corrections = {side: own.get("correction") for side, own in comparison.sides.items()}
    assert {corrections[side] for side in (comparison.of, *comparison.to)} == {"tis"}


def test_the_asynchronous_example_is_the_quickstart_but_for_staleness_and_correction():
    plain = load_config(comparisons.HOP_SEARCH, {})
    late = load_config("examples/hop_search/async.toml", {})
    assert late.run.name != plain.run.name
    rollout = plain.rollout.model_copy(update={"max_staleness": 1})
    algorithm = plain.algorithm.model_copy(update={"correction": TisConfig()})
    assert late == plain.model_copy(update={"run": late.run, "rollout": rollout, "algorithm": algorithm})
    assert late.run == plain.run.model_copy(update={"name": late.run.name})


async def turns_of(world, seed):
    env = world()
    env.seed_rng(seed)
    await env.reset(env.tasks("train")[0], seed=seed)
    number = 1
    while not (await env.step(agentrl.say("x"))).terminated:
        number += 1
    return number


async def all_turns(world):
    return [await turns_of(world, seed) for seed in range(100)]


def test_a_tenth_of_the_worlds_is_long():
    turns = asyncio.run(all_turns(Tailed))
    assert set(turns) == {SHORT, LONG}
    assert turns == asyncio.run(all_turns(Tailed))
    assert abs(turns.count(LONG) / len(turns) - LONG_SHARE) < 0.05
    assert set(asyncio.run(all_turns(Brief))) == {1}


def test_a_long_episode_fits_into_its_limits_turn_by_turn(tmp_path):
    env = Tailed()
    source = fresh_source(ModelSection(), env, env.dialect, seed=0, folder=tmp_path)
    renderer = build_renderer(source, env.dialect, RenderingConfig())
    shown = demonstrate(Tailed, renderer, env.tasks("train"), 30, seed=0, progress=lambda number: None)
    for number, sample in enumerate(asyncio.run(shown)):
        turns = asyncio.run(turns_of(Tailed, number))
        # The end of a turn is sampled, too.
        most = comparisons.LONG_TAIL.shared["rollout_max_response_len"]
        assert sample.loss_mask.sum() / turns + 1 <= most
        assert len(sample) + turns <= env.limits.max_tokens


async def scripted(world, **options):
    env = world()
    return await agentrl.play(env, ScriptedAgent(env.expert), env.tasks("train")[0], **options)


def test_episodes_are_played_to_their_ends_and_chance_pays_half_of_them():
    episode = asyncio.run(scripted(Tailed, seed=1))
    assert (episode.ending, len(episode.turns)) == (Ending.COMPLETED, asyncio.run(turns_of(Tailed, 1)))
    groups = [
        [coin(dataclasses.replace(episode, id=f"g{ordinal}-{number}")) for number in range(4)]
        for ordinal in range(100)
    ]
    assert 160 < sum(map(sum, groups)) < 240
    # So most groups have a gradient: one in eight has equal rewards.
    assert sum(len(set(rewards)) == 1 for rewards in groups) < 25


@pytest.mark.full
def test_both_sides_run_and_are_compared():
    comparison = comparisons.CHEAP
    small = {**comparison.shared, "num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 64, "max_slots": 16}
    sides = {side: comparison.sides[side] for side in (SYNC, ASYNC)}
    lines = []
    result = compared(
        dataclasses.replace(comparison, shared=small, sides=sides),
        AsyncBench(repeats=1, iterations=8),
        lines.append,
    )
    assert json.loads(json.dumps(result)) == result
    assert set(result["runs"]) == {SYNC, ASYNC}
    assert result["summary"]["ratio"] > 0
    assert result["summary"]["an iteration"][ASYNC]["busy"][TRAINER] > 0
    assert [line.split(":")[0] for line in lines] == [ASYNC, SYNC]

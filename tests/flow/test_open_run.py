"""Loops of the caller's: they make the weights of `agentrl train`, and leave what it leaves."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import agentrl
from agentrl.errors import ConfigError, NoSignalError, UserError
from agentrl.records.history import attempts
from agentrl.rollout.group import LEFT_OUT
from tests.flow.runs import WARM, journal_of, metrics_of, options_of, tokens_of, train
from tests.flow.test_asynchronous import LATE
from tests.flow.test_replay import replay_of
from tests.flow.test_resume import SMALL, accounted, facts_of, weights_of

CALLED = ("eval_interval", "save_interval")
"""What a loop of the caller's decides."""
SHORT = {**SMALL, "num_rollout": 4, **WARM, "warm_start_steps": 10, "num_demonstrations": 32}
WORLD = "Talkative"


class StoppedError(Exception):
    """The loop has stopped by itself."""


async def usual(run):
    """The loop of `agentrl train`."""
    while not run.is_over:
        await run.update(await run.credit(await run.play()))
        await run.publish()


def looped(output_dir, loop=usual, *, world=WORLD, resume=False, base=SHORT, **settings):
    """The folder of a run with this loop."""
    options = options_of(world, output_dir, "own", **{**base, **settings})

    async def main():
        acting = {name: value for name, value in options.items() if name not in CALLED}
        async with agentrl.open_run(quiet=True, resume=resume, **acting) as run:
            await loop(run)
        return run.folder

    return asyncio.run(main())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(WORLD, tmp_path_factory.mktemp("runs"), "trained", **SHORT).folder


def test_it_makes_the_weights_of_a_run_bit_for_bit_and_leaves_its_records(trained, tmp_path):
    folder = looped(tmp_path)
    assert weights_of(folder) == weights_of(trained)
    held_out = [{n: v for n, v in row.items() if not n.startswith("eval/")} for row in facts_of(trained)]
    assert [row for row in facts_of(folder) if len(row) > 1] == [row for row in held_out if len(row) > 1]
    entries = journal_of(trained, "step_*")
    assert [*map(tokens_of, journal_of(folder, "step_*"))] == [*map(tokens_of, entries)]
    assert accounted(folder).trained == accounted(trained).trained > 0
    assert (folder / "report.html").exists()
    assert [attempt.ended for attempt in attempts(folder)] == ["finished"]


def test_an_asynchronous_loop_is_the_same_with_a_setting(tmp_path):
    settings = {**LATE, **WARM, "warm_start_steps": 10, "num_rollout": 6}
    folder = looped(tmp_path, **settings)
    assert max(row.get("rollout/staleness/max", 0.0) for row in metrics_of(folder)) == 1.0
    # What was played at which moment is not the same twice; what was made of it is.
    again = replay_of(folder, WORLD, tmp_path, "again", {**SHORT, **settings})
    assert weights_of(again) == weights_of(folder)
    assert accounted(folder).trained > 0


def test_the_loop_chooses_what_is_trained_on_and_rates_it_and_the_journal_says_so(tmp_path):
    async def choosing(run):
        while not run.is_over:
            _, second = await run.play()
            better = replace(second.verdicts[0], total=5.0)
            groups = [replace(second, verdicts=(better, *second.verdicts[1:]))]
            batch = await run.credit(groups)
            assert [group.id for step in batch.steps for group in step.groups] == [second.id]
            await run.update(batch)
            await run.publish()

    folder = looped(tmp_path, choosing)
    entries = journal_of(folder, "step_*")
    reasons = [entry.get("reason") for entry in entries]
    assert reasons == [reason for _ in range(4) for reason in ([LEFT_OUT] * 4 + [None] * 4)]
    totals = [entry["verdicts"][0]["total"] for entry in entries]
    assert totals[4::8] == [5.0] * 4
    again = replay_of(folder, WORLD, tmp_path, "again", SHORT)
    assert weights_of(again) == weights_of(folder)


def versions_of(groups):
    """The versions of all tokens."""
    turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
    return {int(version) for turn in turns for version in turn.tokens.completion.versions}


def test_without_update_nothing_is_learned_and_without_publish_nothing_is_served(tmp_path):
    seen = []

    async def partial(run):
        for trains, publishes in [(False, False), (True, False), (True, True), (True, False)]:
            groups = await run.play()
            batch = await run.credit(groups)
            if trains:
                await run.update(batch)
            if publishes:
                assert await run.publish() == run.version
            seen.append((versions_of(groups), run.version, run.step))

    folder = looped(tmp_path, partial, update_weights_interval=2, correction="tis")
    # An iteration that is not published ends with the next `play`, or with the block.
    assert seen == [({0}, 0, 0), ({0}, 0, 1), ({0}, 1, 3), ({1}, 1, 3)]
    steps = [row["train/optimizer_steps"] for row in metrics_of(folder) if "train/optimizer_steps" in row]
    assert steps == [0.0, 1.0, 1.0, 1.0]
    assert accounted(folder).started == 8


def test_tokens_of_older_weights_are_refused_where_nothing_corrects_them(tmp_path):
    refused = []

    async def forgets_to_publish(run):
        groups = await run.play()
        await run.publish()
        with pytest.raises(UserError, match=r"is not of this batch, .* set max_staleness, and a correction"):
            await run.credit([*await run.play(), *groups])
        await run.update(await run.credit(await run.play()))
        with pytest.raises(UserError, match="weights of 1 updates were not published") as error:
            await run.play()
        refused.append(error)

    folder = looped(tmp_path, forgets_to_publish)
    assert refused
    assert accounted(folder).started == 6


def test_groups_of_an_earlier_batch_are_trained_on_with_staleness_and_a_correction(tmp_path):
    again = []

    async def with_a_buffer(run):
        kept = []
        while not run.is_over:
            groups = await run.play()
            batch = await run.credit([*groups, *kept])
            again.extend({group.id for step in batch.steps for group in step.groups} & {g.id for g in kept})
            await run.update(batch)
            await run.publish()
            kept = groups

    folder = looped(tmp_path, with_a_buffer, max_staleness=1, correction="tis")
    assert again
    assert accounted(folder).trained > 0


def test_what_one_loop_has_saved_another_one_and_a_run_go_on_with(trained, tmp_path):
    async def half(run):
        for _ in range(2):
            await run.update(await run.credit(await run.play()))
            await run.publish()
        scores = await run.evaluate()
        assert set(scores) >= {"eval/sampled", "eval/greedy"}
        await run.save()
        await run.play()
        raise StoppedError

    with pytest.raises(StoppedError):
        looped(tmp_path, half)
    folder = tmp_path / "own"

    async def one(run):
        assert run.step == 2
        await run.update(await run.credit(await run.play()))
        await run.publish()
        await run.save()

    assert looped(tmp_path, one, resume=True) == folder
    agentrl.train(folder, resume=True, quiet=True)
    assert [attempt.ended for attempt in attempts(folder)] == ["failed", "finished", "finished"]
    assert weights_of(folder) == weights_of(trained)
    assert accounted(folder).trained == accounted(trained).trained


def test_calls_in_another_order_are_refused_with_a_sentence_and_change_nothing(trained, tmp_path):
    async def disordered(run):
        for call in (lambda: run.credit([]), run.publish):
            with pytest.raises(UserError, match="comes after `play`"):
                await call()
        while not run.is_over:
            groups = await run.play()
            for call in (run.evaluate, run.save):
                with pytest.raises(UserError, match="comes between two iterations"):
                    await call()
            batch = await run.credit(groups)
            await run.update(batch)
            with pytest.raises(UserError, match="the batch was trained on: each is `credit`ed"):
                await run.update(batch)
            with pytest.raises(UserError, match="`credit` comes before `update`"):
                await run.credit(groups)
            await run.publish()
        with pytest.raises(UserError, match=r"loop `while not run\.is_over`"):
            await run.play()

    assert weights_of(looped(tmp_path, disordered)) == weights_of(trained)


async def test_after_a_failure_no_call_goes_on_and_the_block_ends_in_order(tmp_path):
    options = options_of("Dead", tmp_path, "own", **SMALL)
    acting = {name: value for name, value in options.items() if name not in CALLED}
    async with agentrl.open_run(quiet=True, **acting) as run:
        playing = asyncio.create_task(run.play())
        await asyncio.sleep(0)
        with pytest.raises(UserError, match="has not returned yet"):
            await run.play()
        with pytest.raises(UserError, match="could not be played"):
            await playing
        with pytest.raises(UserError, match="has failed, or has not returned yet"):
            await run.publish()
    assert accounted(run.folder).started == 0


def test_settings_of_the_loop_of_a_run_are_refused_and_one_that_only_plays_too(tmp_path):
    options = options_of(WORLD, tmp_path, "own", **SHORT)
    acting = {name: value for name, value in options.items() if name not in CALLED}

    async def opened(**changed):
        async with agentrl.open_run(quiet=True, **acting, **changed):
            pass

    for name in CALLED:
        with pytest.raises(ConfigError, match=f"{name} has no effect where the loop is yours"):
            asyncio.run(opened(**{name: 2}))
    acting = {"env": acting["env"], "output_dir": str(tmp_path), "name": "own"}
    with pytest.raises(ConfigError, match="debug_rollout_only trains nothing"):
        asyncio.run(opened(debug_rollout_only=True))
    assert not (tmp_path / "own").exists()


def test_a_loop_that_trains_on_nothing_ends_as_a_run_does(tmp_path):
    with pytest.raises(NoSignalError, match="trained on nothing"):
        looped(tmp_path, world="Bandit", base=SMALL, max_idle_rollouts=2, num_rollout=9)
    steps = [row for row in metrics_of(tmp_path / "own") if "train/optimizer_steps" in row]
    assert len(steps) == 2


def test_the_example_is_the_loop_of_the_command_in_forty_lines(trained, tmp_path, monkeypatch):
    path = Path(__file__).parents[2] / "examples" / "open_loop" / "loop.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    spec = importlib.util.spec_from_file_location("open_loop", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.chdir(tmp_path)
    options = argparse.Namespace(run=str(trained / "config.toml"), name="own", max_staleness=0)
    monkeypatch.setattr(agentrl, "open_run", partial(agentrl.open_run, output_dir="runs", quiet=True))
    asyncio.run(example.main(options))
    assert weights_of(tmp_path / "runs" / "own") == weights_of(trained)

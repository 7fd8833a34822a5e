"""The benchmark of tool calls: one task on both sides, of ragged turns, and steps that alone are timed."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from statistics import median

import pytest

import agentrl
from agentrl import ScriptedAgent
from agentrl.errors import UserError
from benchmarks.trainer import beside_trl, boxes, boxes_env, tool_calls
from benchmarks.trainer.boxes_env import Boxes
from benchmarks.trainer.context import TrainerContext
from tests.benchmarks.test_trainer_bench import STAND_IN, TINY
from tests.rendering.real_templates import template


async def test_whoever_follows_the_boxes_is_right_and_no_answer_is_right_without_them():
    env = Boxes()
    for task in env.tasks("test")[:20]:
        episode = await agentrl.play(env, ScriptedAgent(env.expert(task)), task, seed=0)
        assert episode.step_rewards[-1] == 1.0
        wrong = next(value for value in boxes.VALUES if value != task.answer)
        assert boxes.is_right(task.metadata["seed"], wrong) == 0.0
    assert {task.answer for task in env.tasks("test")} == set(boxes.VALUES)
    assert not set(boxes.HELD_OUT) & set(boxes.TRAINED)


def test_turns_are_ragged_and_demonstrations_often_wrong():
    opened = [len(boxes.path(seed)) for seed in range(300)]
    assert {*opened} == {1, 2, 3}
    lengths = [len(boxes.content(seed, "zero").split()) for seed in range(300)]
    assert max(lengths) > 5 * median(lengths)
    right = [boxes.guess(seed, random.Random(seed))[-1] == boxes.answer(seed) for seed in range(1000)]
    # Half of them on purpose, and an eighth of the rest by chance.
    assert sum(right) / 1000 == pytest.approx(9 / 16, abs=0.06)


@pytest.fixture
def context(tmp_path, monkeypatch):
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(beside_trl, "_PROGRAM", program)
    monkeypatch.setattr(boxes_env, "_template", lambda trl: template("qwen3"))
    monkeypatch.setattr(tool_calls, "_WARM_START", 1)
    return TrainerContext(tmp_path, TINY, Path(sys.executable), lambda line: None)


@pytest.mark.full
async def test_steps_are_taken_in_turns(context):
    (row,) = await tool_calls.bench_tools(context)
    assert [len(side["episodes_per_s"]) for side in row.figures["sides"].values()] == [4, 4]
    assert row.line.endswith("episodes/s), target 3.0x")


async def test_steps_alone_are_timed_until_the_success_is_reached(monkeypatch):
    shares, taken = iter([0.1, 0.7, 0.8]), []

    async def step():
        taken.append(1)

    async def solved():
        await asyncio.sleep(0.05)
        return next(shares)

    found = await tool_calls._until_solved(step, solved)
    assert (found.steps, found.share, len(taken)) == (15, 0.8, 15)
    assert found.seconds < 0.05
    monkeypatch.setattr(tool_calls, "_MOST_STEPS", 10)

    async def never():
        return 0.25

    with pytest.raises(UserError, match="a side solved 25% after 10 steps"):
        await tool_calls._until_solved(step, never)

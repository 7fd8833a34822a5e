"""Values of other libraries as text: every number is in it, read back with a regular expression."""

from __future__ import annotations

import re
import time

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

from agentrl import GymEnv, call
from agentrl.envs.check import check_env
from agentrl.envs.values import OBSERVATION_CHARS, text_of

SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=4).filter(lambda shape: np.prod(shape) < 6_000)


def numbers(text):
    return [int(number) for number in re.findall(r"-?\d+", text)]


@given(shape=SHAPES, seed=st.integers(0, 9))
def test_all_numbers_are_written_in_their_order(shape, seed):
    array = np.random.default_rng(seed).integers(-99, 99, shape)
    assert numbers(text_of(array)) == array.ravel().tolist()
    # Twice, and indented, it has to fit, too.
    few = array if array.size <= 3_000 else array.ravel()[:3_000]
    nested = text_of({"image": few, "steps": (7, few)})
    assert numbers(re.sub(r"dtype=\w+|shape=\([^)]*\)", "", nested)) == [*few.ravel(), 7, *few.ravel()]


@pytest.mark.parametrize("value", [3, "a text", np.float32(0.5), np.arange(9.0), {"a": (1, None)}, [True]])
def test_what_is_short_is_its_str(value):
    assert text_of(value) == str(value)


@pytest.mark.parametrize("shape", [(400_000,), (1, 1, 400_000), (512, 512, 3), (3, 400_000), (400_000, 1)])
def test_what_is_longer_than_a_message_is_cut_with_a_sentence_in_little_time(shape):
    array = np.random.default_rng(0).integers(100, 999, shape)
    began = time.perf_counter()
    text = text_of((array,))
    assert time.perf_counter() - began < 2.0, "all of it would take several times as long"
    shown, _, sentence = text.rpartition("\n")
    assert sentence == "[The rest, after 65,536 characters, is not shown.]"
    assert len(shown) == OBSERVATION_CHARS
    # The last one may be cut in two.
    read = numbers(shown)[:-1]
    assert len(read) > 4_000
    assert read == array.ravel()[: len(read)].tolist()


MODES = {"render_modes": []}


class Find(gymnasium.Env):
    """One of many numbers is 9; the action is its column."""

    metadata = MODES

    def __init__(self, rows=30, render_mode=None):
        self.render_mode, self.rows = render_mode, rows
        self.action_space = Discrete(50)
        self.observation_space = Box(0, 9, (rows, 50), np.int64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(50))
        board = np.zeros((self.rows, 50), np.int64)
        board[self.rows // 2, self.at] = 9
        return board, {}

    def step(self, action):
        return np.zeros((self.rows, 50), np.int64), float(action == self.at), True, False, {}


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    before = dict(gymnasium.registry)
    gymnasium.register("Find-v0", Find)
    monkeypatch.setattr("agentrl.envs.gym.adopted._facts_by_id", {})
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


async def test_a_world_that_shows_many_numbers_can_be_solved():
    for number in range(5):
        env = GymEnv("Find-v0")
        (first,), _ = await env.reset(env.tasks("train")[number], seed=0)
        step = await env.step(call("act", action=numbers(first.text).index(9) % 50))
        assert step.reward == 1.0


class Endless(GymEnv):
    chance_score = 0.05

    def __init__(self):
        super().__init__("Find-v0", rows=700)


def test_a_check_reports_a_world_whose_observations_are_cut():
    report = check_env(Endless, n=2)
    assert "observation-unbounded" in report.codes
    assert "observation-unbounded" not in check_env(lambda: GymEnv("Find-v0"), n=2).codes

"""A registered environment as a gymnasium.Env: synchronous, over text, without leaked threads or tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import random
import subprocess
import sys
import threading
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from agentrl import Limits, Message, Step, Task, ToolEnv, UserError, register
from agentrl.envs import registry
from agentrl.envs.gym import GymnasiumFace, TextSpace
from agentrl.errors import StageError
from tests.worlds import QUICK, Hang, Parrot, Talk, raising


def shout(text: str) -> str:
    """Say it louder."""
    return f"«{text.upper()}» 🙂"


class Zurich(ToolEnv):
    """Asks in German and rolls a die."""

    tools = (shout,)
    limits = Limits(max_turns=3)
    splits = ("train", "test", "empty")

    def __init__(self, sides: int = 6) -> None:
        super().__init__()
        self.sides = sides

    def tasks(self, split):
        if split == "empty":
            return []
        return [Task(f"{split}-{n}", (Message("user", f"Größe {n}?"),), f"größe {n}") for n in range(50)]

    async def reset(self, task, *, seed):
        observation, _ = await super().reset(task, seed=seed)
        return observation, {"rolled": self.rng.randint(1, self.sides)}

    def reward(self, task, answer):
        return float(answer == task.answer)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    before = dict(gymnasium.registry)
    register("Zurich-v0", Zurich)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


@pytest.fixture
def env():
    face = gymnasium.make("agentrl/Zurich-v0")
    yield face
    face.close()


def test_an_episode_is_text_in_and_text_out(env):
    observation, info = env.reset(seed=1, options={"task": "train-7"})
    assert (observation, info["task"]) == ("Größe 7?", "train-7")
    assert [tool["name"] for tool in info["tools"]] == ["shout"]
    assert env.step("hm <shout> größe</shout> ignored") == ("«GRÖSSE» 🙂", 0.0, False, False, {})
    assert env.step("<answer> größe 7</answer>") == ("", 1.0, True, False, {})


def test_what_is_no_action_is_answered_with_the_forms(env):
    env.reset(seed=1)
    observation, reward, terminated, truncated, _ = env.step("größe 7")
    assert observation.endswith("write <shout> ...</shout> or <answer> ...</answer>.")
    assert (reward, terminated, truncated) == (0.0, False, False)


def test_the_limit_of_turns_truncates_and_an_end_of_the_worlds_own_does_not(env):
    env.reset(seed=1)
    endings = [env.step("<shout> a</shout>")[2:4] for _ in range(3)]
    assert endings == [(False, False), (False, False), (False, True)]
    env.reset(options={"task": 0})
    for _ in range(2):
        env.step("?")
    assert env.step("<answer> no</answer>")[1:4] == (0.0, True, False)


@pytest.mark.parametrize("end", ["<answer> a</answer>", None])
def test_a_step_after_the_end_requires_a_reset(env, end):
    if end:
        env.reset(seed=0)
        env.step(end)
    with pytest.raises(UserError, match="call reset"):
        env.unwrapped.step("<answer> a</answer>")


def test_a_seed_fixes_the_task_and_the_world_and_everything_after_it(env):
    def course(seed):
        replies = [env.reset(seed=seed)] + [env.reset() for _ in range(5)]
        return [(observation, info["rolled"]) for observation, info in replies]

    assert course(3) == course(3)
    assert course(3) != course(4)
    assert len({observation for observation, _ in course(3)}) > 1
    assert len({rolled for _, rolled in course(3)}) > 1


def test_a_task_is_selected_by_number_id_or_itself_in_the_chosen_split():
    env = gymnasium.make("agentrl/Zurich-v0", split="test", sides=1)
    for choice in (3, "test-3", Zurich().tasks("test")[3]):
        _, info = env.reset(seed=0, options={"task": choice})
        assert (info["task"], info["rolled"]) == ("test-3", 1)
    assert env.reset(options={"split": "train"})[1]["task"].startswith("train-")
    assert env.reset()[1]["task"].startswith("test-")
    env.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"task": "trein-7"}, "split `train` of Zurich-v0 has no task 'trein-7'. Did you mean `train-7`?"),
        ({"task": 50}, "has no task 50"),
        ({"task": -1}, "number from 0 to 49"),
        ({"split": "tset"}, "Zurich-v0 has no split `tset`. Did you mean `test`? It has train, test, empty."),
        ({"split": "empty"}, "split `empty` of Zurich-v0 has no task None"),
        ({"tasks": 1}, "reset() has no option `tasks`. Did you mean `task`? It has task, split."),
    ],
)
def test_a_wrong_option_is_a_one_sentence_error(env, options, sentence):
    with pytest.raises(UserError) as caught:
        env.reset(options=options)
    assert sentence in str(caught.value)


def test_arguments_are_checked_when_the_environment_is_made():
    with pytest.raises(UserError, match=r"Zurich-v0: .*`colour`"):
        GymnasiumFace("Zurich-v0", colour="red")


def test_render_returns_the_episode_so_far():
    env = gymnasium.make("agentrl/Zurich-v0", render_mode="ansi")
    env.reset(seed=0, options={"task": 1})
    env.step("<shout> ja</shout>")
    assert env.render() == "Größe 1?\n<shout> ja</shout>\n«JA» 🙂"
    env.reset(seed=0, options={"task": 2})
    assert env.render() == "Größe 2?"
    env.close()


def test_what_is_returned_may_be_changed_without_changing_what_comes_next(env):
    _, info = env.reset(seed=0)
    info["tools"][0]["parameters"].clear()
    assert env.reset(seed=0)[1]["tools"][0]["parameters"]["properties"]


def test_gymnasiums_checker_finds_no_fault(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


def make_zurich():
    return gymnasium.make("agentrl/Zurich-v0")


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_vectors_of_environments_carry_any_script(env, kind, mode):
    make = [make_zurich] * 2
    vector = (
        AsyncVectorEnv(make, shared_memory=False, autoreset_mode=mode)
        if kind == "async"
        else SyncVectorEnv(make, autoreset_mode=mode)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observations, _ = vector.reset(seed=[5, 6])
        assert observations in vector.observation_space
        assert observations == tuple(env.reset(seed=seed)[0] for seed in (5, 6))
        observation = observations[0]
        answer = f"<answer> {observation[:-1].lower()}</answer>"
        observations, rewards, terminated, _, _ = vector.step((answer, "<shout> 東京 ß</shout>"))
        assert observations[1] == "«東京 SS» 🙂"
        assert (rewards.tolist(), terminated.tolist()) == ([1.0, 0.0], [True, False])
        observations, *_ = vector.step(vector.action_space.sample())
        assert observations in vector.observation_space
    vector.close()


def left_over(before):
    """New threads that do not end; that of a tool ends a moment after its answer."""
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(timeout=2)
    return [thread for thread in new if thread.is_alive()]


def test_closing_leaves_no_loop_no_thread_and_no_episode():
    closed = []

    class Counted(Zurich):
        async def close(self):
            closed.append(self)

    register("Counted-v0", Counted)
    gc.collect()
    threads, files = set(threading.enumerate()), set(os.listdir("/dev/fd"))
    env = gymnasium.make("agentrl/Counted-v0").unwrapped
    env.reset(seed=0)
    env.reset(seed=1)
    assert len(closed) == 1
    env.step("<shout> a</shout>")
    env.close()
    env.close()
    assert len(closed) == len(set(closed)) == 2
    assert left_over(threads) == []
    assert len(os.listdir("/dev/fd")) == len(files)


def test_an_episode_that_ended_is_closed_at_once():
    register("Talk-v0", Talk, on={}, steps=(Step.finished(Message("user", "end"), reward=0.25, won=True),))
    env = gymnasium.make("agentrl/Talk-v0").unwrapped
    env.reset(seed=0)
    world = env._open
    assert env.step("<answer> a</answer>") == ("end", 0.25, True, False, {"won": True})
    assert world.closed == 1
    env.close()
    assert world.closed == 1


async def test_it_runs_inside_a_running_loop_as_in_a_notebook():
    env = gymnasium.make("agentrl/Zurich-v0")
    threads = set(threading.enumerate())
    env.reset(seed=0, options={"task": 7})
    assert env.step("<answer> größe 7</answer>")[1] == 1.0
    env.close()
    assert left_over(threads) == []
    assert asyncio.get_running_loop().is_running()


def test_the_threads_own_event_loop_is_not_touched(env):
    mine = asyncio.new_event_loop()
    asyncio.set_event_loop(mine)
    env.reset(seed=0)
    env.close()
    assert asyncio.get_event_loop_policy().get_event_loop() is mine
    asyncio.set_event_loop(None)
    mine.close()


@pytest.mark.parametrize("where", ["reset", "step"])
def test_deadlines_hold_and_a_broken_world_is_named_with_its_stage(where):
    class Slow(Talk):
        limits = dataclasses.replace(QUICK, **{f"{where}_timeout_s": 0.02})

    def enter(on):
        register("Slow-v0", Slow, on={where: on})
        env = gymnasium.make("agentrl/Slow-v0").unwrapped
        try:
            env.reset(seed=0)
            env.step("<answer> a</answer>")
        finally:
            env.close()

    with pytest.raises(StageError, match=rf"{where} timeout: took longer"):
        enter(Hang())
    with pytest.raises(StageError, match=rf"{where} error: RuntimeError: no disk"):
        enter(raising(RuntimeError("no disk")))


def test_the_global_generators_are_not_touched(env):
    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist()
    env.reset(seed=0)
    env.step(env.action_space.sample())
    env.reset()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_without_an_import_gymnasium_finds_every_installed_environment():
    code = (
        "import gymnasium\n"
        "env = gymnasium.make('agentrl:agentrl/HopSearch-v0', split='test')\n"
        "print(env.reset(seed=0)[0])\n"
        "env.close()\n"
        "import agentrl\n"
        "known = {name for name in gymnasium.registry if name.startswith('agentrl/')}\n"
        "assert known == {f'agentrl/{id}' for id in agentrl.env_ids()}, known\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.stderr == ""
    assert run.stdout.endswith("?\n")


def test_a_namespace_is_a_dot_in_gymnasium_and_registering_again_replaces_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register("lab/Parrot-v3", Parrot)
        register("lab/Parrot-v3", Zurich)
    env = gymnasium.make("agentrl/lab.Parrot-v3")
    assert env.unwrapped.spec.id == "agentrl/lab.Parrot-v3"
    assert env.reset(seed=0)[0].startswith("Größe")
    assert env.observation_space == TextSpace()
    env.close()

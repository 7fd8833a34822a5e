"""Gymnasium's environments as environments of agentrl."""

from __future__ import annotations

import threading

import gymnasium
import pytest
from gymnasium.spaces import Discrete, Text
from gymnasium.utils.env_checker import check_env

from agentrl import GymEnv, ScriptedAgent, UserError, call, make, play, register, say
from agentrl.envs import registry
from agentrl.envs.gym import TextSpace
from agentrl.errors import MissingExtraError
from agentrl.runtime.extras import EXTRAS
from agentrl.types import Ending, Message, ToolCall

NAMES = ("left", "down", "right", "up")
MODES = {"render_modes": []}
CREATED = []


class Count(gymnasium.Env):
    """Counts up by the action: -1 per step, 9 for reaching five, which terminates; three truncates."""

    metadata = MODES
    created = CREATED

    def __init__(self, start=1, render_mode=None):
        self.render_mode = render_mode
        self.action_space = Discrete(3, start=start)
        self.observation_space = Discrete(100)
        self.threads = set()
        self.closed = 0
        self.created.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(3))
        return self.at, {}

    def step(self, action):
        self.threads.add(threading.current_thread())
        self.at += int(action)
        return self.at, 9.0 if self.at >= 5 else -1.0, self.at >= 5, self.at == 3, {}

    def close(self):
        self.closed += 1


class Echo(gymnasium.Env):
    """Repeats the action; "stop" ends it."""

    metadata = MODES

    def __init__(self, space):
        self.action_space = self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "listening", {}

    def step(self, action):
        return f"{action}!", 0.5, action == "stop", False, {}


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr("agentrl.envs.gym.adopted._facts_by_id", {})
    before = dict(gymnasium.registry)
    gymnasium.register("Count-v0", Count)
    gymnasium.register("Limited-v0", Count, max_episode_steps=7)
    gymnasium.register("Echo-v0", Echo, kwargs={"space": TextSpace()}, disable_env_checker=True)
    Count.created.clear()
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def started(env, at):
    """A task at whose seed Count begins at `at`."""
    for task in env.tasks("train"):
        world = Count()
        if world.reset(seed=task.metadata["seed"])[0] == at:
            return task
    raise AssertionError


def act(action):
    return call("act", action=action)


async def test_one_line_adopts_and_the_worlds_own_rendering_is_the_observation():
    register("Lake-v0", GymEnv, gym_id="FrozenLake-v1", actions=NAMES, is_slippery=False)
    env = make("Lake-v0")
    assert env.limits.max_turns == 100
    (first,), _ = await env.reset(env.tasks("train")[0], seed=0)
    assert first == Message("user", "[S]FFF\nFHFH\nFFFH\nHFFG")
    path = ["down", "down", "right", "right", "down", "right"]
    steps = [await env.step(act(action)) for action in path]
    assert steps[1].observation[0].content == "(Down)\nSFFF\nFHFH\n[F]FFH\nHFFG"
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert [step.terminated for step in steps] == [False] * 5 + [True]
    await env.close()


async def test_without_names_actions_are_numbers_and_without_a_rendering_observations_are_values():
    env = GymEnv("Count-v0")
    (tool,) = env.tool_schemas
    assert tool.parameters["properties"] == {"action": {"type": "integer", "minimum": 1, "maximum": 3}}
    (first,), _ = await env.reset(started(env, 0), seed=0)
    assert first.content == "0"
    step = await env.step(act(2))
    assert (step.observation[0].content, step.reward, step.terminated, step.truncated) == (
        "2",
        -1.0,
        False,
        False,
    )
    assert (await env.step(act(1))).truncated
    step = await env.step(act(3))
    assert (step.reward, step.terminated) == (9.0, True)


async def test_names_count_from_the_first_action():
    env = GymEnv("Count-v0", actions=("one", "two", "three"), rules="Count.", describe=lambda at: f"at {at}")
    (first,), _ = await env.reset(started(env, 1), seed=0)
    assert first.content == "Count.\n\nat 1"
    assert (await env.step(act("three"))).observation[0].content == "at 4"


async def test_several_calls_are_done_in_order_until_the_world_ends():
    env = GymEnv("Count-v0")
    await env.reset(started(env, 0), seed=0)
    calls = tuple(ToolCall("act", {"action": action}, id=str(action)) for action in (1, 3, 2, 1))
    step = await env.step(Message("assistant", tool_calls=calls))
    assert [(message.content, message.tool_call_id) for message in step.observation] == [
        ("1", "1"),
        ("4", "3"),
        ("6", "2"),
    ]
    assert (step.reward, step.terminated) == (7.0, True)


@pytest.mark.parametrize(
    ("action", "sentence", "count"),
    [
        (say("1"), "Nothing was done; call `act`. Do something: a number from 1 to 3.", None),
        (act(0), "That is no action. Do something: a number from 1 to 3.", "rejected_calls"),
        (act(4), "That is no action.", "rejected_calls"),
        (act(True), "That is no action.", "rejected_calls"),
        (act("1"), "That is no action.", "rejected_calls"),
        (act([1]), "That is no action.", "rejected_calls"),
        (call("act"), "That is no action.", "rejected_calls"),
        (call("jump"), "There is no tool 'jump'; there is `act`.", "unknown_tools"),
        (
            Message("assistant", tool_calls=(ToolCall("", None, error="Broken."),)),
            "Broken.",
            "malformed_calls",
        ),
    ],
)
async def test_an_invalid_action_changes_nothing_and_gets_an_answer(action, sentence, count):
    env = GymEnv("Count-v0")
    await env.reset(started(env, 2), seed=0)
    step = await env.step(action)
    assert sentence in step.observation[0].content
    assert (step.reward, step.terminated, step.truncated) == (None, False, False)
    assert env.counts["invalid_moves"] == 1
    assert count is None or env.counts[count] == 1
    assert (await env.step(act(2))).observation[0].content == "4"


@pytest.mark.parametrize(("at", "share"), [(0, 0.875), (1, 0.875), (2, 1.0)])
async def test_with_bounds_the_scaled_return_is_rewarded_once_at_the_end(at, share):
    env = GymEnv("Count-v0", returns=(1.0, 9.0))
    await env.reset(started(env, at), seed=0)
    steps = []
    while not steps or not steps[-1].terminated:
        steps.append(await env.step(act(3)))
    assert [step.reward for step in steps] == [None] * (len(steps) - 1) + [share]


async def test_with_bounds_an_unfinished_game_is_worth_nothing_and_rewards_stay_in_0_to_1():
    env = GymEnv("Count-v0", returns=(1.0, 9.0))
    await env.reset(started(env, 1), seed=0)
    step = await env.step(act(2))
    assert (step.reward, step.truncated) == (None, True)
    for bounds, share in (((9.0, 10.0), 0.0), ((0.0, 3.0), 1.0)):
        env = GymEnv("Count-v0", returns=bounds)
        await env.reset(started(env, 2), seed=0)
        assert (await env.step(act(3))).reward == share


async def test_a_task_fixes_the_world_and_the_seed_changes_nothing():
    async def course(number, seed):
        env = GymEnv("FrozenLake-v1", actions=NAMES)
        await env.reset(env.tasks("train")[number], seed=seed)
        return [(await env.step(act(action))).observation for action in ("right", "down", "right", "down")]

    assert await course(3, 0) == await course(3, 1)
    assert len({repr(await course(number, 0)) for number in range(20)}) > 5


@pytest.mark.parametrize("space", [TextSpace(), Text(20)])
async def test_text_actions_are_the_answers(space):
    env = GymEnv("Echo-v0", space=space)
    assert env.tool_schemas == ()
    (first,), _ = await env.reset(env.tasks("test")[0], seed=0)
    assert first.content == "listening"
    step = await env.step(say("hello"))
    assert (step.observation, step.reward) == ((Message("user", "hello!"),), 0.5)
    broken = Message("assistant", tool_calls=(ToolCall("", None, raw="stop", error="no"),))
    assert (await env.step(broken)).terminated


async def test_text_outside_the_space_is_answered_with_the_space():
    env = GymEnv("Echo-v0", space=Text(20))
    await env.reset(env.tasks("test")[0], seed=0)
    step = await env.step(say("Zürich"))
    assert step.observation[0].content.startswith("That is no action; Text(1, 20")
    assert (step.reward, step.terminated) == (None, False)
    everything = GymEnv("Echo-v0", space=TextSpace())
    await everything.reset(everything.tasks("test")[0], seed=0)
    assert (await everything.step(say("Zürich"))).observation[0].content == "Zürich!"


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"gym_id": "FrozenLak-v1"}, "Gymnasium has no environment `FrozenLak-v1`: .*FrozenLake"),
        ({"gym_id": "no_module:X-v1"}, "Gymnasium has no environment `no_module:X-v1`"),
        ({"gym_id": "Pendulum-v1"}, "Pendulum-v1 takes actions of Box.*only discrete and text actions"),
        ({"gym_id": "FrozenLake-v1", "actions": ("left",)}, "has 4 actions, got 1 names; name each one"),
    ],
)
def test_what_cannot_be_adopted_is_a_one_sentence_error(kwargs, sentence):
    with pytest.raises(UserError, match=sentence):
        assert GymEnv(**kwargs).tool_schemas


def test_max_turns_is_gymnasiums_number_of_steps_unless_the_class_sets_limits():
    class Short(GymEnv):
        limits = GymEnv.limits.__class__(max_turns=3)

    assert [GymEnv(id).limits.max_turns for id in ("Limited-v0", "Count-v0")] == [7, 100]
    assert Short("Limited-v0").limits.max_turns == 3


async def test_slow_worlds_step_in_a_thread_and_quick_ones_need_none():
    class Quick(GymEnv):
        inline = True

    for env_class, is_main in ((GymEnv, False), (Quick, True)):
        Count.created.clear()
        env = env_class("Count-v0")
        await env.reset(started(env, 0), seed=0)
        await env.step(act(1))
        (threads,) = [world.threads for world in Count.created if world.threads]
        assert (threads == {threading.main_thread()}) is is_main


async def test_every_world_that_was_made_is_closed():
    class Expert(GymEnv):
        def policy(self, observation):
            return 1

    env = Expert("Count-v0")
    task = env.tasks("train")[0]
    Count.created.clear()
    assert env.tool_schemas
    await play(env, ScriptedAgent(env.expert(task)), task)
    unfinished = env.expert(task)
    next(unfinished)
    unfinished.close()
    assert len(Count.created) == 4
    assert {world.closed for world in Count.created} == {1}


async def test_a_policy_makes_an_expert_that_sees_the_same_luck():
    class Expert(GymEnv):
        def policy(self, observation):
            return 2

    for task in Expert("FrozenLake-v1").tasks("train")[:20]:
        env = Expert("FrozenLake-v1", actions=NAMES)
        episode = await play(env, ScriptedAgent(env.expert(task)), task)
        assert episode.ending in (Ending.COMPLETED, Ending.TRUNCATED)
        assert set(episode.counts) == {"tool_calls"}
        assert all(turn.action == act("right") for turn in episode.turns)


def test_without_a_policy_there_is_no_expert():
    env = GymEnv("Count-v0")
    with pytest.raises(UserError, match="Count-v0 has no expert; write its `policy"):
        env.expert(env.tasks("train")[0])


async def test_a_planner_reads_the_world_and_learns_what_was_taken_in_its_place():
    seen = []

    class Planned(GymEnv):
        def planner(self, world):
            def best_action(observation, taken):
                seen.append((observation, taken, world.unwrapped.at))
                return 2

            return best_action

    env = Planned("Count-v0", returns=(0.0, 9.0))
    assert env.has_expert
    assert not GymEnv("Count-v0").has_expert
    task = env.tasks("train")[1]
    played = [message.tool_calls[0].arguments["action"] for message in env.expert(task)]
    assert set(played) == {2}
    seen.clear()
    deviating = [
        message.tool_calls[0].arguments["action"] for message in env.played(task, lambda action: action - 1)
    ]
    assert set(deviating) == {1}
    assert [taken for _, taken, _ in seen] == [None, *deviating[:-1]]
    assert all(observation == at for observation, _, at in seen)


def test_an_id_may_name_the_module_that_registers_it(tmp_path, monkeypatch):
    (tmp_path / "counting_worlds.py").write_text(
        "import gymnasium\n"
        "from tests.envs.gym.test_adopted import Count\n"
        "gymnasium.register('Counting-v3', Count)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert GymEnv("counting_worlds:Counting-v3").tool_schemas[0].name == "act"
    with pytest.raises(UserError, match=r"no environment `no_such_module:Counting-v3`: No module named"):
        assert GymEnv("no_such_module:Counting-v3").tool_schemas
    monkeypatch.setattr("agentrl.runtime.extras.find_spec", lambda module: None)
    monkeypatch.setitem(EXTRAS, "grids", {"no_such_module": "some-grids"})
    with pytest.raises(
        MissingExtraError, match=r"the environment Counting-v3 needs some-grids: pip install .agentrl"
    ):
        assert GymEnv("no_such_module:Counting-v3").tool_schemas


def test_an_adopted_environment_passes_gymnasiums_checker_through_the_face():
    register("Count-v0", GymEnv, gym_id="Count-v0")
    env = gymnasium.make("agentrl/Count-v0")
    check_env(env.unwrapped)
    assert env.action_space.forms[0] == "<act> {}</act>"
    env.reset(seed=0)
    env.close()

"""BabyAI's levels: what the text says is what the grid holds, the bot solves them, noise shows in it."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from itertools import product

import gymnasium
import numpy as np
import pytest

from agentrl import ScriptedAgent, call, make, play
from agentrl.envs import matching
from envs_contrib.babyai.env import ACTIONS, as_text
from envs_contrib.babyai.levels import LEVELS

OBJECT = re.compile(r"You see an? ((?:\w+ )?\w+ (?:door|key|ball|box)) (.*)\.")
STEPS = re.compile(r"(\d+) steps? (forward|left|right)")


def world_of(level, seed):
    world = gymnasium.make(f"minigrid:BabyAI-{level}-v0")
    observation, _ = world.reset(seed=seed)
    return world.unwrapped, observation


def objects_in_text(text):
    """(name, forward, right) of every visible object."""
    found = set()
    for name, place in OBJECT.findall(text):
        steps = {where: int(n) for n, where in STEPS.findall(place)}
        found.add((name, steps.get("forward", 0), steps.get("right", 0) - steps.get("left", 0)))
    return found


def objects_in_grid(world):
    """The same from the positions in the grid, by minigrid's own rule of what is visible."""
    found = set()
    for place in product(range(world.grid.width), range(world.grid.height)):
        cell = world.grid.get(*place)
        is_object = cell is not None and cell.type in ("door", "key", "ball", "box")
        if not is_object or place == tuple(world.agent_pos) or not world.agent_sees(*place):
            continue
        away = np.array(place) - world.agent_pos
        state = ""
        if cell.type == "door":
            state = "locked " if cell.is_locked else "open " if cell.is_open else "closed "
        name = f"{state}{cell.color} {cell.type}"
        found.add((name, int(away @ world.dir_vec), int(away @ world.right_vec)))
    return found


@pytest.mark.parametrize("level", ["GoToLocal", "ActionObjDoor", "UnlockLocal"])
def test_the_text_places_every_visible_object_where_the_grid_has_it(level):
    rng = random.Random(0)
    for seed in range(8):
        world, observation = world_of(level, seed)
        for _ in range(6):
            text = as_text(observation)
            assert text.startswith(f"Mission: {observation['mission']}.")
            assert objects_in_text(text) == objects_in_grid(world)
            observation, *_ = world.step(rng.choice((0, 1, 2)))


def test_walls_and_what_is_carried_are_in_the_text():
    world, observation = world_of("GoToObj", 3)
    text = as_text(observation)
    forward = re.search(r"a wall (\d+) steps? forward", text)
    if forward is not None:
        ahead = world.agent_pos + int(forward[1]) * world.dir_vec
        assert world.grid.get(*ahead).type == "wall"
    world, _ = world_of("PutNextS5N2Carrying", 0)
    observation, *_ = world.step(0)
    carried = world.carrying
    assert f"You carry a {carried.color} {carried.type}." in as_text(observation)


@pytest.mark.parametrize("level", ["GoToObj", "PickupLoc"])
async def test_the_bot_solves_a_level_through_the_episode_loop(level):
    env = make(f"BabyAI-{level}-v0")
    for task in env.tasks("test")[:4]:
        episode = await play(make(env.id), ScriptedAgent(env.expert(task)), task)
        assert (episode.ending, episode.total_of()) == ("completed", 1.0)


@pytest.mark.full
@pytest.mark.parametrize("level", LEVELS)
async def test_the_bot_solves_each_level(level):
    env = make(f"BabyAI-{level}-v0")
    for task in env.tasks("test")[:100]:
        episode = await play(make(env.id), ScriptedAgent(env.expert(task)), task)
        assert (episode.ending, episode.total_of()) == ("completed", 1.0), task.id


async def test_a_success_is_worth_one_at_the_last_step_and_time_out_nothing():
    env = make("BabyAI-GoToObj-v0")
    task = env.tasks("test")[0]
    moves = [action async for action in actions(env, task)]
    late = env.limits.max_turns - len(moves)
    episode = await play(make(env.id), ScriptedAgent(script([*["done"] * late, *moves])), task)
    assert (len(episode.turns), episode.total_of()) == (env.limits.max_turns, 1.0)
    episode = await play(make(env.id), ScriptedAgent(script([*["done"] * (late + 1), *moves])), task)
    assert (episode.ending, episode.total_of()) == ("truncated", None)


async def actions(env, task):
    """The bot's actions."""
    episode = await play(make(env.id), ScriptedAgent(env.expert(task)), task)
    for turn in episode.turns:
        yield turn.action.tool_calls[0].arguments["action"]


def script(moves):
    for move in moves:
        yield call("act", action=move)


async def test_noise_is_the_share_of_demonstrated_actions_that_are_random():
    clean, noisy = (make("BabyAI-GoToObj-v0", noise=noise) for noise in (0.0, 1.0))
    tasks = clean.tasks("train")[:4]

    async def demonstrated(env, task):
        episode = await play(make(env.id), ScriptedAgent(env.demonstrator(task, random.Random(0))), task)
        return [turn.action.tool_calls[0].arguments["action"] for turn in episode.turns]

    assert await demonstrated(clean, tasks[0]) == [action async for action in actions(clean, tasks[0])]
    taken = {action for task in tasks for action in await demonstrated(noisy, task)}
    assert taken == {"left", "right", "forward"} < set(ACTIONS)


def test_levels_are_listed_without_minigrid_and_its_absence_is_one_sentence():
    assert len(matching("BabyAI-*")) == len(LEVELS)
    code = (
        "import sys\n"
        "sys.modules['minigrid'] = None\n"
        "import agentrl\n"
        "assert 'BabyAI-GoToObj-v0' in agentrl.env_ids()\n"
        "try:\n"
        "    agentrl.make('BabyAI-GoToObj-v0')\n"
        "except agentrl.UserError as error:\n"
        "    print(error)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.endswith("pip install 'agentrl[minigrid]'.\n")

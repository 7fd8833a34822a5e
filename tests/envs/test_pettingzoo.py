"""PettingZoo's own games, played through the adapter and directly."""

from __future__ import annotations

import importlib
import random
import re

import pytest

from agentrl import PettingZooEnv, ScriptedAgent, UserError, check_env, make, play, register, say
from agentrl.errors import MissingExtraError
from agentrl.types import Ending

GAMES = ("pettingzoo.classic.tictactoe_v3", "pettingzoo.classic.connect_four_v3", "pettingzoo.classic.rps_v2")


class Zoo(PettingZooEnv):
    """Any game, with observations as text."""

    def __init__(self, game, **kwargs):
        super().__init__(game, **kwargs)


def replayed(game, seed, actions):
    """The same actions in the game itself: total rewards by agent, and the observations before each turn."""
    aec = importlib.import_module(game).env()
    aec.reset(seed=seed)
    totals, observed = dict.fromkeys(aec.possible_agents, 0.0), []
    for agent in aec.agent_iter():
        observation, _, terminated, truncated, _ = aec.last()
        if terminated or truncated:
            aec.step(None)
            continue
        observed.append((agent, str(observation)))
        aec.step(actions.pop(0))
        for name, reward in aec.rewards.items():
            totals[name] += float(reward)
    return totals, observed


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("seed", range(5))
async def test_an_episode_is_the_game_itself(game, seed):
    env = Zoo(game)
    task = env.tasks("train")[seed]
    agents = {name: env.scripted(task, name, random.Random(f"{name}{seed}")) for name in env.possible_agents}
    episode = await play(env, agents, task)
    assert episode.ending in (Ending.COMPLETED, Ending.TRUNCATED)
    actions = [int(turn.action.text) for turn in episode.turns]
    totals, observed = replayed(game, seed, actions)
    assert {name: episode.total_of(name) for name in totals} == totals
    steps = [
        (turn.step, trajectory.agent, turn)
        for trajectory in episode.trajectories
        for turn in trajectory.turns
    ]
    mine = [(agent, turn.observation[-1].text) for _, agent, turn in sorted(steps, key=lambda step: step[0])]
    assert mine == observed


async def test_an_illegal_action_gets_a_sentence_and_costs_a_turn():
    env = make("TicTacToe-v0")

    def clumsy():
        text = yield say("9")
        assert "That is no legal action. Answer with one of: 0, 1, 2" in text
        yield say("4")
        yield say("4")
        while True:
            yield say("nothing")

    def other():
        for cell in ("0", "1", "2"):
            yield say(cell)

    agents = {"player_1": ScriptedAgent(clumsy()), "player_2": ScriptedAgent(other())}
    episode = await play(env, agents, env.tasks("test")[0])
    assert episode.ending is Ending.TRUNCATED
    assert (episode.counts["invalid_moves"], episode.step_rewards[-1]) == (8, None)
    assert len(episode.turns_of("player_1")) == env.limits.max_turns


async def test_a_game_is_rewarded_once_at_its_end_with_its_scaled_return():
    env = make("TicTacToe-v0")
    task = env.tasks("test")[0]
    first, second = iter("048"), iter("12")

    def scripted(cells):
        for cell in cells:
            yield say(cell)

    agents = {"player_1": ScriptedAgent(scripted(first)), "player_2": ScriptedAgent(scripted(second))}
    episode = await play(env, agents, task)
    assert episode.ending is Ending.COMPLETED
    assert episode.rewards_of("player_1") == (None, None, 1.0)
    assert episode.rewards_of("player_2") == (None, 0.0)
    first = episode.turns_of("player_2")[0].observation
    assert [message.text for message in first][1] == "O 3 6\n1 4 7\n2 5 8"


@pytest.mark.full
def test_exact_scores_are_those_of_the_literature_and_the_expert_passes_the_check():
    """Random play: the first wins .5849 of all games, the second .2881, .1270 are drawn."""
    env = make("TicTacToe-v0")
    assert env.chance_score_of("player_1") == pytest.approx(0.5849 + 0.1270 / 2, abs=1e-4)
    assert env.chance_score_of("player_2") == pytest.approx(0.2881 + 0.1270 / 2, abs=1e-4)
    assert 0.98 < env.expert_score_of("player_1") < 1.0
    checked = check_env("TicTacToe-v0", n=16)
    assert checked.ok, str(checked)


@pytest.mark.parametrize(
    ("game", "kwargs", "sentence"),
    [
        ("pettingzoo.classic.no_such_game", {}, "there is no game `pettingzoo.classic.no_such_game`"),
        ("pettingzoo.utils", {}, "has no `env"),
        ("pettingzoo.classic.tictactoe_v3", {"actions": ("a", "b")}, "has 9 actions from 0 on, got 2 names"),
    ],
)
def test_what_cannot_be_played_is_a_one_sentence_error(game, kwargs, sentence):
    with pytest.raises(UserError, match=sentence):
        _ = Zoo(game, **kwargs).possible_agents


def test_without_pettingzoo_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("agentrl.runtime.extras.find_spec", lambda module: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentrl\[pettingzoo\]'"):
        _ = make("TicTacToe-v0").possible_agents


def test_a_game_is_registered_in_one_line():
    register("Connect-v0", PettingZooEnv, game="pettingzoo.classic.connect_four_v3", returns=(-1.0, 1.0))
    env = make("Connect-v0")
    assert env.possible_agents == ("player_0", "player_1")


async def test_a_large_board_is_shown_whole():
    """Go's observation has 6,137 numbers; numpy writes some of its corners."""
    env = PettingZooEnv("pettingzoo.classic.go_v5")
    (observations, _) = await env.reset(env.tasks("train")[0], seed=0)
    ((agent, (message,)),) = observations.items()
    aec = importlib.import_module(env.game).env()
    aec.reset(seed=0)
    sizes = sum(array.size for array in aec.observe(agent).values())
    assert len(re.findall(r"True|False|\b[01]\b", message.text)) == sizes
    await env.close()

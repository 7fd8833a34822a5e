"""TextArena's games: each plays offline, is fixed by its seed, and pays nothing for an illegal move."""

from __future__ import annotations

import random
import socket

import pytest

from agentrl import Message, ScriptedAgent, UserError, make, play, say
from agentrl.envs.scoring import Scorer
from envs_contrib.textarena.env import TextArena
from envs_contrib.textarena.experts import EXPERTS
from envs_contrib.textarena.games import GAMES

QUICK = ("GuessTheNumber", "Mastermind", "Minesweeper", "2048", "Bandit")
games = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in GAMES]
)
MOVES = ["[1]", "[2 3]", "[left]", "[up]", "[1 2 3 4]", "[hit]", "[stand]", "[red]", "[continue]", "[A+]"]


def env_of(name):
    return make(f"TextArena-{name}-v0")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def refuse(*arguments, **named):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def some_moves(seed):
    rng = random.Random(seed)
    while True:
        yield say(rng.choice(MOVES))


@games
async def test_a_game_plays_and_its_seed_fixes_it_whatever_the_global_generator_does(name):
    texts = []
    for noise in (1, 2):
        env = env_of(name)
        task = env.tasks("train")[5]
        random.seed(noise)
        before = random.getstate()
        episode = await play(env, ScriptedAgent(some_moves(0)), task)
        assert episode.failure is None, episode.failure
        assert random.getstate() == before
        texts.append([turn.observation[-1].text for turn in episode.turns])
        assert all(len(text) < 20_000 for text in texts[-1])
    assert texts[0] == texts[1]
    assert texts[0][0]


@games
async def test_another_seed_is_another_game(name):
    firsts = set()
    for task in env_of(name).tasks("test")[:6]:
        env = env_of(name)
        observation, _ = await env.reset(task, seed=0)
        # Minesweeper lays its mines at the first move.
        await env.step(say("[2 3]"))
        firsts.add((observation[0].text, repr(env._game.state.game_state)))
    assert len(firsts) > 1


@games
@pytest.mark.parametrize(
    "move", ["", "nonsense", "[", "]" * 50, "9" * 5000, "[" + "9" * 1900 + "]", "\x00", "\ud800"]
)
async def test_an_illegal_move_pays_nothing_and_is_counted(name, move):
    env = env_of(name)
    env.limits = env.limits.__class__(max_turns=6, max_tokens=None)
    episode = await play(env, ScriptedAgent(say(move) for _ in range(6)), env.tasks("train")[0])
    assert episode.failure is None, episode.failure
    assert (episode.total_of() or 0.0) == 0.0
    assert episode.counts["invalid_moves"] == len(episode.turns)


@pytest.mark.parametrize("name", [name for name, game in GAMES.items() if game.name in EXPERTS])
async def test_the_expert_wins(name):
    for task in env_of(name).tasks("test")[:10]:
        env = env_of(name)
        episode = await play(env, ScriptedAgent(env.expert(task)), task)
        (verdict,) = await Scorer(env.rewards).judge([await Scorer(env.rewards).mark(episode)])
        assert (verdict.total, verdict.parts["solved"], verdict.parts["invalid_moves"]) == (1.0, 1.0, 0.0)


async def test_a_part_of_a_game_pays_only_where_it_may_and_never_after_illegal_moves():
    class Half:
        done = True
        error_count = 0

        def __init__(self, broke_rule):
            self.rewards = {0: 0.5}
            self.game_info = {0: {"invalid_move": broke_rule}}

    class Ended:
        def __init__(self, broke_rule):
            self.state = Half(broke_rule)

        def step(self, action):
            return True, {}

        def get_observation(self):
            return 0, [(-1, "over", None)]

    scores = {}
    for partial in (False, True):
        for broke_rule in (False, True):
            env = TextArena("Mastermind-v0", partial=partial)
            await env.reset(env.tasks("train")[0], seed=0)
            env._game = Ended(broke_rule)
            step = await env.step(Message("assistant", "[1]"))
            scores[partial, broke_rule] = step.reward
    assert scores == {(False, False): 0.0, (False, True): 0.0, (True, False): 0.5, (True, True): 0.0}


async def test_an_unknown_game_is_a_one_sentence_error_and_others_have_no_expert():
    env = TextArena("Ches-v9")
    with pytest.raises(UserError, match="TextArena has no game `Ches-v9`"):
        await env.reset(env.tasks("train")[0], seed=0)
    assert not env.has_expert
    with pytest.raises(UserError, match="has no expert"):
        env.expert(env.tasks("train")[0])

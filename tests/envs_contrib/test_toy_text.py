"""The toy texts: exact scores, experts that reach them, and worlds that are Gymnasium's own."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from functools import cache

import gymnasium
import pytest

from agentrl import ScriptedAgent, call, make, play, say
from agentrl.types import Ending
from envs_contrib.toy_text import Blackjack, CliffWalking, FrozenLake, Taxi
from envs_contrib.toy_text.planner import best_actions

GRIDS = {FrozenLake: (0.0, 1.0), CliffWalking: (-50.0, -13.0), Taxi: (-20.0, 20.0)}
ALL = [*GRIDS, Blackjack]
DECK = [*range(1, 10), 10, 10, 10, 10]


def outcomes(table, state, chances):
    """(probability, next state, reward, whether it ends) of one turn."""
    for action, chance in chances.items():
        for likely, *outcome in table[state][action]:
            yield chance * likely, *outcome


def expected(env, bounds, action_chances):
    """The mean scaled return, by propagating the distribution over (state, return) turn by turn."""
    world = gymnasium.make(env.gym_id).unwrapped
    worst, best = bounds
    now = {(state, 0.0): float(p) for state, p in enumerate(world.initial_state_distrib) if p}
    paid = 0.0
    for _ in range(env.limits.max_turns):
        after = defaultdict(float)
        for (state, gone), p in now.items():
            for likely, to, reward, ends in outcomes(world.P, state, action_chances(state)):
                total = gone + reward
                paid += ends * p * likely * min(1.0, max(0.0, (total - worst) / (best - worst)))
                after[to, total] += (not ends) * p * likely
        # Taxi can regain 20, and no world more.
        now = {(state, gone): p for (state, gone), p in after.items() if p and gone > worst - 20}
    return paid


@pytest.mark.parametrize("env_class", GRIDS)
def test_the_declared_scores_of_a_grid_are_the_exact_ones(env_class):
    env = env_class()
    planned = best_actions(env.gym_id)
    number = len(env.tool_schemas[0].parameters["properties"]["action"]["enum"])
    expert = expected(env, GRIDS[env_class], lambda state: {planned[state]: 1.0})
    chance = expected(env, GRIDS[env_class], lambda state: dict.fromkeys(range(number), 1 / number))
    assert env.expert_score == pytest.approx(expert, abs=5e-4)
    assert env.chance_score == pytest.approx(chance, abs=5e-4)


def total_of(hand):
    """(best sum, usable ace) of (sum with aces as 1, any ace)."""
    low, ace = hand
    return (low + 10, 1) if ace and low + 10 <= 21 else (low, 0)


@cache
def dealers(hand):
    """The distribution over the dealer's final sum; 0 = bust."""
    total, _ = total_of(hand)
    if total >= 17:
        return {total if total <= 21 else 0: 1.0}
    ends = defaultdict(float)
    for card in DECK:
        for end, p in dealers((hand[0] + card, hand[1] or card == 1)).items():
            ends[end] += p / len(DECK)
    return dict(ends)


def worth(stick_chance):
    """The mean scaled return of a policy: the chance that it sticks at (sum, dealer's card, usable ace)."""

    def stuck(hand, upcard, natural):
        share = 0.0
        for hidden in DECK:
            dealer_natural = sorted((upcard, hidden)) == [1, 10]
            mine = total_of(hand)[0]
            for end, p in dealers((upcard + hidden, 1 in (upcard, hidden))).items():
                won = 1.0 if mine > end else 0.5 if mine == end else 0.0
                share += p * (1.0 if natural and not dealer_natural else won) / len(DECK)
        return share

    @cache
    def value(hand, upcard, natural):
        total, usable = total_of(hand)
        if total > 21:
            return 0.0
        sticks = stick_chance(total, upcard, usable)
        hits = sum(value((hand[0] + card, hand[1] or card == 1), upcard, False) for card in DECK) / len(DECK)
        return sticks * stuck(hand, upcard, natural) + (1 - sticks) * hits

    deals = [(a, b, upcard) for a in DECK for b in DECK for upcard in DECK]
    return statistics.fmean(
        value((a + b, 1 in (a, b)), upcard, sorted((a, b)) == [1, 10]) for a, b, upcard in deals
    )


def test_the_declared_scores_of_blackjack_are_the_exact_ones():
    env = Blackjack()
    expert = worth(lambda *observation: float(env.policy(observation) == 0))
    assert env.expert_score == pytest.approx(expert, abs=5e-4)
    assert env.chance_score == pytest.approx(worth(lambda *observation: 0.5), abs=5e-4)
    assert expert > worth(lambda total, upcard, usable: float(total >= 17))
    assert expert > worth(lambda total, upcard, usable: float(total >= 20))


@pytest.mark.parametrize(
    ("env_class", "number"), [(FrozenLake, 300), (CliffWalking, 3), (Taxi, 100), (Blackjack, 500)]
)
async def test_the_expert_reaches_the_declared_score_through_the_episode_loop(env_class, number):
    scores = []
    for task in env_class().tasks("test")[:number]:
        env = env_class()
        episode = await play(env, ScriptedAgent(env.expert(task)), task)
        assert episode.ending in (Ending.COMPLETED, Ending.TRUNCATED)
        assert set(episode.counts) == {"tool_calls"}
        scores.append(sum(reward or 0.0 for reward in episode.step_rewards))
    spread = statistics.stdev(scores) / math.sqrt(number)
    assert statistics.fmean(scores) == pytest.approx(env_class.expert_score, abs=4 * spread + 1e-3)


@pytest.mark.parametrize("env_class", ALL)
async def test_stopping_early_is_worth_nothing(env_class):
    env = env_class()
    task = env.tasks("train")[0]
    episode = await play(env, ScriptedAgent(quitting()), task)
    assert episode.ending is Ending.TRUNCATED
    assert sum(reward or 0.0 for reward in episode.step_rewards) == 0.0
    assert episode.counts["invalid_moves"] == env.limits.max_turns


def quitting():
    while True:
        yield say("I win")


@pytest.mark.parametrize("env_class", GRIDS)
async def test_a_task_is_gymnasiums_own_world_of_that_seed(env_class):
    env = env_class()
    task = env.tasks("train")[5]
    theirs = gymnasium.make(env.gym_id)
    observation, _ = theirs.reset(seed=task.metadata["seed"])
    first, _ = await env.reset(task, seed=99)
    assert first[0].content.endswith(env._describe(observation))
    names = env.tool_schemas[0].parameters["properties"]["action"]["enum"]
    for action in [0, 1, 2, 3, 1, 0]:
        step = await env.step(call("act", action=names[action]))
        observation, _, terminated, truncated, _ = theirs.step(action)
        assert step.observation[0].content == env._describe(observation)
        assert (step.terminated, step.truncated) == (terminated, truncated)
        if terminated:
            break
    await env.close()


def test_the_descriptions_have_the_positions():
    lake, cliff, taxi, table = (env_class() for env_class in ALL)
    assert lake._describe(14) == "You stand on F at row 3, column 2."
    assert cliff._describe(36) == "You stand at row 3, column 0."
    town = gymnasium.make("Taxi-v4").unwrapped
    assert taxi._describe(town.encode(2, 3, 1, 2)) == (
        "The taxi is at row 2, column 3. "
        "The passenger waits at green (0, 4) and wants to go to yellow (4, 0)."
    )
    assert "The passenger is in the taxi and wants to go to red" in taxi._describe(town.encode(0, 0, 4, 0))
    assert table._describe((18, 1, 1)) == "Your cards sum to 18, with a usable ace. The dealer shows an ace."


@pytest.mark.parametrize("env_class", ALL)
def test_no_seed_is_in_two_splits_and_every_world_is_registered(env_class):
    env = make(f"{env_class.__name__}-v0")
    seeds = {split: {task.metadata["seed"] for task in env.tasks(split)} for split in env.splits}
    assert len(seeds["train"]) == 2000
    assert len(seeds["test"]) == 500
    assert not seeds["train"] & seeds["test"]

"""Several agents in one episode: their turns, their observations, and the turn that a reward belongs to."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import JointStep, Limits, Message, MultiAgentEnv, ScriptedAgent, Task, UserError, make, play, say
from agentrl.algorithms.samples import samples_of
from agentrl.envs import AgentView, Scorer
from agentrl.envs.opponents import agents_of, check_opponents, scripted
from agentrl.envs.play import Frozen
from agentrl.types import Ending, Finish, History, Restart, TurnTokens
from agentrl.types.seams import Act
from tests.worlds import completion

TASK = Task.ask("t", "Begin.")
A, B = "ann", "bob"


class Schedule(MultiAgentEnv):
    """Agents act by a schedule; every step has its number as observation, and configured rewards."""

    possible_agents = (A, B)
    limits = Limits(max_turns=50, max_tokens=1000)

    def __init__(self, schedule, rewards=()):
        super().__init__()
        self.schedule, self.rewards_of_steps = list(schedule), list(rewards)
        self.closed, self.actions = 0, []

    def tasks(self, split):
        return [TASK]

    async def reset(self, task, *, seed):
        self.number = 0
        self.acting = self.schedule[0]
        return dict.fromkeys(self.possible_agents, task.prompt), {}

    async def step(self, actions):
        assert set(actions) == set(self.schedule[self.number])
        self.actions.append({name: action.text for name, action in actions.items()})
        reward = self.rewards_of_steps[self.number] if self.rewards_of_steps else None
        self.number += 1
        if self.number == len(self.schedule):
            return JointStep.finished(reward)
        self.acting = self.schedule[self.number]
        observation = (Message("user", f"step {self.number}"),)
        return JointStep.going(dict.fromkeys(self.possible_agents, observation), reward)

    def opponent(self, task, agent, prompt, rng):
        text = prompt
        while True:
            text = yield say(f"{agent} heard {text!r}")

    async def close(self):
        self.closed += 1


class Sampled:
    """An agent with tokens: at turn k it samples k + 1 of them."""

    def __init__(self, name, finish=Finish.STOP):
        self.name, self.finish, self.turns, self.closed = name, finish, 0, 0

    async def act(self, observation, *, tools, session):
        self.turns += 1
        ids = [7] * len(observation)
        sampled = completion(range(self.turns), self.finish)
        return Act(
            say(f"{self.name} {self.turns}"),
            TurnTokens(sampled.token_ids[:0].copy() if not ids else completion(ids).token_ids, sampled),
        )

    async def close(self, session_id):
        self.closed += 1


def talkers():
    return {name: ScriptedAgent(echo(name)) for name in (A, B)}


def echo(name):
    text = ""
    while True:
        text = yield say(f"{name}: {text}")


TURNS = st.lists(st.sampled_from([(A,), (B,), (A, B)]), min_size=1, max_size=8)
REWARD = st.none() | st.floats(-2, 2)
REWARDS = REWARD | st.dictionaries(st.sampled_from([A, B]), REWARD)


@given(
    TURNS.flatmap(
        lambda turns: st.tuples(st.just(turns), st.lists(REWARDS, min_size=len(turns), max_size=len(turns)))
    )
)
def test_every_reward_is_due_to_one_turn_and_they_sum_to_the_total(drawn):
    schedule, rewards = drawn
    episode = asyncio.run(play(Schedule(schedule, rewards), talkers(), TASK))
    assert episode.ending is Ending.COMPLETED
    verdicts = asyncio.run(Scorer().judge([asyncio.run(Scorer().mark(episode))]))
    for agent, verdict in zip((A, B), verdicts, strict=True):
        own = [reward.get(agent) if isinstance(reward, dict) else reward for reward in rewards]
        steps = [k for k, acting in enumerate(schedule) if agent in acting]
        assert [turn.step for turn in episode.turns_of(agent)] == steps
        assert (verdict.agent, verdict.total) == (agent, pytest.approx(sum(x or 0 for x in own), abs=1e-9))
        # Computed by hand: a step's reward belongs to the agent's last turn up to it, or to its first.
        expected = [None] * len(steps)
        for k, reward in enumerate(own):
            if reward is not None and steps:
                place = max((n for n, step in enumerate(steps) if step <= k), default=0)
                expected[place] = (expected[place] or 0.0) + reward
        assert verdict.turn_rewards == tuple(x if x is None else pytest.approx(x, abs=1e-9) for x in expected)


async def test_an_agent_observes_everything_since_its_last_turn():
    env = Schedule([(A,), (A,), (B,), (A, B)])
    episode = await play(env, talkers(), TASK)
    observations = {
        name: [[m.text for m in turn.observation] for turn in episode.turns_of(name)] for name in (A, B)
    }
    assert observations == {
        A: [["Begin."], ["step 1"], ["step 2", "step 3"]],
        B: [["Begin.", "step 1", "step 2"], ["step 3"]],
    }
    assert [turn.step for turn in episode.turns] == [0, 1, 2, 3, 3]
    assert env.actions[3] == {A: "ann: step 2\nstep 3", B: "bob: step 3"}


async def test_agents_of_one_step_act_at_the_same_time():
    both = asyncio.Barrier(2)

    class Waits(ScriptedAgent):
        async def act(self, observation, *, tools, session):
            await both.wait()
            return await super().act(observation, tools=tools, session=session)

    episode = await asyncio.wait_for(
        play(Schedule([(A, B)] * 2), {name: Waits(echo(name)) for name in (A, B)}, TASK), 5
    )
    assert (episode.ending, len(episode.turns)) == (Ending.COMPLETED, 4)


async def test_what_a_frozen_agent_wrote_is_no_sample_and_each_agents_turns_are_counted_for_itself():
    agents = {A: Sampled(A), B: Frozen(Sampled(B))}
    episode = await play(Schedule([(A,), (B,), (A, B)]), agents, TASK, episode_id="e")
    (sample,) = samples_of(episode)
    assert sample.rollout_id == ("e", A)
    assert sample.turns[sample.loss_mask].tolist() == [0, 1, 1]
    assert (episode.frozen_agents, episode.trained_agents) == ((B,), (A,))
    assert [(item.agent, item.trainable) for item in episode.trajectories] == [(A, True), (B, False)]
    both = await play(Schedule([(A,), (B,), (A, B)]), {A: Sampled(A), B: Sampled(B)}, TASK)
    assert [item.rollout_id.agent for item in samples_of(both)] == [A, B]


async def test_a_history_replaces_the_observations_of_one_agent_only():
    class Compacting(Schedule):
        async def step(self, actions):
            step = await super().step(actions)
            if self.number == 1:
                anew = History((Message("user", "Anew."),), Restart.COMPACTED)
                return step._replace(observations={**step.observations, B: anew})
            return step

    episode = await play(Compacting([(A,), (A,), (B,)]), talkers(), TASK)
    (turn,) = episode.turns_of(B)
    assert isinstance(turn.observation, History)
    assert [message.text for message in turn.observation] == ["Anew.", "step 2"]
    assert [message.text for message in episode.turns_of(A)[1].observation] == ["step 1"]


async def test_a_turn_that_is_cut_off_ends_the_episode_and_the_world_never_sees_it():
    env = Schedule([(A, B)] * 3)
    agents = {A: Sampled(A), B: Sampled(B, Finish.LENGTH)}
    episode = await play(env, agents, TASK)
    assert (episode.ending, env.actions, env.closed) == (Ending.TRUNCATED, [], 1)
    assert [agent.closed for agent in agents.values()] == [1, 1]


async def test_turns_are_limited_for_each_agent():
    env = Schedule([(A,), (B,), (A,), (A,)])
    env.limits = Limits(max_turns=2)
    episode = await play(env, talkers(), TASK)
    assert (episode.ending, len(episode.turns_of(A)), len(episode.turns_of(B))) == (Ending.TRUNCATED, 2, 1)


@pytest.mark.parametrize(
    ("schedule", "rewards", "sentence"),
    [
        ([(A,), ()], (None, None), "no agent's turn"),
        ([(A,), (A,)], ({"eve": 1.0}, None), "no agent 'eve'"),
        ([(A,), (A,)], ({A: float("nan")}, None), "return a finite number"),
    ],
)
async def test_a_world_that_breaks_the_contract_has_failed(schedule, rewards, sentence):
    env = Schedule(schedule, rewards)
    episode = await play(env, talkers(), TASK)
    assert episode.ending is Ending.FAILED
    assert sentence in episode.failure.detail
    assert env.closed == 1


@pytest.mark.parametrize("cancelled", [False, True])
async def test_everybody_is_closed_whatever_happens(cancelled):
    class Stuck(Sampled):
        async def act(self, observation, *, tools, session):
            await asyncio.sleep(60)

    env = Schedule([(A, B)])
    agents = {A: Stuck(A), B: Stuck(B)}
    playing = asyncio.create_task(play(env, agents, TASK))
    await asyncio.sleep(0.01)
    if cancelled:
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    else:
        env.limits = Limits(episode_timeout_s=0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert (await play(Schedule([(A, B)]), talkers(), TASK)).ending is Ending.COMPLETED
    assert (env.closed, [agent.closed for agent in agents.values()]) == (1, [1, 1])


async def test_every_agent_needs_a_player():
    with pytest.raises(UserError, match="nobody plays bob"):
        await play(Schedule([(A,)]), {A: Sampled(A)}, TASK)
    with pytest.raises(UserError, match="has no agent `bop`"):
        AgentView(Schedule([(A,)]), "bop")
    with pytest.raises(UserError, match="has one agent"):
        check_opponents(make("Calculator-v0"), {"agent": "script"})
    with pytest.raises(UserError, match="play every agent"):
        check_opponents(Schedule([(A,)]), {A: "script", B: "script"})


@given(TURNS.filter(lambda turns: any(A in acting for acting in turns)), st.integers(0, 9))
def test_the_view_of_one_agent_is_the_complete_episode_with_scripted_others(schedule, seed):
    """Observations and rewards of the agent are the same in the complete episode and through its view."""
    rewards = [{A: float(k), B: -1.0} for k in range(len(schedule))]

    async def episodes():
        env = Schedule(schedule, rewards)
        agents = agents_of(env, TASK, lambda: ScriptedAgent(echo(A)), {B: scripted}, seed=seed)
        complete = await play(env, agents, TASK, seed=seed)
        view = await play(AgentView(Schedule(schedule, rewards), A), ScriptedAgent(echo(A)), TASK, seed=seed)
        return complete, view

    complete, view = asyncio.run(episodes())
    mine = complete.turns_of(A)
    assert [t.observation for t in view.turns] == [t.observation for t in mine]
    assert [t.action for t in view.turns] == [t.action for t in mine]
    assert view.step_rewards == complete.rewards_of(A)


def test_chance_of_an_opponent_is_its_own():
    env = make("RockPaperScissors-v0")
    task = env.tasks("train")[0]
    moves = [next(env.demonstrator(task, "player_1", "", random.Random(seed))).text for seed in range(30)]
    assert len(set(moves)) > 1

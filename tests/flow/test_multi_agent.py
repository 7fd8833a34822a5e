"""Several agents in a run: two roles of one model, self-play, and a frozen opponent that is never trained."""

from __future__ import annotations

import numpy as np
import pytest

import agentrl
from agentrl import ScriptedAgent, check_env, play
from agentrl.algorithms.group_relative import GroupRelative
from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.tokens import Tokens
from agentrl.errors import UserError
from agentrl.records import Outcome, read_journal, reconcile
from agentrl.types import Group, Scores
from tests.flow.runs import EPISODES_PER_STEP, TINY, metrics_of

ROLES = ("critic", "solver")
QUICK = {
    "warm_start_steps": 40,
    "warm_start_batch_size": 32,
    "warm_start_lr": 1e-2,
    "num_demonstrations": 256,
}
LEARNING = {
    **{"num_layers": 2, "ffn_hidden_size": 192, "lr": 1.5e-3, "num_rollout": 12},
    **{
        "warm_start_steps": 160,
        "warm_start_batch_size": 32,
        "warm_start_lr": 1e-2,
        "num_demonstrations": 2048,
    },
}


def run(env, folder, name, **settings):
    """A run of a tiny model in a contributed environment."""
    shape = () if "hf_checkpoint" not in settings else tuple(TINY)[:7]
    tiny = {key: value for key, value in TINY.items() if key not in shape}
    return agentrl.train(quiet=True, env=env, output_dir=str(folder), name=name, **{**tiny, **settings})


def entries_of(folder):
    """All entries of training, read back from the journal."""
    return [
        entry for path in sorted((folder / "trajectories").glob("step_*")) for entry in read_journal(path)
    ]


@pytest.fixture(scope="module")
def two_roles(tmp_path_factory):
    """One model that solves and judges, for two iterations."""
    folder = tmp_path_factory.mktemp("runs")
    return run("SolverCritic-v0", folder, "roles", num_rollout=2, eval_episodes=16, **QUICK)


@pytest.fixture(scope="module")
def against_a_script(two_roles, tmp_path_factory):
    """Two iterations of the solver, judged by the environment's own script."""
    warm = {"hf_checkpoint": str(two_roles.folder / "checkpoint-warm-start"), "eval_episodes": 16}
    opponents = {"critic": "script"}
    folder = tmp_path_factory.mktemp("runs")
    return run("SolverCritic-v0", folder, "frozen", num_rollout=2, opponents=opponents, **warm)


@pytest.mark.parametrize("env", ["RockPaperScissors-v0", "SolverCritic-v0"])
def test_the_contributed_games_pass_their_check_for_every_agent(env):
    checked = check_env(env, n=8)
    assert checked.ok, str(checked)
    agents = agentrl.make(env).possible_agents
    assert {name.split("/")[0] for name in checked.figures if "/" in name} == set(agents)


@pytest.mark.learning
def test_one_model_learns_two_roles(tmp_path):
    learned = run("SolverCritic-v0", tmp_path, "learned", **LEARNING)
    rows = [row for row in metrics_of(learned.folder) if "rollout/raw_reward" in row]
    for role in ROLES:
        first, *_, last = [row[f"rollout/raw_reward/{role}"] for row in rows]
        assert last > 0.85 > first, role
    report = learned.reports["after RL"]["sampled"]
    assert set(report.by) == {f"agent={role}" for role in ROLES}
    assert report.mean == pytest.approx(sum(report.by.values()) / 2)


def test_every_episode_is_in_the_journal_once_with_a_verdict_for_each_agent(two_roles):
    books = reconcile(two_roles.folder)
    assert books.problems == ()
    assert books.played == books.trained + sum(books.dropped.values()) == 2 * EPISODES_PER_STEP
    for entry in entries_of(two_roles.folder):
        assert [verdict.agent for verdict in entry.verdicts] == ["solver", "critic"]
        # A solver that is cut off leaves the critic without a turn.
        assert {trajectory.agent for trajectory in entry.episode.trajectories} >= {"solver"}
    assert any(len(entry.episode.trajectories) > 1 for entry in entries_of(two_roles.folder))


def test_advantages_are_taken_among_siblings_of_the_same_role(two_roles):
    """The journal's groups, credited again: each role has mean 0, and its own best is above its own worst."""
    first = [entry for entry in entries_of(two_roles.folder) if entry.episode.id.startswith("g0-")]
    episodes = tuple(entry.episode for entry in first)
    verdicts = tuple(verdict for entry in first for verdict in entry.verdicts)
    group = Group("g0", episodes[0].task, episodes[0].seed, episodes, verdicts)
    tokens = Tokens.of([sample for episode in episodes for sample in samples_of(episode)])
    scores = tokens.scores(Scores(tuple(sample.logprobs for sample in tokens.samples)))
    advantages_N = GroupRelative()([group], tokens, scores).advantages_N
    own = {id: advantages_N[tokens.rollout_index_N == k] for k, id in enumerate(tokens.rollout_ids)}
    for role in ROLES:
        mine = {id: values[0] for id, values in own.items() if id.agent == role}
        totals = {verdict.rollout_id: verdict.total for verdict in verdicts if verdict.agent == role}
        assert len(mine) == len(episodes)
        assert sum(mine.values()) == pytest.approx(0, abs=1e-9)
        ranked = sorted(mine, key=lambda id: totals[id])
        assert [mine[id] for id in ranked] == sorted(mine.values())


@pytest.mark.full
def test_a_frozen_opponent_is_scored_and_never_trained(against_a_script):
    entries = entries_of(against_a_script.folder)
    assert len(entries) == 2 * EPISODES_PER_STEP
    for entry in entries:
        episode = entry.episode
        assert (episode.trained_agents, episode.frozen_agents) == (("solver",), ("critic",))
        samples = samples_of(episode)
        assert [sample.rollout_id for sample in samples] == [(episode.id, "solver")]
        mine = [t.tokens.completion.token_ids for t in episode.turns_of("solver")]
        assert samples[0].token_ids[samples[0].loss_mask].tolist() == np.concatenate(mine).tolist()
        assert [verdict.agent for verdict in entry.verdicts] == ["solver", "critic"]
    trained = [entry for entry in entries if entry.outcome is Outcome.TRAINED]
    rewards = [
        row["rollout/raw_reward"]
        for row in metrics_of(against_a_script.folder)
        if "rollout/raw_reward" in row
    ]
    first = [entry.verdicts[0].total for entry in entries[:EPISODES_PER_STEP]]
    assert trained
    assert rewards[0] == pytest.approx(sum(first) / len(first))


@pytest.mark.full
def test_an_opponent_may_be_a_model_directory(two_roles, tmp_path):
    checkpoint = str(two_roles.folder / "checkpoint")
    settings = {"hf_checkpoint": checkpoint, "num_rollout": 1, "eval_episodes": 16}
    played = run("SolverCritic-v0", tmp_path, "model", opponents={"critic": checkpoint}, **settings)
    entries = entries_of(played.folder)
    assert all(entry.episode.frozen_agents == ("critic",) for entry in entries)
    judged = [t for e in entries for t in e.episode.turns_of("critic") if t.tokens is not None]
    assert len(judged) >= EPISODES_PER_STEP // 2
    assert {sample.rollout_id.agent for e in entries for sample in samples_of(e.episode)} == {"solver"}
    scored = agentrl.evaluate(
        "SolverCritic-v0", checkpoint, n=16, opponents={"critic": "script"}, quiet=True, max_slots=16
    )
    assert scored.n == 16
    assert "agent=critic" not in scored.by


@pytest.mark.full
@pytest.mark.parametrize(
    ("opponents", "sentence"),
    [
        ({"player_9": "script"}, "has no agent `player_9`"),
        ({"player_0": "script", "player_1": "script"}, "leave one out for the policy"),
        ({"player_1": "/no/such/folder"}, "neither `script`, nor an address"),
    ],
)
def test_opponents_that_cannot_play_are_one_sentence(tmp_path, opponents, sentence):
    with pytest.raises(UserError, match=sentence):
        run("RockPaperScissors-v0", tmp_path, "wrong", num_rollout=1, opponents=opponents)


async def test_self_play_is_zero_sum():
    env = agentrl.make("RockPaperScissors-v0")
    task = env.tasks("train")[0]
    script = {
        name: ScriptedAgent(lambda _, name=name: env.expert(task, name, "")) for name in env.possible_agents
    }
    episode = await play(env, script, task)
    assert sum(episode.total_of(name) for name in env.possible_agents) == pytest.approx(1.0)
    assert len(episode.turns) == 6

"""A planner calls as many searchers as it likes, and they are paid for what it achieves."""

from __future__ import annotations

from statistics import fmean

import pytest

from agentrl import JointStep, Limits, Message, MultiAgentEnv, Task, say
from agentrl.errors import UserError
from agentrl.records import read_journal, reconcile
from tests.flow.runs import EPISODES_PER_STEP, WARM, metrics_of, train

SEARCHERS = ("searcher_0", "searcher_1")
ROLES = {"hierarchy_roles": {"searcher_*": "searcher"}}
SHARED = {**ROLES, "hierarchy_reward_shares": {"searcher": {"planner": 1.0}}}


class Search(MultiAgentEnv):
    """The planner calls one searcher or both, who look left or right; only what is right is gold.

    Nobody but the planner has a reward.
    """

    possible_agents = ("planner", *SEARCHERS)
    limits = Limits(max_turns=1, max_tokens=64)

    def tasks(self, split):
        return [Task.ask(f"{split}{n}", f"One or two for {n}?") for n in range(8)]

    async def reset(self, task, *, seed):
        self.acting = ("planner",)
        return {"planner": task.prompt}, {}

    async def step(self, actions):
        if "planner" in actions:
            self.acting = SEARCHERS if actions["planner"].text == "two" else SEARCHERS[:1]
            return JointStep.going({name: (Message("user", "Where?"),) for name in self.acting})
        return JointStep.finished({"planner": fmean(a.text == "right" for a in actions.values())})

    def expert(self, task, agent, prompt):
        yield say("two" if agent == "planner" else "right")

    def demonstrator(self, task, agent, prompt, rng):
        choices = ("one", "two") if agent == "planner" else ("left", "left", "right")
        yield say(rng.choice(choices))

    def corpus(self):
        yield from (task.prompt[0].text for task in self.tasks("train"))
        yield from ("Where?", "one", "two", "left", "right")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return play(folder, "shared", num_rollout=2, scale_rewards="none", **SHARED)


def play(folder, name, **settings):
    shared = {"env": f"{__name__}:Search", "eval_episodes": 32, **WARM}
    return train("Bandit", folder, name, **{**shared, **settings})


def entries_of(folder):
    files = sorted((folder / "trajectories").glob("step_*"))
    return [entry for path in files for entry in read_journal(path)]


def test_the_journal_has_the_advantages_of_roles(run):
    """Loops over the rollouts of the journal: those of a group in one role, each paid by its own planner."""
    assert reconcile(run.folder).problems == ()
    groups = {}
    for entry in entries_of(run.folder):
        groups.setdefault(entry.episode.id.partition("-")[0], []).append(entry)
    numbers = set()
    for entries in groups.values():
        paid, planned = {}, {}
        for entry in entries:
            (outcome,) = (v.total for v in entry.verdicts if v.agent == "planner")
            called = {t.agent for t in entry.episode.trajectories} - {"planner"}
            numbers.add(len(called))
            planned[entry.episode.id] = outcome
            paid |= {(entry.episode.id, name): outcome for name in called}
        mean, of_planners = fmean(paid.values()), fmean(planned.values())
        for entry in entries:
            id = entry.episode.id
            for agent, values in (entry.advantages or {}).items():
                expected = planned[id] - of_planners if agent == "planner" else paid[id, agent] - mean
                assert values.tolist() == pytest.approx([expected] * len(values), abs=1e-6)
    # A planner that is cut off calls nobody.
    assert numbers >= {1, 2}
    assert any(entry.advantages for entry in entries_of(run.folder))
    assert len(entries_of(run.folder)) == 2 * EPISODES_PER_STEP


@pytest.mark.learning
def test_searchers_learn_from_the_planners_reward_and_not_without(tmp_path):
    steady = {"num_rollout": 14, "lr": 2e-3}
    found = {}
    for name, settings in (("shared", SHARED), ("alone", ROLES)):
        learned = play(tmp_path, name, **steady, **settings)
        rows = [row for row in metrics_of(learned.folder) if "rollout/raw_reward/planner" in row]
        found[name] = [row["rollout/raw_reward/planner"] for row in rows]
    assert found["shared"][0] < 0.5
    assert fmean(found["shared"][-3:]) > 0.85
    assert fmean(found["alone"][-3:]) < 0.6


def test_roles_that_nobody_has_are_named_before_anything_is_played(tmp_path):
    with pytest.raises(UserError, match="names boss, which no agent has as its role; name some of planner"):
        play(tmp_path, "x", hierarchy_reward_shares={"searcher_0": {"boss": 1.0}})
    assert not (tmp_path / "x" / "metrics.jsonl").exists()

"""An evaluation plays the requested number of episodes, each in an environment of its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from agentrl import GroupReward, Reward, Task, say
from agentrl.envs import Scorer
from agentrl.envs.opponents import policy_agents
from agentrl.errors import ConfigError, WorldBrokenError
from agentrl.evaluation.episodes import Evaluator, over_sets
from agentrl.evaluation.report import EvalSetting
from agentrl.types import Step
from tests.worlds import Hang, Speaker, Talk, raising

TASKS = [Task.ask(f"t{n}", "?") for n in range(3)]
SETTING = EvalSetting("Env-v0", "test", 1.0, None)


@dataclass
class Record:
    """The resets of all environments of an evaluation, and how many run. on_reset: gets their number."""

    failing: Collection[str] = ()
    log: list[tuple[str, int]] = field(default_factory=list)
    on_reset: Callable[[int], None] = lambda _: None
    running: int = 0
    max_running: int = 0


class Recorded(Talk):
    """Pays 1 for task t1; writes into the record."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    async def reset(self, task, *, seed):
        self.record.running += 1
        self.record.max_running = max(self.record.max_running, self.record.running)
        await asyncio.sleep(0)
        self.record.log.append((task.id, seed))
        self.record.on_reset(len(self.record.log))
        await asyncio.sleep(0.001)  # a signal that was sent arrives while this episode is in progress
        observation = await super().reset(task, seed=seed)
        if task.id in self.record.failing:
            raise RuntimeError("no world")
        self.answers = [Step.finished(reward=float(task.id == "t1"))]
        return observation

    async def close(self):
        self.record.running -= 1
        await super().close()


def evaluator(failing=(), agents=None, rewards=(), **options):
    record = Record(failing)
    agents = [] if agents is None else agents

    def agent():
        agents.append(Speaker(say("x")))
        return agents[-1]

    agents_of = policy_agents(agent, {})
    return Evaluator(lambda: Recorded(record), agents_of, Scorer(rewards), SETTING, **options), record


async def test_tasks_are_played_in_their_order_and_again_where_they_run_out():
    judge, _ = evaluator()
    evaluation = await judge.run(TASKS, 7, seed=0)
    assert [e.task.id for e in evaluation.episodes] == ["t0", "t1", "t2", "t0", "t1", "t2", "t0"]
    assert [e.id for e in evaluation.episodes] == [f"e{n}" for n in range(7)]
    assert [v.episode_id for v in evaluation.verdicts] == [e.id for e in evaluation.episodes]
    assert evaluation.report.n == 7
    assert evaluation.report.mean == pytest.approx(2 / 7)


async def test_episodes_have_distinct_seeds_that_depend_only_on_the_runs_seed():
    async def seeds(seed):
        agents = []
        judge, record = evaluator(agents=agents)
        await judge.run(TASKS, 6, seed=seed)
        return sorted(seed for _, seed in record.log), sorted(a.sessions[0].seed for a in agents)

    worlds, samples = await seeds(0)
    assert len(set(worlds)) == len(set(samples)) == 6
    assert await seeds(0) == (worlds, samples)
    other_worlds, other_samples = await seeds(1)
    assert not set(other_worlds) & set(worlds)
    assert not set(other_samples) & set(samples)


async def test_samples_of_a_prompt_share_its_world_and_the_first_is_that_of_a_single_one():
    single, several = [], []
    await evaluator(agents=single)[0].run(TASKS, 3, seed=0)
    judge, _ = evaluator(agents=several)
    evaluation = await judge.run(TASKS, 3, seed=0, samples=2)
    assert [e.id for e in evaluation.episodes] == ["e0", "e0-1", "e1", "e1-1", "e2", "e2-1"]
    assert [e.task.id for e in evaluation.episodes] == ["t0", "t0", "t1", "t1", "t2", "t2"]
    worlds = [episode.seed for episode in evaluation.episodes]
    assert worlds[::2] == worlds[1::2]
    assert len(set(worlds)) == 3
    seeds = [agent.sessions[0].seed for agent in several]
    assert len(set(seeds)) == 6
    assert seeds[::2] == [agent.sessions[0].seed for agent in single]
    assert (evaluation.report.samples, evaluation.report.pass_at) == (2, {"1": 1 / 3, "2": 1 / 3})


async def test_sets_of_prompts_have_ids_and_seeds_of_their_own_and_one_report_over_all():
    judge, _ = evaluator()
    sets = {name: await judge.run(TASKS[k:], 2, seed=0, prompts=name) for k, name in enumerate(("a", "b"))}
    assert [e.id for e in sets["b"].episodes] == ["b/e0", "b/e1"]
    assert {e.seed for e in sets["a"].episodes}.isdisjoint(e.seed for e in sets["b"].episodes)
    report = over_sets(sets)
    assert (report.n, report.mean) == (4, 0.5)
    assert [part.mean for part in report.sets.values()] == [0.5, 0.5]
    only = {"": await judge.run(TASKS, 3, seed=0)}
    assert over_sets(only) == only[""].report


@pytest.mark.parametrize("concurrency", [1, 2, 5])
async def test_at_most_concurrency_episodes_run_at_once(concurrency):
    judge, record = evaluator(concurrency=concurrency)
    await judge.run(TASKS, 12, seed=0)
    assert record.max_running == concurrency
    assert record.running == 0


async def test_a_failed_episode_is_recorded_and_not_scored():
    judge, _ = evaluator(failing={"t2"})
    evaluation = await judge.run(TASKS, 6, seed=0)
    assert (evaluation.report.n, evaluation.report.mean) == (4, 0.5)
    assert evaluation.report.failures == {"reset_error": 2}
    assert len(evaluation.episodes) == 6
    assert len(evaluation.verdicts) == 4


async def test_rewards_are_part_of_the_score_and_a_broken_one_is_a_failure():
    def length(episode):
        return 10.0 / (episode.task.id != "t2")

    judge, _ = evaluator(rewards=[Reward(length, weight=0.5)])
    evaluation = await judge.run(TASKS, 6, seed=0)
    assert (evaluation.report.n, evaluation.report.mean) == (4, 5.5)
    assert evaluation.report.parts == {"env": 0.5, "length": 10.0}
    assert evaluation.report.failures == {"reward_error": 2}
    assert [e.ending.value for e in evaluation.episodes] == ["completed", "completed", "failed"] * 2


async def test_an_episode_played_once_is_a_group_of_one():
    judge, _ = evaluator(rewards=[GroupReward(lambda siblings: [len(siblings)] * len(siblings), name="size")])
    assert (await judge.run(TASKS, 6, seed=0)).report.parts["size"] == 1.0


async def test_when_every_episode_fails_an_error_contains_the_cause():
    judge, _ = evaluator(failing={"t0", "t1", "t2"})
    with pytest.raises(WorldBrokenError) as caught:
        await judge.run(TASKS, 4, seed=0)
    assert re.fullmatch(
        r"Env-v0: all 4 episodes failed \(first: reset failed: RuntimeError: no world "
        r"\(test_episodes.py, line \d+\)\); mend the environment\.",
        str(caught.value),
    )


async def test_a_split_without_tasks_is_refused():
    judge, _ = evaluator()
    with pytest.raises(ConfigError, match="Env-v0 has no tasks in split `test`"):
        await judge.run([], 4, seed=0)


async def test_progress_is_called_once_for_every_episode():
    calls = []
    judge, _ = evaluator(failing={"t0"}, progress=calls.append)
    await judge.run(TASKS, 5, seed=0)
    assert calls == [1] * 5


async def test_cancelling_closes_every_world():
    hang = Hang()
    envs = []

    def make():
        envs.append(Talk({"step": hang}))
        return envs[-1]

    judge = Evaluator(make, policy_agents(Speaker, {}), Scorer(), SETTING, concurrency=3)
    running = asyncio.create_task(judge.run(TASKS, 6, seed=0))
    await hang.entered.wait()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert envs
    assert all(env.closed == 1 for env in envs)


async def test_an_error_of_the_user_is_raised_as_it_is():
    def make():
        return Talk({"reset": raising(ConfigError("set the key"))})

    with pytest.raises(ConfigError, match="set the key"):
        await Evaluator(make, policy_agents(Speaker, {}), Scorer(), SETTING).run(TASKS, 3, seed=0)

"""An evaluation plays every episode it was asked for, each in a world of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from agentrl import GroupReward, Reward, Task, say
from agentrl.envs import Scorer
from agentrl.errors import ConfigError, WorldBrokenError
from agentrl.evaluation.episodes import Evaluator
from agentrl.evaluation.report import EvalSetting
from agentrl.types import Step
from tests.worlds import Hang, Speaker, Talk, raising

TASKS = [Task.ask(f"t{n}", "?") for n in range(3)]
SETTING = EvalSetting("Env-v0", "test", 1.0, None)


@dataclass
class Book:
    """What all worlds of an evaluation did."""

    failing: Collection[str] = ()
    log: list[tuple[str, int]] = field(default_factory=list)
    running: int = 0
    most: int = 0


class Seen(Talk):
    """Is worth 1 for task t1; keeps the book."""

    def __init__(self, book: Book) -> None:
        super().__init__()
        self.book = book

    async def reset(self, task, *, seed):
        self.book.running += 1
        self.book.most = max(self.book.most, self.book.running)
        await asyncio.sleep(0)
        self.book.log.append((task.id, seed))
        shown = await super().reset(task, seed=seed)
        if task.id in self.book.failing:
            raise RuntimeError("no world")
        self.answers = [Step.finished(reward=float(task.id == "t1"))]
        return shown

    async def close(self):
        self.book.running -= 1
        await super().close()


def evaluator(failing=(), agents=None, rewards=(), **options):
    book = Book(failing)
    agents = [] if agents is None else agents

    def agent():
        agents.append(Speaker(say("x")))
        return agents[-1]

    return Evaluator(lambda: Seen(book), agent, Scorer(rewards), SETTING, **options), book


async def test_tasks_are_played_in_their_order_and_again_where_they_run_out():
    judge, _ = evaluator()
    found = await judge.run(TASKS, 7, seed=0)
    assert [e.task.id for e in found.episodes] == ["t0", "t1", "t2", "t0", "t1", "t2", "t0"]
    assert [e.id for e in found.episodes] == [f"e{n}" for n in range(7)]
    assert [v.episode_id for v in found.verdicts] == [e.id for e in found.episodes]
    assert found.report.n == 7
    assert found.report.mean == pytest.approx(2 / 7)


async def test_every_episode_has_a_world_and_samples_of_its_own_and_the_seed_alone_decides():
    async def seeds(seed):
        agents = []
        judge, book = evaluator(agents=agents)
        await judge.run(TASKS, 6, seed=seed)
        return sorted(seed for _, seed in book.log), sorted(a.sessions[0].seed for a in agents)

    worlds, samples = await seeds(0)
    assert len(set(worlds)) == len(set(samples)) == 6
    assert await seeds(0) == (worlds, samples)
    other_worlds, other_samples = await seeds(1)
    assert not set(other_worlds) & set(worlds)
    assert not set(other_samples) & set(samples)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
async def test_no_more_than_so_many_worlds_live_at_once(concurrency):
    judge, book = evaluator(concurrency=concurrency)
    await judge.run(TASKS, 12, seed=0)
    assert book.most == concurrency
    assert book.running == 0


async def test_a_failed_episode_is_kept_and_scored_by_nobody():
    judge, _ = evaluator(failing={"t2"})
    found = await judge.run(TASKS, 6, seed=0)
    assert (found.report.n, found.report.mean) == (4, 0.5)
    assert found.report.failures == {"reset_error": 2}
    assert len(found.episodes) == 6
    assert len(found.verdicts) == 4


async def test_rewards_are_part_of_the_score_and_a_broken_one_is_a_failure():
    def length(episode):
        return 10.0 / (episode.task.id != "t2")

    judge, _ = evaluator(rewards=[Reward(length, weight=0.5)])
    found = await judge.run(TASKS, 6, seed=0)
    assert (found.report.n, found.report.mean) == (4, 5.5)
    assert found.report.parts == {"env": 0.5, "length": 10.0}
    assert found.report.failures == {"reward_error": 2}
    assert [e.ending.value for e in found.episodes] == ["completed", "completed", "failed"] * 2


async def test_an_episode_played_once_is_a_group_of_one():
    judge, _ = evaluator(rewards=[GroupReward(lambda siblings: [len(siblings)] * len(siblings), name="size")])
    assert (await judge.run(TASKS, 6, seed=0)).report.parts["size"] == 1.0


async def test_when_everything_fails_one_sentence_tells_why():
    judge, _ = evaluator(failing={"t0", "t1", "t2"})
    with pytest.raises(WorldBrokenError) as caught:
        await judge.run(TASKS, 4, seed=0)
    assert str(caught.value) == (
        "Env-v0: all 4 episodes failed (first: reset failed: RuntimeError: no world); mend the environment."
    )


async def test_a_split_without_tasks_is_refused():
    judge, _ = evaluator()
    with pytest.raises(ConfigError, match="Env-v0 has no tasks in split `test`"):
        await judge.run([], 4, seed=0)


async def test_progress_is_told_once_for_every_episode():
    told = []
    judge, _ = evaluator(failing={"t0"}, progress=told.append)
    await judge.run(TASKS, 5, seed=0)
    assert told == [1] * 5


async def test_cancelling_closes_every_world():
    hang = Hang()
    envs = []

    def make():
        envs.append(Talk({"step": hang}))
        return envs[-1]

    judge = Evaluator(make, Speaker, Scorer(), SETTING, concurrency=3)
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
        await Evaluator(make, Speaker, Scorer(), SETTING).run(TASKS, 3, seed=0)

"""The benchmark of the episode loop runs both sides over the same episodes."""

from __future__ import annotations

import pytest

from benchmarks.envs import EpisodeWorkload, Instant, Waiting, bench_envs


@pytest.mark.full
def test_both_sides_play_every_episode_and_waiting_is_concurrent() -> None:
    num_made = {"instant": 0, "waiting": 0}
    open_envs: set[int] = set()
    num_open: list[int] = []

    class CountingOpen(Waiting):
        async def reset(self, task, *, seed):
            open_envs.add(id(self))
            num_open.append(len(open_envs))
            return await super().reset(task, seed=seed)

        async def close(self):
            open_envs.discard(id(self))

    def counted(name, env_class):
        num_made[name] += 1
        return env_class()

    workloads = (
        EpisodeWorkload("instant", lambda: counted("instant", Instant), 20),
        EpisodeWorkload("waiting", lambda: counted("waiting", CountingOpen), 4, "sequential"),
    )
    result = bench_envs(workloads=workloads, repeats=2)
    # One warm-up run and two measured ones, on both sides.
    assert num_made == {"instant": 20 * 3 * 2, "waiting": 4 * 3 * 2}
    assert sorted(num_open) == sorted([1, 2, 3, 4] * 3 + [1] * 4 * 3)
    assert [len(row["sides"]["play"]["episodes_per_s"]) for row in result["rows"]] == [2, 2]
    assert set(result["summary"]) == {"instant", "waiting"}
    assert result["settings"]["workloads"][0] == {"name": "instant", "episodes": 20, "baseline": "minimal"}

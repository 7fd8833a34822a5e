"""The benchmark of the episode loop runs both sides over the same episodes."""

from __future__ import annotations

from benchmarks.worlds import Instant, Waiting, Workload, bench_envs


def test_both_sides_play_every_episode_and_waiting_is_done_at_once() -> None:
    made = {"instant": 0, "waiting": 0}
    open_now: set[int] = set()
    most_open: list[int] = []

    class Watched(Waiting):
        async def reset(self, task, *, seed):
            open_now.add(id(self))
            most_open.append(len(open_now))
            return await super().reset(task, seed=seed)

        async def close(self):
            open_now.discard(id(self))

    def counted(name, world):
        made[name] += 1
        return world()

    workloads = (
        Workload("instant", lambda: counted("instant", Instant), 20),
        Workload("waiting", lambda: counted("waiting", Watched), 4, "after"),
    )
    result = bench_envs(workloads=workloads, repeats=2)
    # One round of warm-up and two that count, on both sides.
    assert made == {"instant": 20 * 3 * 2, "waiting": 4 * 3 * 2}
    assert sorted(most_open) == sorted([1, 2, 3, 4] * 3 + [1] * 4 * 3)
    assert [len(row["sides"]["play"]["episodes_per_s"]) for row in result["rows"]] == [2, 2]
    assert set(result["summary"]) == {"instant", "waiting"}
    assert result["settings"]["workloads"][0] == {"name": "instant", "episodes": 20, "baseline": "bare"}

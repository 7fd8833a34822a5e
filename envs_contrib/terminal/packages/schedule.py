"""The order of jobs that depend on each other, and how long they take."""

from __future__ import annotations


def order(jobs: dict[str, list[str]]) -> list[str]:
    """The jobs in an order in which each comes after all that it needs; of several, the first by name.

    jobs: by name, the names of the jobs that each needs.

    Raises:
        ValueError: jobs need each other in a circle.
    """
    waiting = {job: set(needed) for job, needed in jobs.items()}
    for needed in jobs.values():
        for job in needed:
            waiting.setdefault(job, set())
    done: list[str] = []
    while waiting:
        ready = sorted(job for job, needed in waiting.items() if needed <= set(done))
        if not ready:
            raise ValueError("a circle of jobs")
        done.append(ready[0])
        del waiting[ready[0]]
    return done


def finish_times(jobs: dict[str, list[str]], hours: dict[str, int]) -> dict[str, int]:
    """When each job ends, where all that are ready run at the same time. A job without hours takes one."""
    ends: dict[str, int] = {}
    for job in order(jobs):
        start = max((ends[needed] for needed in jobs.get(job, [])), default=0)
        ends[job] = start + hours.get(job, 1)
    return ends


def total(jobs: dict[str, list[str]], hours: dict[str, int]) -> int:
    """When the last job ends; 0 without jobs."""
    return max(finish_times(jobs, hours).values(), default=0)


def blocked_by(jobs: dict[str, list[str]], job: str) -> list[str]:
    """The jobs that need a job, at once or through others, by name."""
    found: set[str] = set()
    frontier = {job}
    while frontier:
        frontier = {name for name, needed in jobs.items() if frontier & set(needed)} - found
        found |= frontier
    return sorted(found)

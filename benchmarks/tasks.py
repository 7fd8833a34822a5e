"""How long the machine of a task takes to start: from reset to the end of a first command, `true`."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import cast

from agentrl.envs import Env, ToolEnv, find
from agentrl.envs.harbor import HarborTasks
from agentrl.tools import release_shared
from agentrl.types import JSON, Task, call
from benchmarks.machine import machine

STARTS = 200
_DOCKERFILE = """FROM python:3.11-slim
WORKDIR /app
COPY . /app/
RUN apt-get update && apt-get install -y git
RUN git init -q . && git add -A && mkdir out
"""
_TEST = "#!/bin/bash\n[ -f /app/out/done ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
_FILES: Mapping[str, str] = {
    "task.toml": "[verifier]\ntimeout_sec = 30.0\n",
    "instruction.md": "Make /app/out/done.",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "tests/test.sh": _TEST,
}
_WITH_FILES: Mapping[str, str] = {
    **_FILES,
    "environment/Dockerfile": _DOCKERFILE,
    **{f"environment/src/module_{number}.py": "x = 1\n" * 200 for number in range(40)},
}


def bench_tasks(*, starts: int = STARTS) -> dict[str, JSON]:
    """Milliseconds of a start, one after the other, in a sandbox that is warm; and of the first one.

    Returns:
        summary: one line for each kind of tasks. rows: medians, 95th percentiles and extremes (ms).
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(_rows(Path(folder), starts))
    summary: dict[str, JSON] = {str(row["name"]): row["line"] for row in rows}
    settings: dict[str, JSON] = {"starts": starts, "machine": machine()}
    return {"summary": summary, "rows": list(rows), "settings": settings}


async def _rows(folder: Path, starts: int) -> list[dict[str, JSON]]:
    kinds = {
        "Terminal-v0": _shipped("Terminal-v0"),
        "Repositories-v0, with a history": _shipped("Repositories-v0"),
        "Harbor's format, an empty folder": _written(folder / "empty", _FILES),
        "Harbor's format, 41 files and a repository": _written(folder / "files", _WITH_FILES),
    }
    try:
        return [await _row(name, env, starts) for name, env in kinds.items()]
    finally:
        await release_shared()


def _shipped(id: str) -> ToolEnv:
    return cast(ToolEnv, cast(Env, find(id).make()))


def _written(folder: Path, files: Mapping[str, str]) -> ToolEnv:
    for name, text in files.items():
        place = folder / "task" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    return HarborTasks(str(folder), test_share=0.0)


async def _row(name: str, env: ToolEnv, starts: int) -> dict[str, JSON]:
    tasks = env.tasks("train")
    first = await _start_ms(env, tasks[0])
    times = sorted([await _start_ms(env, task) for task in _repeated(tasks, starts)])
    middle, late = median(times), quantiles(times, n=20)[-1]
    line = (
        f"{middle:.1f} ms (95% below {late:.1f}; {times[0]:.1f} to {times[-1]:.1f}); the first {first:.0f} ms"
    )
    figures: dict[str, JSON] = {
        "median_ms": middle,
        "p95_ms": late,
        "least_ms": times[0],
        "most_ms": times[-1],
    }
    return {"name": name, "line": line, "first_ms": first, **figures}


def _repeated(tasks: Sequence[Task], number: int) -> list[Task]:
    return [tasks[place % len(tasks)] for place in range(number)]


async def _start_ms(env: ToolEnv, task: Task) -> float:
    begun_s = time.perf_counter()
    await env.reset(task, seed=0)
    await env.step(call("shell", command="true"))
    taken_s = time.perf_counter() - begun_s
    await env.close()
    return taken_s * 1e3

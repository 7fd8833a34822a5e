"""Helpers for tests of the sandbox: run code, and list leftover processes and namespaces."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agentrl.tools import Tool, release_shared
from agentrl.tools.python import PythonTool
from tests.processes.pythons_own import is_pythons_own

QUICK = {"wall_s": 5.0, "cpu_s": 3.0, "memory_mb": 128, "files_mb": 8, "processes": 16}


@asynccontextmanager
async def python(**settings) -> AsyncIterator[Tool]:
    """The tool, in an episode of its own, in a sandbox of its own."""
    tool = PythonTool(**{"sandbox": "namespaces", **QUICK, **settings})
    try:
        async with tool.episode() as (tool_of_episode,):
            yield tool_of_episode
    finally:
        await release_shared()


async def result(code: str, **settings):
    """The result of a piece of code, in a sandbox of its own."""
    try:
        return await PythonTool(**{"sandbox": "namespaces", **QUICK, **settings}).run(code)
    finally:
        await release_shared()


def namespaces(pids: Iterable[int]) -> set[str]:
    """The namespaces that these processes are in."""
    links: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has just ended
            links |= {os.readlink(link) for link in Path(f"/proc/{pid}/ns").iterdir()}
    return links


def inhabitants(of: Collection[str]) -> set[tuple[int, str]]:
    """The processes of this machine that are in some of these namespaces: ids, and when they began.

    The kernel gives the number of a namespace that has ended to the next one, so it names none for long.
    """
    found: set[tuple[int, str]] = set()
    for process in Path("/proc").glob("[0-9]*"):
        if namespaces([int(process.name)]).intersection(of):
            with suppress(OSError):  # it has just ended
                began = (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
                found.add((int(process.name), began))
    return found


async def gone(before: set[int]) -> bool:
    """Whether only earlier processes and namespaces remain; the kernel needs a moment for an exit."""
    for _ in range(200):
        if not descendants() - before:
            return True
        await asyncio.sleep(0.01)
    return False


def descendants() -> set[int]:
    """Every living process below this one, by its id outside of all sandboxes."""
    return {pid for pid in _below(os.getpid()) if not is_pythons_own(pid)}


def _below(top: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    pids = {top}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids - {top}

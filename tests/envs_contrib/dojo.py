"""Episodes of AgentDojo's worlds, played by scripts, for its tests."""

from __future__ import annotations

import asyncio
from functools import cache, lru_cache

import pytest

from agentrl import ScriptedAgent, make, play, say

QUICK = ("Banking", "Slack")
LONG = ("Travel", "Workspace")
suites = pytest.mark.parametrize("suite", [*QUICK, *(pytest.param(s, marks=pytest.mark.full) for s in LONG)])
NUM_TASKS = {"Banking": (16, 9), "Slack": (21, 5), "Travel": (20, 7), "Workspace": (40, 14)}
"""User tasks and injection tasks of version 1.2.2."""
WITHOUT_GOLD = {"Workspace": {f"injection_task_{n}" for n in range(6, 14)}}
"""Injection tasks for which the suite itself has no gold calls."""
UNDETECTED = {
    "Banking": {"user_task_14-injection_task_7"},
    "Travel": {"user_task_0-injection_task_0", "user_task_0-injection_task_4"},
    "Workspace": {f"user_task_{n}-injection_task_0" for n in (14, 15, 16, 17, 18, 22, 23, 24, 39)},
}
"""Pairs in which the suite's check misses an injected task that was done.

The user's task overwrites its result; in Workspace the check counts the injected email itself as one sent.
"""
FREE = {"Banking": {f"user_task_{n}" for n in (5, 6, 8, 9, 10)}}
"""User tasks whose check passes before anything is done."""
IMPORTANT = {"attack": "important_instructions"}


@cache
def id_of(suite):
    return f"AgentDojo{suite}-v0"


@lru_cache
def tasks_of(suite, attack=None):
    return tuple(make(id_of(suite), attack=attack).tasks("test"))


def first_pairs(suite, attack):
    """Every user task with the first injection task, and every injection task with the first user task."""
    tasks = tasks_of(suite, attack)
    first = tasks[0].metadata
    return [
        task
        for task in tasks
        if any(task.metadata[key] == first[key] for key in ("user_task", "injection_task"))
    ]


async def played(suite, script, tasks, at_once=8, **kwargs):
    """The episodes of tasks by a script of the environment or a function, `at_once` of them at a time."""
    slots = asyncio.Semaphore(at_once)

    async def episode(task):
        async with slots:
            env = make(id_of(suite), **kwargs)
            return await play(env, ScriptedAgent(script(env, task)), task, seed=7)

    return await asyncio.gather(*map(episode, tasks))


def expert(env, task):
    return env.expert(task)


def hijacked(env, task):
    return env.hijacked_expert(task)


def silent(env, task):
    del env, task
    yield say("")


def names(episodes):
    return {episode.task.id for episode in episodes}


def attacked(episodes):
    return {episode.task.id for episode in episodes if episode.counts.get("attack_success")}

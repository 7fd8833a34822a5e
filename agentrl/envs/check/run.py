"""Runs the check: from an environment's id or class to a report."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentrl.envs.base import Env, tasks_of
from agentrl.envs.boundary import call_close
from agentrl.envs.check.arena import HELD, Arena, expert, outcome
from agentrl.envs.check.findings import Code, ProbeResult, error, findings_of
from agentrl.envs.check.package.folder import read_package
from agentrl.envs.check.policies import random_policy
from agentrl.envs.check.probes.cancel_probe import probe_cancelling
from agentrl.envs.check.probes.cost_probe import holding, latencies, probe_memory, slow
from agentrl.envs.check.probes.hint_probe import probe_hints
from agentrl.envs.check.probes.host_probe import connecting, connections, probe_host
from agentrl.envs.check.probes.leak_probe import probe_leaks, probe_tools
from agentrl.envs.check.probes.leaving_probe import probe_leaving
from agentrl.envs.check.probes.same_probe import probe_replay, probe_sameness
from agentrl.envs.check.probes.score_probe import has_expert, probe_chance, probe_expert
from agentrl.envs.check.probes.shared_probe import probe_release
from agentrl.envs.check.probes.state_probe import probe_states
from agentrl.envs.check.probes.task_probe import probe_tasks
from agentrl.envs.check.report import CheckReport
from agentrl.envs.check.subject import CheckedEnv, chosen, declared_by, named, seats, splits_of
from agentrl.envs.check.traces import own_temporary_folder, present
from agentrl.envs.multi_agent import AnyEnv, MultiAgentEnv
from agentrl.envs.play import play
from agentrl.envs.resuming import saves_state
from agentrl.errors import StageError, UserError
from agentrl.runtime.authorship import place_of
from agentrl.runtime.event_loop import blocking
from agentrl.runtime.interrupts import run_until_signal
from agentrl.runtime.stage import EnvCode, stage, summary_of
from agentrl.types import AGENT, JSON, Episode

Progress = Callable[[str], None]
_BROKEN: Mapping[str, Code] = {"make": "make-fails", "tasks": "tasks-fails", "close": "close-fails"}
"""By the stage that breaks where nothing can be played."""


def check_env(
    env: CheckedEnv,
    *,
    env_kwargs: Mapping[str, object] | None = None,
    n: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> CheckReport:
    """Check an environment: tasks, scores, cheats, sameness, costs, traces.

        check_env("HopSearch-v0")
        check_env(Maze, env_kwargs={"size": 5})
        check_env(lambda: Maze(size=5))

    It works where an event loop runs, too; `check_env_async` does not block that.

    env: its id or path, its class, or a function that makes an instance.
    env_kwargs: arguments of its class.
    n: tasks that the expert and random play are measured on; each adversary plays a quarter of them. Episodes
        that are lost are played again, and left in the middle of a turn, to compare the scores.
    seed: of all randomness of the check. progress: called with the name of each probe.

    Raises:
        UnknownEnvError: no environment of that name.
        UserError: n is below 1, the class lacks a method or does not take these arguments, or the function
            makes no new environment at each call.
    """
    check = partial(check_env_async, env, env_kwargs=env_kwargs, n=n, seed=seed, progress=progress)
    return blocking(lambda: run_until_signal(check()))


def check_package(
    folder: Path, *, n: int = 32, seed: int = 0, progress: Progress | None = None
) -> CheckReport:
    """Check a folder of OpenEnv: what its files say, and the environment of agentrl that it serves.

    A folder that `agentrl envs export` has written serves one, which openenv.yaml has to describe; of any
    other nothing is played.

    Raises:
        ConfigError: it is no such folder, or has a file that cannot be read.
        MissingExtraError: YAML's parser is not installed.
        UserError: as `check_env`.
    """
    package = read_package(folder)
    report = CheckReport(str(folder), seed, (), {}, package=package)
    if package.played is None:
        return report
    env_id, kwargs = package.played
    played = check_env(env_id, env_kwargs=kwargs, n=n, seed=seed, progress=progress)
    return replace(played, env_id=str(folder), package=package)


async def check_env_async(
    env: CheckedEnv,
    *,
    env_kwargs: Mapping[str, object] | None = None,
    n: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> CheckReport:
    """`check_env` for coroutines. It measures times: whatever else runs in the event loop counts.

    Raises:
        UnknownEnvError: no environment of that name.
        UserError: as `check_env`.
    """
    if n < 1:
        raise UserError(f"a check plays at least one task, got n = {n}; leave n out for the usual number.")
    name, make = named(env, env_kwargs or {})
    results: list[ProbeResult] = []
    seconds: defaultdict[str, float] = defaultdict(float)
    with own_temporary_folder() as folder, connections() as connected:
        before, began = present(folder), time.perf_counter()
        try:
            async for result in _until_broken(_probe_agents(make, n, seed, progress or _silent)):
                results.append(result)
                began, last = time.perf_counter(), began
                seconds[result.probe] += began - last
        finally:
            released = await probe_release(before, folder)
    # A leak of a single episode is still there at the end, and has been reported.
    if not any(finding.code.startswith("leaves-") for finding in findings_of(results)):
        results = [*results, released]
    # Of several agents the first one, which is the one that is served.
    declared = {
        name: value for result in reversed(results) for name, value in (result.declared or {}).items()
    }
    if declared:
        results.append(connecting(connected, declares_server=not declared["offline"]))
        seconds["network"] = 0.0
    figures = {name: number for result in results for name, number in (result.figures or {}).items()}
    findings = tuple(findings_of(results))
    tried = {name: took for name, took in seconds.items() if name}
    return CheckReport(name, seed, findings, figures, tried, declared)


def _silent(what: str) -> None:
    del what


async def _until_broken(probes: AsyncIterator[ProbeResult]) -> AsyncIterator[ProbeResult]:
    """The results of probes, up to one in which code of the environment breaks outside of an episode."""
    try:
        with EnvCode("the class", "outside of an episode", stage="class"):
            async for result in probes:
                yield result
    except StageError as broken:
        cause = broken.__cause__
        if broken.stage != "class" or cause is None:
            yield _broken(broken)
            return
        # Without a line of an author it is a fault of the check.
        if not (place := place_of(cause)):
            raise cause from None
        text = f"the class breaks outside of an episode: {summary_of(cause)} ({place}); mend it first."
        yield ProbeResult((error("class-fails", text),))


async def _probe_agents(
    make: Callable[[], AnyEnv], n: int, seed: int, progress: Progress
) -> AsyncIterator[ProbeResult]:
    """Run every probe; with several agents for each of them, while scripts play the others."""
    async with stage("make", None):
        example = make()
    views = seats(make, example)
    if not isinstance(example, MultiAgentEnv):
        async for result in _probe(views[AGENT], n, seed, progress):
            yield result
        return
    progress("stopping and going on")
    yield replace(await _probe_joint_states(make, seed), probe="state")
    for agent, view in views.items():
        async for result in _probe(view, n, seed, progress):
            yield _of_agent(agent, result)
    yield replace(await _probe_closing(example), probe="close")


async def _probe_joint_states(make: Callable[[], AnyEnv], seed: int) -> ProbeResult:
    """Resume an episode of the environment's scripts."""
    try:
        async with stage("tasks", None):
            env = make()
            task = next(iter(tasks_of(env, env.splits[0])), None) if env.splits else None
        if not isinstance(env, MultiAgentEnv) or task is None or not saves_state(env):
            return ProbeResult()
        scripts = {
            name: env.scripted(task, name, random.Random(f"{seed}/{name}")) for name in env.possible_agents
        }
        return await probe_states(make, [await play(env, scripts, task, seed=seed)])
    except (StageError, UserError):
        # The other probes report it.
        return ProbeResult()


def _of_agent(agent: str, result: ProbeResult) -> ProbeResult:
    findings = [replace(finding, text=f"{agent}: {finding.text}") for finding in result.findings]
    figures = {f"{agent}/{name}": number for name, number in (result.figures or {}).items()}
    return replace(result, findings=tuple(findings), figures=figures)


def _broken(at: StageError) -> ProbeResult:
    text = str(at) if isinstance(at, UserError) else f"`{at.stage}` breaks: {at.detail}; mend it first."
    return ProbeResult((error(_BROKEN.get(at.stage, "class-fails"), text),))


async def _probe(
    make: Callable[[], Env], n: int, seed: int, progress: Progress
) -> AsyncIterator[ProbeResult]:
    """Run every probe in turn; stop at a world without tasks, or one that cannot be created."""
    progress("tasks")
    async with stage("make", None):
        example, other = make(), make()
    async with stage("tasks", None):
        splits, again = splits_of(example), splits_of(other)
    if other is example:
        raise UserError(f"{example.id} is one instance at every call; return a new one, as episodes need.")
    chance, span = example.chance_score, example.expert_score - example.chance_score
    of_tasks = probe_tasks(splits, again, example.limits.max_tokens, chance, span)
    yield replace(of_tasks, probe="tasks", declared=declared_by(example, splits))
    yield _declared(example)
    arena = Arena(make, example, chosen(splits, n, seed), seed)
    if arena.tasks:
        progress("the expert")
        of_expert, by_expert = await probe_expert(arena, n)
        solves = bool(by_expert) and not of_expert.findings and all(task.answer for task in arena.tasks)
        plays: dict[str, JSON] = {"expert_plays": await has_expert(arena)}
        yield replace(of_expert, probe="expert", declared=plays)
        yield replace(await probe_tools(arena), probe="tools")
        progress("random and adversarial policies")
        yield replace(await probe_chance(arena, n, by_expert, misleads=solves), probe="chance")
        yield replace(await probe_leaving(arena, n), probe="leaving")
        yield replace(await probe_leaks(arena), probe="leaks")
        yield replace(await probe_hints(arena, by_expert), probe="hints")
        progress("files of the host")
        yield replace(await probe_host(arena), probe="host")
        async for result in _probe_world(arena, progress):
            yield result
        if arena.rewards:
            figures = {"lowest_reward": min(arena.rewards), "highest_reward": max(arena.rewards)}
            yield ProbeResult((), figures)
    yield replace(_closed(arena), probe="close")
    yield replace(await _probe_closing(other, example), probe="close")


def _closed(arena: Arena) -> ProbeResult:
    """Whether `close` has failed after any episode of the check."""
    if not arena.failed_closes:
        return ProbeResult()
    text = (
        f"`close` breaks after an episode: {arena.failed_closes[0]}. The episode counts, but what is still "
        "to be released stays open; let it release everything where a part fails, too."
    )
    return ProbeResult((error("close-fails", text),))


async def _probe_closing(*unplayed: AnyEnv) -> ProbeResult:
    """Close instances that were never reset, as a run does where `reset` fails."""
    failures: list[str] = []
    for env in unplayed:
        try:
            await call_close(env)
        except StageError as broken:
            failures.append(broken.detail)
    if not failures:
        return ProbeResult()
    text = (
        f"`close` breaks where nothing was reset: {failures[0]}. It is called after a `reset` that fails, "
        "too; let it release what is there."
    )
    return ProbeResult((error("close-fails", text),))


async def _probe_world(arena: Arena, progress: Progress) -> AsyncIterator[ProbeResult]:
    gold = expert if await has_expert(arena) else random_policy
    progress("same seed, same episode")
    sameness = await probe_sameness(arena, (gold, random_policy))
    yield replace(sameness, probe="same")
    # An episode that differs by itself says nothing of its actions.
    if not sameness.findings:
        yield replace(await probe_replay(arena, (gold, random_policy)), probe="replay")
    progress("stopping and going on")
    policies = (gold, random_policy) if saves_state(arena.example) else ()
    episodes = [await outcome(arena.play(policy, arena.tasks[0])) for policy in policies]
    saved = await probe_states(arena.make, [played for played in episodes if isinstance(played, Episode)])
    yield replace(saved, probe="state")
    progress("cancelling at every await")
    yield replace(await probe_cancelling(arena, gold), probe="cancel")
    # Before the memory probe: tracing makes everything slower.
    held = arena.seconds.pop(HELD, [])
    figures = latencies(arena.seconds)
    yield ProbeResult((), figures)
    yield slow(figures)
    yield holding(held)
    progress("memory")
    yield replace(await probe_memory(arena, gold), probe="memory")


def _declared(env: Env) -> ProbeResult:
    best, chance = env.expert_score, env.chance_score
    if best > chance:
        return ProbeResult()
    text = f"expert_score = {best:g} is not above chance_score = {chance:g}; there would be nothing to learn."
    return ProbeResult((error("nothing-to-learn", text),))

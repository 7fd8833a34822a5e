"""Runs the check: from an environment's id or class to a report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from agentrl.envs.base import Env
from agentrl.envs.check.arena import Arena, expert
from agentrl.envs.check.cancel_probe import probe_cancelling
from agentrl.envs.check.cost_probe import latencies, probe_memory, slow
from agentrl.envs.check.policies import random_policy
from agentrl.envs.check.report import CheckReport, ProbeResult, error, findings_of
from agentrl.envs.check.same_probe import probe_sameness
from agentrl.envs.check.score_probe import has_expert, probe_chance, probe_expert
from agentrl.envs.check.shared_probe import probe_release
from agentrl.envs.check.task_probe import Splits, probe_tasks, subsampled
from agentrl.envs.check.traces import own_temporary_folder, present
from agentrl.envs.multi_agent import AgentView, AnyEnv, MultiAgentEnv
from agentrl.envs.registry import EnvSpec, find
from agentrl.errors import StageError, UserError, stage
from agentrl.types import Task

Progress = Callable[[str], None]


def check_env(
    env: str | type[AnyEnv], *, n: int = 32, seed: int = 0, progress: Progress | None = None
) -> CheckReport:
    """Check an environment, by its id or its class: tasks, scores, cheats, sameness, costs, traces.

    n: tasks that the expert and random play are measured on; each adversary plays a quarter of them.
    seed: of all randomness of the check. progress: called with the name of each probe.

    Raises:
        UnknownEnvError: no environment of that name.
        UserError: n is below 1, the class lacks a method or needs arguments, or an event loop runs already.
    """
    if _in_event_loop():
        raise UserError(
            "check_env was called inside an event loop; write `await check_env_async(...)` there."
        )
    return asyncio.run(check_env_async(env, n=n, seed=seed, progress=progress))


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def check_env_async(
    env: str | type[AnyEnv], *, n: int = 32, seed: int = 0, progress: Progress | None = None
) -> CheckReport:
    """`check_env` for code that runs in an event loop.

    Raises:
        UnknownEnvError: no environment of that name.
        UserError: n is below 1, or the class lacks a method or needs arguments.
    """
    if n < 1:
        raise UserError(f"a check plays at least one task, got n = {n}; leave n out for the usual number.")
    spec = find(env) if isinstance(env, str) else EnvSpec(f"{env.__module__}:{env.__qualname__}", env)
    make = spec.factory()
    with own_temporary_folder() as folder:
        before = present(folder)
        try:
            results = await _probe_agents(make, n, seed, progress or _silent)
        finally:
            released = await probe_release(before, folder)
    # A leak of a single episode is still there at the end, and has been reported.
    if not any(finding.code.startswith("leaves-") for finding in findings_of(results)):
        results = [*results, released]
    figures = {name: number for result in results for name, number in (result.figures or {}).items()}
    return CheckReport(spec.id, seed, tuple(findings_of(results)), figures)


def _silent(what: str) -> None:
    del what


async def _probe_agents(
    make: Callable[[], AnyEnv], n: int, seed: int, progress: Progress
) -> Sequence[ProbeResult]:
    """Run every probe; with several agents for each of them, while scripts play the others."""
    try:
        async with stage("make", None):
            example = make()
    except StageError as broken:
        return [_broken(broken)]
    if not isinstance(example, MultiAgentEnv):
        return await _probe(cast(Callable[[], Env], make), n, seed, progress)
    results: list[ProbeResult] = []
    for agent in example.possible_agents:
        view = partial(_view, cast(Callable[[], MultiAgentEnv], make), agent)
        results += [_of_agent(agent, result) for result in await _probe(view, n, seed, progress)]
    await example.close()
    return results


def _view(make: Callable[[], MultiAgentEnv], agent: str) -> Env:
    return AgentView(make(), agent)


def _of_agent(agent: str, result: ProbeResult) -> ProbeResult:
    findings = [replace(finding, text=f"{agent}: {finding.text}") for finding in result.findings]
    figures = {f"{agent}/{name}": number for name, number in (result.figures or {}).items()}
    return ProbeResult(tuple(findings), figures)


def _broken(at: StageError) -> ProbeResult:
    return ProbeResult((error(f"{at.stage}-fails", f"`{at.stage}` breaks: {at.detail}; mend it first."),))


async def _probe(make: Callable[[], Env], n: int, seed: int, progress: Progress) -> Sequence[ProbeResult]:
    """Run every probe in turn; stop at a world without tasks, or one that cannot be created."""
    progress("tasks")
    try:
        async with stage("make", None):
            example, other = make(), make()
        async with stage("tasks", None):
            splits, again = _splits(example), _splits(other)
    except StageError as broken:
        return [_broken(broken)]
    chance, span = example.chance_score, example.expert_score - example.chance_score
    results = [probe_tasks(splits, again, example.limits.max_tokens, chance, span), _declared(example)]
    arena = Arena(make, example, _chosen(splits, n, seed), seed)
    if arena.tasks:
        progress("the expert")
        of_expert, answered_in = await probe_expert(arena, n)
        results.append(of_expert)
        progress("random and adversarial policies")
        results.append(await probe_chance(arena, n, answered_in))
        results += await _probe_world(arena, progress)
    await other.close()
    await example.close()
    return results


async def _probe_world(arena: Arena, progress: Progress) -> Sequence[ProbeResult]:
    gold = expert if has_expert(arena) else random_policy
    progress("same seed, same episode")
    sameness = await probe_sameness(arena, (gold, random_policy))
    progress("cancelling at every await")
    cancelling = await probe_cancelling(arena, gold)
    # Before the memory probe: tracing makes everything slower.
    figures = latencies(arena.seconds)
    progress("memory")
    return sameness, cancelling, ProbeResult((), figures), slow(figures), await probe_memory(arena, gold)


def _declared(env: Env) -> ProbeResult:
    best, chance = env.expert_score, env.chance_score
    if best > chance:
        return ProbeResult()
    text = f"expert_score = {best:g} is not above chance_score = {chance:g}; there would be nothing to learn."
    return ProbeResult((error("nothing-to-learn", text),))


def _splits(env: Env) -> Splits:
    return {name: subsampled(env.tasks(name)) for name in env.splits}


def _chosen(splits: Splits, n: int, seed: int) -> tuple[Task, ...]:
    """`n` tasks to play, from all splits in equal numbers."""
    rng = random.Random(seed)
    drawn = [rng.sample(list(tasks), min(len(tasks), n)) for tasks in splits.values() if tasks]
    longest = max(map(len, drawn), default=0)
    interleaved = [tasks[k] for k in range(longest) for tasks in drawn if k < len(tasks)]
    return tuple(interleaved[:n])

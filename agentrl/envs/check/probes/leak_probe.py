"""Checks what a model is told: no answers, and every tool that the expert uses.

A policy that does nothing calls a tool that there is not, a few times, and then answers with nothing. What it
can read beyond the prompt, and what it is told of tools, must not hold the answer: neither behind a label,
nor so that a random word of it earns more than `chance_score` (the rules of `task_probe`). The same text for
all tasks, such as the options of a tool, holds every answer and tells none. A tool that works and is not on
offer is a way to the answer that only the expert knows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from statistics import fmean

from agentrl.envs.base import Env, Script
from agentrl.envs.check.arena import Arena, Watching, expert
from agentrl.envs.check.findings import Finding, ProbeResult, error, some
from agentrl.envs.check.intervals import lowest_mean
from agentrl.envs.check.probes.score_probe import has_expert
from agentrl.envs.check.probes.task_probe import (
    TOLERANCE,
    holding,
    labelled_in,
    normalized,
    random_word_score,
)
from agentrl.envs.normal_form import squad_normalize
from agentrl.tools.schema import compile_validator
from agentrl.types import Message, Task, ToolCall, say
from agentrl.types.seams import ToolSchema

_TASKS = 16
_CALLS = 2
_LEAST = 4
_WATCHED = 4


def _idle(env: Env, task: Task, rng: random.Random) -> Script:
    del env, task, rng
    for _ in range(_CALLS):
        yield Message("assistant", tool_calls=(ToolCall("no_such_tool", {}),))
    while True:
        yield say("")


async def probe_leaks(arena: Arena) -> ProbeResult:
    """Read what an idle policy is shown; only where every task has an answer."""
    if not all(task.answer for task in arena.tasks):
        return ProbeResult()
    tasks = arena.tasks[:_TASKS]
    watching = [await arena.watch(_idle, task) for task in tasks]
    shown = [_shown(task, agent) for task, agent in zip(tasks, watching, strict=True)]
    told = [_told(agent) for agent in watching]
    return ProbeResult((*_observed(arena, tasks, shown), *_described(tasks, told)))


def _shown(task: Task, agent: Watching) -> str:
    """What the world said beyond the prompt."""
    prompt = {message.text for message in task.prompt}
    texts = (message.text for turn in agent.turns for message in turn.observation)
    return "\n".join(text for text in texts if text not in prompt)


def _told(agent: Watching) -> str:
    """What the model is told of tools, in the first turn."""
    if not agent.turns:
        return ""
    return json.dumps(
        [[tool.name, tool.description, tool.parameters] for tool in agent.turns[0].tools],
        ensure_ascii=False,
        default=str,
    )


def _observed(arena: Arena, tasks: Sequence[Task], shown: Sequence[str]) -> list[Finding]:
    answers = [task.answer or "" for task in tasks]
    leaking = [tasks[k].id for k in labelled_in(shown, answers)]
    texts, wanted = normalized(shown), [squad_normalize(answer) for answer in answers]
    own, chance = holding(texts, wanted), arena.example.chance_score
    allowed = chance + TOLERANCE * (arena.example.expert_score - chance)
    if not leaking and random_word_score(texts, own) > allowed:
        leaking = [task.id for task, holds in zip(tasks, own, strict=True) if holds]
    if not leaking:
        return []
    text = (
        f"the world tells the answer to a policy that does nothing, in {some(leaking)}; say what was wrong, "
        "never what is right."
    )
    return [error("answer-in-observation", text)]


def _described(tasks: Sequence[Task], told: Sequence[str]) -> list[Finding]:
    texts, answers = normalized(told), [squad_normalize(task.answer or "") for task in tasks]
    own = holding(texts, answers)
    if len(tasks) < _LEAST or not any(own):
        return []
    others = [
        fmean(holding([text] * (len(answers) - 1), [*answers[:k], *answers[k + 1 :]]))
        for k, text in enumerate(texts)
    ]
    if lowest_mean([holds - other for holds, other in zip(own, others, strict=True)]) <= TOLERANCE:
        return []
    leaking = [task.id for task, holds in zip(tasks, own, strict=True) if holds]
    text = f"the description of the tools holds the answer of {some(leaking)}; take it out."
    return [error("answer-in-tools", text)]


async def probe_tools(arena: Arena) -> ProbeResult:
    """Watch the expert on a few tasks."""
    if not await has_expert(arena):
        return ProbeResult()
    undeclared: dict[str, None] = {}
    for task in arena.some_tasks(_WATCHED):
        undeclared.update(dict.fromkeys(_undeclared(await arena.watch(expert, task))))
    return ProbeResult(_findings(list(undeclared)))


def _findings(undeclared: list[str]) -> tuple[Finding, ...]:
    if not undeclared:
        return ()
    text = f"the expert calls what the model is not told of: {some(undeclared)}; list it in `tool_schemas`."
    return (error("tool-undeclared", text),)


def _undeclared(agent: Watching) -> list[str]:
    return [name for turn in agent.turns for name in _of_turn(turn.action, turn.tools)]


def _of_turn(action: Message, tools: tuple[ToolSchema, ...]) -> list[str]:
    offered = {tool.name: tool for tool in tools}
    wrong = []
    for call in action.tool_calls:
        if call.name not in offered:
            wrong.append(f"`{call.name}`")
        elif call.arguments is not None and not compile_validator(offered[call.name]).is_valid(
            dict(call.arguments)
        ):
            wrong.append(f"arguments of `{call.name}` that its schema refuses")
    return wrong

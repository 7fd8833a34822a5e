"""Checks that the expert calls no tool that a model is not told of, with arguments that fit the schemas.

A model learns what it is shown. A tool that works and is not on offer is a way to the answer that only the
expert knows.
"""

from __future__ import annotations

from agentrl.envs.check.arena import Arena, Watching, expert
from agentrl.envs.check.findings import Finding, ProbeResult, error, some
from agentrl.envs.check.probes.score_probe import has_expert
from agentrl.tools.schema import compile_validator
from agentrl.types import Message
from agentrl.types.seams import ToolSchema

_TASKS = 4


async def probe_tools(arena: Arena) -> ProbeResult:
    """Watch the expert on a few tasks."""
    if not await has_expert(arena):
        return ProbeResult()
    undeclared: dict[str, None] = {}
    for task in arena.some_tasks(_TASKS):
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

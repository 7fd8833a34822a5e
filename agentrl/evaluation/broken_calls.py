"""Broken tools of an environment of several agents, which answers the calls of its agents itself.

The environment never sees a call of a broken tool: it is answered here, under the limits of tool calls and
with their counts, and its agent acts once more. Where several act at the same time, the step of the world
waits for that. A tool that only answers otherwise is called by the environment, and its answer is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from agentrl.envs import MultiAgentEnv
from agentrl.envs.boundary import acting_in, call_joint_step
from agentrl.envs.toolbox import AlterTool, Toolbox
from agentrl.tools import Tool
from agentrl.types import JSON, JointStep, Message, ToolCall
from agentrl.types.seams import ToolSchema

Changed: TypeAlias = Callable[[str, str], str]
"""From a call as text, and the environment's answer to it, to another answer."""


def break_calls(
    env: MultiAgentEnv, agents: Collection[str], alter: AlterTool, changed: Changed | None
) -> None:
    """Have tools of these agents broken in an episode; before reset().

    alter: gives the broken tool in place of one, None = it is not offered, and the same tool where it is not
        meant. changed: where the environment answers its calls, what becomes of each answer; None = the
        broken tool answers.
    """
    calls = _Calls(env, agents, alter, changed)
    # On the instance: its class is what the author wrote.
    vars(env).update(step=calls.step, tools_of=calls.tools_of)


class _Calls:
    """The calls of one episode. Its arguments are those of `break_calls`."""

    def __init__(
        self,
        env: MultiAgentEnv,
        agents: Collection[str],
        alter: AlterTool,
        changed: Changed | None,
    ) -> None:
        self._env, self._agents, self._alter, self._changed = env, agents, alter, changed
        self._own_tools = env.tools_of
        # Actions of agents that wait for one whose calls were answered here.
        self._waiting: dict[str, Message] = {}
        self._acting: Sequence[str] = ()
        # Calls whose answers are to be changed, by agent and id.
        self._called: dict[tuple[str, str], ToolCall] = {}
        self._toolboxes: dict[str, Toolbox] = {}

    def tools_of(self, agent: str) -> Sequence[ToolSchema]:
        """Those that are offered."""
        schemas = self._own_tools(agent)
        if agent not in self._agents:
            return schemas
        return [schema for schema in schemas if self._alter(_tool(schema)) is not None]

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """The environment's step, without the calls that it must not see."""
        if self._changed is not None:
            self._note(actions)
            return self._with_changes(await self._stepped(actions))
        answers: dict[str, tuple[Message, ...]] = {}
        passed: dict[str, Message] = {**self._waiting}
        for agent, action in actions.items():
            broken = self._broken(agent, action)
            kept = tuple(call for call in action.tool_calls if call not in broken)
            if broken:
                answers[agent] = tuple(await self._toolbox(agent).answers(broken, self._env.limits))
            if kept or not broken:
                passed[agent] = replace(action, tool_calls=kept)
        self._acting = self._acting or acting_in(self._env)
        if missing := [agent for agent in self._acting if agent not in passed]:
            self._waiting, self._env.acting = passed, missing
            return JointStep.going(answers)
        self._env.acting, self._acting, self._waiting = self._acting, (), {}
        step = await self._stepped({agent: passed[agent] for agent in self._env.acting})
        return step._replace(observations=_joined(answers, step.observations))

    async def _stepped(self, actions: Mapping[str, Message]) -> JointStep:
        """The step of the environment's own class, whatever form its author gave the values."""
        replaced = vars(self._env).pop("step")
        try:
            return await call_joint_step(self._env, actions)
        finally:
            vars(self._env)["step"] = replaced

    def _toolbox(self, agent: str) -> Toolbox:
        if agent not in self._toolboxes:
            box = self._toolboxes[agent] = Toolbox("strict", self._env.counts)
            box.add(filter(None, (self._alter(_tool(schema)) for schema in self._own_tools(agent))))
        return self._toolboxes[agent]

    def _broken(self, agent: str, action: Message) -> tuple[ToolCall, ...]:
        """The calls of broken tools."""
        if agent not in self._agents:
            return ()
        whole = {schema.name: _tool(schema) for schema in self._own_tools(agent)}
        broken = {name for name, tool in whole.items() if self._alter(tool) is not tool}
        return tuple(call for call in action.tool_calls if call.name in broken)

    def _note(self, actions: Mapping[str, Message]) -> None:
        for agent, action in actions.items():
            self._called |= {(agent, call.id): call for call in self._broken(agent, action)}

    def _with_changes(self, step: JointStep) -> JointStep:
        observations = {
            agent: tuple(self._heard(agent, message) for message in observation)
            for agent, observation in step.observations.items()
        }
        return step._replace(observations=observations)

    def _heard(self, agent: str, message: Message) -> Message:
        call = self._called.get((agent, message.tool_call_id or ""))
        if message.role != "tool" or call is None or self._changed is None:
            return message
        return replace(message, content=self._changed(repr(call.arguments), message.text))


async def _never(**arguments: JSON) -> str:
    raise AssertionError(f"the environment answers this call: {arguments}")


def _tool(schema: ToolSchema) -> Tool:
    """A tool whose calls are not checked: how wrong ones are answered is the environment's."""
    return replace(Tool.described(schema._replace(parameters={"type": "object"}), _never), schema=schema)


def _joined(
    first: Mapping[str, Sequence[Message]], then: Mapping[str, Sequence[Message]]
) -> dict[str, tuple[Message, ...]]:
    return {name: (*first.get(name, ()), *then.get(name, ())) for name in {**first, **then}}

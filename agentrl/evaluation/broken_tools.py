"""What a tool earns: an evaluation is played again with the tool broken, and the scores are compared.

    agentrl eval HopSearch-v0 --model DIR --break-tool search=none,search=wrong

An agent that has stopped to use its tool scores the same with one that lies.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.envs import AnyEnv, Env, MultiAgentEnv, ToolEnv
from agentrl.errors import ConfigError, ToolRejected, did_you_mean
from agentrl.evaluation.broken_calls import break_calls
from agentrl.tools import Gate, Tool
from agentrl.types import Limits

_KEPT = 64
"""Answers of which a wrong one is chosen: of the latest calls of all episodes (count)."""


@dataclass(frozen=True)
class BrokenTool:
    """A tool by its name, and how it is broken, see `HOW`. Its evaluation is named TOOL=HOW.

    agent: whose tool it is; None = that of every agent who has it.
    """

    tool: str
    how: str
    agent: str | None = None
    _answers: deque[tuple[object, str]] = field(default_factory=lambda: deque(maxlen=_KEPT), compare=False)

    @classmethod
    def read(cls, text: str) -> BrokenTool:
        """The inverse of `name`.

        Raises:
            ValueError: it has another form; one sentence.
        """
        tool, equals, how = text.partition("=")
        if not (tool and equals):
            raise ValueError(f"{text!r} names no way to break a tool; write TOOL=HOW, HOW {_WAYS}.")
        if how not in HOW:
            raise ValueError(f"{text!r}: a tool is broken {_WAYS}.{did_you_mean(how, HOW)}")
        agent, _, own = tool.rpartition(":")
        return cls(own, how, agent or None)

    @property
    def name(self) -> str:
        """As it is written: TOOL=HOW, or AGENT:TOOL=HOW."""
        return f"{'' if self.agent is None else f'{self.agent}:'}{self.tool}={self.how}"

    def breaking(self, make_env: Callable[[], AnyEnv]) -> Callable[[], AnyEnv]:
        """Makes the same environments, in which the tool is broken.

        Raises:
            ConfigError: the environment has no such tool, answers calls in a way of its own, or limits no
                call that is slow.
        """
        env = make_env()
        agents = self._agents_with(env)
        if self.how == "slow" and not _limits_calls(env.limits):
            raise ConfigError(
                f"break_tool = {self.name}: {env.id} limits no call, so that a slow one would never end; set "
                "tool_timeout_s."
            )

        def make() -> AnyEnv:
            env = make_env()
            if isinstance(env, ToolEnv):
                env.alter_tools(self._altered)
            elif isinstance(env, MultiAgentEnv):
                break_calls(env, agents, self._altered, self._changed if self.how in _OF_ANSWERS else None)
            return env

        return make

    def _agents_with(self, env: AnyEnv) -> Sequence[str]:
        """The agents whose tool is broken.

        Raises:
            ConfigError: nobody has such a tool, or its calls cannot be told from others.
        """
        agents = env.possible_agents if self.agent is None else (self.agent,)
        if self.agent is not None and self.agent not in env.possible_agents:
            raise ConfigError(
                f"break_tool = {self.name}: {env.id} has no agent `{self.agent}`, only "
                f"{', '.join(env.possible_agents)}."
            )
        if isinstance(env, Env) and not isinstance(env, ToolEnv):
            raise ConfigError(
                f"break_tool = {self.name}: {env.id} has no tools beside its own actions; break one of a "
                "ToolEnv, or of an environment of several agents."
            )
        tools = {
            name: [
                schema.name for schema in (env.tool_schemas if isinstance(env, Env) else env.tools_of(name))
            ]
            for name in agents
        }
        names = [*dict.fromkeys(name for own in tools.values() for name in own)]
        if self.tool not in names:
            raise ConfigError(
                f"break_tool = {self.name}: {self.agent or env.id} has no tool `{self.tool}`, only "
                f"{', '.join(names) or 'none'}.{did_you_mean(self.tool, names)}"
            )
        return [name for name, own in tools.items() if self.tool in own]

    def _altered(self, tool: Tool) -> Tool | None:
        """None = it is not offered."""
        if tool.name != self.tool:
            return tool
        if self.how == "none":
            return None

        async def answer(**arguments: object) -> str:
            return await self._answer(tool, arguments)

        if self.how in _OF_ANSWERS:
            return replace(tool, function=answer)
        # The tool itself is not called: nobody waits for its place, and no overrun is a failure of the world.
        return replace(tool, function=answer, gate=Gate(None), overrun="model")

    async def _answer(self, tool: Tool, arguments: Mapping[str, object]) -> str:
        match self.how:
            case "empty":
                return ""
            case "error":
                raise ToolRejected(f"{tool.name} is not available now.", "broken")
            case "slow":
                # Unblocked by: the limits of its caller, which are there.
                await asyncio.Event().wait()
        return self._changed(repr(arguments), await tool.call(arguments))

    def _changed(self, arguments: str, text: str) -> str:
        """What is answered in place of the tool's own answer to a call."""
        return _shuffled(text) if self.how == "random" else self._of_another_call(arguments, text)

    def _of_another_call(self, arguments: str, text: str) -> str:
        """The latest answer that another call got, and that differs.

        Before there is one, the words of its own in another order; of a single word nothing.
        """
        others = (answer for call, answer in reversed(self._answers) if call != arguments and answer != text)
        shuffled = _shuffled(text)
        wrong = next(others, "" if shuffled == text else shuffled)
        self._answers.append((arguments, text))
        return wrong


HOW: Mapping[str, str] = {
    "none": "it is not offered",
    "empty": "it answers nothing",
    "random": "it answers with its words in another order",
    "wrong": "it answers what another call got",
    "slow": "each call takes as long as it may, and is stopped there",
    "error": "each call is refused",
}
_OF_ANSWERS = ("random", "wrong")
"""Those in which the tool is called, and its answer is changed."""
_WAYS = f"by {', '.join(HOW)}"


def _limits_calls(limits: Limits) -> bool:
    return any((limits.tool_timeout_s, limits.step_timeout_s, limits.episode_timeout_s))


def _shuffled(text: str) -> str:
    """The words in another order, always the same for one text."""
    words = text.split()
    random.Random(zlib.crc32(text.encode())).shuffle(words)
    return " ".join(words)


def check_broken(texts: tuple[str, ...]) -> tuple[str, ...]:
    """These, each of which names a tool and a way to break it, once.

    Raises:
        ValueError: one does not, or is there twice; one sentence.
    """
    for text in texts:
        BrokenTool.read(text)
    if len({*texts}) < len(texts):
        raise ValueError(f"{', '.join(texts)} breaks one tool twice in one way; name each once.")
    return texts

"""What a tool earns: an evaluation is played again with the tool broken, and the scores are compared.

    agentrl eval HopSearch-v0 --model DIR --break-tool search=none,search=wrong

An agent that has stopped to use its tool scores the same with one that lies.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from agentrl.envs import AnyEnv, ToolEnv
from agentrl.errors import ConfigError, ToolRejected, did_you_mean
from agentrl.tools import Tool

_KEPT = 64
"""Answers of which a wrong one is chosen: of the latest calls of all episodes (count)."""


@dataclass(frozen=True)
class BrokenTool:
    """A tool by its name, and how it is broken, see `HOW`. Its evaluation is named TOOL=HOW."""

    tool: str
    how: str
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
        return cls(tool, how)

    @property
    def name(self) -> str:
        """As it is written: TOOL=HOW."""
        return f"{self.tool}={self.how}"

    def breaking(self, make_env: Callable[[], AnyEnv]) -> Callable[[], AnyEnv]:
        """Makes the same environments, in which the tool is broken.

        Raises:
            ConfigError: the environment has no such tool.
        """
        env = make_env()
        names = [schema.name for schema in env.tool_schemas] if isinstance(env, ToolEnv) else []
        if self.tool not in names:
            raise ConfigError(
                f"break_tool = {self.name}: {env.id} has no tool `{self.tool}`, only "
                f"{', '.join(names) or 'none'}.{did_you_mean(self.tool, names)}"
            )

        def make() -> AnyEnv:
            env = make_env()
            if isinstance(env, ToolEnv):
                env.alter_tools(self._altered)
            return env

        return make

    def _altered(self, tool: Tool) -> Tool | None:
        """None = it is not offered."""
        if tool.name != self.tool:
            return tool
        if self.how == "none":
            return None

        async def answer(**arguments: object) -> str:
            return await self._answer(tool, arguments)

        return replace(tool, function=answer)

    async def _answer(self, tool: Tool, arguments: Mapping[str, object]) -> str:
        match self.how:
            case "empty":
                return ""
            case "error":
                raise ToolRejected(f"{tool.name} is not available now.", "broken")
            case "slow":
                raise ToolRejected(f"{tool.name} was stopped: it took too long.", "broken")
        text = await tool.call(arguments)
        return _shuffled(text) if self.how == "random" else self._of_another_call(repr(arguments), text)

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
    "slow": "each call is stopped as one that takes too long",
    "error": "each call is refused",
}
_WAYS = f"by {', '.join(HOW)}"


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

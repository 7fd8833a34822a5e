"""Agents without a model."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from agentrl.envs.base import Action, AnyScript
from agentrl.errors import StageError
from agentrl.types import Message, Observation, quoted, say
from agentrl.types.seams import Act, Session, ToolSchema

_Running: TypeAlias = Generator[Action, str, object] | AsyncGenerator[Action, str]


class ScriptedAgent:
    """Plays a script: its yields become actions, and it is sent the text of the world's answers.

    script: the script in any form, or a function from the text of the first observation to one.
    """

    def __init__(self, script: AnyScript | Callable[[str], AnyScript]) -> None:
        self._script = script
        self._running: _Running | None = None

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The script's next action; after the end of the script an empty answer.

        Raises:
            StageError: it is no script, or yields something else than actions.
        """
        del tools, session
        text = "\n".join(message.text for message in observation)
        is_first = self._running is None
        if self._running is None:
            self._running = await _started(self._script(text) if callable(self._script) else self._script)
        running = self._running
        action: Action = ""
        try:
            if isinstance(running, AsyncGenerator):
                action = await (anext(running) if is_first else running.asend(text))
            else:
                action = next(running) if is_first else running.send(text)
        except (StopIteration, StopAsyncIteration):
            pass
        return Act(_message(action), None)

    async def close(self, session_id: str) -> None:
        """Close the script."""
        del session_id
        if isinstance(self._running, AsyncGenerator):
            await self._running.aclose()
        else:
            discard(self._script if self._running is None else self._running)


def discard(script: object) -> None:
    """Close a script that has not started, or one that is no async generator."""
    if isinstance(script, Generator) or inspect.iscoroutine(script):
        script.close()


async def _started(script: object) -> _Running:
    while inspect.isawaitable(script):
        script = await script
    if isinstance(script, Generator | AsyncGenerator):
        return script
    if isinstance(script, str | Message):
        script = [script]
    if isinstance(script, Iterable) and not isinstance(script, Mapping | AbstractSet):
        return _listed(script)
    form = "yield its actions, or return a list of them, such as [call(...), say(...)]"
    raise StageError("act", "invalid", f"the script is {quoted(script)}; {form}")


async def _listed(actions: Iterable[Action]) -> AsyncGenerator[Action, str]:
    for action in actions:
        yield action


def _message(action: object) -> Message:
    if isinstance(action, str):
        return say(action)
    if isinstance(action, Message) and action.role == "assistant":
        return action
    problem = f"the script's action is {quoted(action)}; an action is call(...), say(...) or text"
    raise StageError("act", "invalid", problem)

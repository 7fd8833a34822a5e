"""Agents without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.envs.base import Script
from agentrl.protocols import Act, Session, ToolSchema
from agentrl.types import Message, Observation


class ScriptedAgent:
    """Plays a script: its yields become actions, and it is sent the text of the world's answers.

    script: the script, or a function from the text of the first observation to a script.
    """

    def __init__(self, script: Script | Callable[[str], Script]) -> None:
        self._make = script if callable(script) else None
        self._script = None if callable(script) else script
        self._started = False

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The script's next action; after the end of the script an empty answer."""
        del tools, session
        text = "\n".join(message.text for message in observation)
        if self._script is None and self._make is not None:
            self._script = self._make(text)
        assert self._script is not None
        try:
            action = self._script.send(text) if self._started else next(self._script)
        except StopIteration:
            action = Message("assistant", "")
        self._started = True
        return Act(action, None)

    async def close(self, session_id: str) -> None:
        """Close the generator."""
        del session_id
        if self._script is not None:
            self._script.close()

"""Agents that need no model."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.envs.base import Script
from agentrl.protocols import Act, Session, ToolSchema
from agentrl.types import Message, Observation


class ScriptedAgent:
    """Plays a script: yields become actions, the text of the world's answers is sent back in."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._started = False

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The script's next action; a script that has run out gives an empty answer."""
        del tools, session
        heard = "\n".join(message.content for message in observation)
        try:
            action = self._script.send(heard) if self._started else next(self._script)
        except StopIteration:
            action = Message("assistant", "")
        self._started = True
        return Act(action, None)

    async def close(self, session_id: str) -> None:
        """Close the generator."""
        del session_id
        self._script.close()

"""Whether a prefix still holds where a template takes thoughts back: asked of the template, not assumed.

Most families drop the thoughts of earlier turns at a new question, some after every turn, some never. Some
write an empty thought into a turn and drop that, too. Nothing is taken back where a turn shows no thought.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from agentrl.errors import RenderingError, UserError
from agentrl.rendering.messages import Escape
from agentrl.rendering.template_facts import MARK, PROBE, Chat, probe_turn
from agentrl.types import JSON, Observation
from agentrl.types.seams import Seen

THINK, THINK_END = "<think>", "</think>"


class Thoughts:
    """Which observations make a template drop thoughts, by rendering a small conversation for each once.

    text: renders a conversation without tools, up to where the assistant begins to write.
    """

    def __init__(self, text: Callable[[Chat], str]) -> None:
        self._text = text
        self._kept = lru_cache(64)(self._is_kept)

    def are_kept(self, observation: Observation) -> bool:
        """Whether the last turn keeps its thought after an observation of these roles."""
        return self._kept(tuple(message.role for message in observation))

    def _is_kept(self, roles: tuple[str, ...]) -> bool:
        calls = roles.count("tool")
        ids = iter(range(calls))
        observation: Chat = [
            {"role": role, "content": ".", **(_answering(next(ids)) if role == "tool" else {})}
            for role in roles
        ]
        for number in (calls, min(calls, 1)):
            try:
                text = self._text(probe_turn(number, reasoning=True) + observation)
            except (RenderingError, UserError):
                continue  # it takes one call a turn
            # Some tokenizers cannot restore the mark; then nothing is known.
            return text.count(MARK) >= 1 + number or (number > 0 and MARK not in text)
        return True


def shows_thought(seen: Seen, prefix: str, escape: Escape) -> bool:
    """Whether the text of a prefix holds a thought of the model, be it an empty one."""
    thoughts = [message.reasoning for message in seen.messages if message.reasoning]
    # Where it was rendered again, its markup is escaped.
    return any(form in prefix for text in thoughts for form in (text, escape(text))) or THINK_END in prefix


def continues(prefix: str, text: str) -> bool:
    """Whether a conversation that was rendered anew begins as it was sampled, but for blanks.

    Templates trim what was sampled, and write calls with other blanks; the model keeps what it wrote.
    """
    return "".join(text.split()).startswith("".join(prefix.split()))


def _answering(number: int) -> dict[str, JSON]:
    return {"tool_call_id": f"call_{number}", "name": PROBE}

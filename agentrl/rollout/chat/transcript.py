"""A conversation as a chat endpoint takes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from agentrl.rollout.chat.wire import Body, assistant_body
from agentrl.types import JSON, History, Image, Message, Observation, Part, Restart


class Transcript:
    """What was shown and said, as messages of a request.

    Every call is answered by a message of role `tool` that carries its id, for endpoints refuse anything
    else: an answer without the right id answers the oldest open call, calls that the world did not answer
    are answered by nothing, and tool messages that answer no call are shown as the user's.
    """

    def __init__(self) -> None:
        self._messages: list[Body] = []
        self._open: list[str] = []
        self._num_made_up = 0

    @property
    def messages(self) -> Sequence[Body]:
        """All of it, in order."""
        return self._messages

    def show(self, observation: Observation) -> Restart | None:
        """Append what the world shows; a `History` replaces everything, and the reason is returned."""
        restart = None
        if isinstance(observation, History):
            restart = observation.reason if self._messages else None
            self._messages, self._open = [], []
        for message in observation:
            self._messages += self._shown(message)
        self._messages += self._unanswered()
        return restart

    def said(self, body: Body, ids: Sequence[str]) -> None:
        """Append a turn of the model's; ids: of its calls."""
        self._messages.append(body)
        self._open = list(ids)

    def _shown(self, message: Message) -> Iterator[Body]:
        if message.role == "tool" and self._open:
            known = message.tool_call_id in self._open
            answered = self._open.pop(self._open.index(message.tool_call_id or "") if known else 0)
            yield {"role": "tool", "tool_call_id": answered, "content": _content(message)}
            return
        yield from self._unanswered()
        if message.role == "assistant":
            calls = tuple(replace(one, id=one.id or self._made_up()) for one in message.tool_calls)
            self._open = [one.id for one in calls]
            yield assistant_body(message.text, calls)
        else:
            yield {"role": "user" if message.role == "tool" else message.role, "content": _content(message)}

    def _unanswered(self) -> Iterator[Body]:
        while self._open:
            yield {"role": "tool", "tool_call_id": self._open.pop(0), "content": ""}

    def _made_up(self) -> str:
        self._num_made_up += 1
        return f"shown_{self._num_made_up}"


def _content(message: Message) -> JSON:
    """Words as a string; images as data URLs, in the parts of OpenAI's format."""
    if isinstance(message.content, str):
        return message.content
    return [_part(part) for part in message.content]


def _part(part: Part) -> JSON:
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.url}}
    return {"type": "text", "text": part.text}

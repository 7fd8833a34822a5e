"""A conversation in the form of a chat endpoint's requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from agentrl.engine.chat.wire import Body, assistant_body
from agentrl.types import JSON, History, Image, Message, Observation, Part, Restart


class Transcript:
    """Observations and turns, as messages of a request.

    Endpoints require that a message of role `tool` with the id of the call follows every call. A result
    with an unknown id therefore gets the id of the oldest open call, a call without a result gets an empty
    result, and tool messages without an open call become messages of the user.
    """

    def __init__(self) -> None:
        self._messages: list[Body] = []
        self._open: list[str] = []
        self._num_generated_ids = 0

    @property
    def messages(self) -> Sequence[Body]:
        """All messages, in order."""
        return self._messages

    def add_observation(self, observation: Observation) -> Restart | None:
        """Append an observation; a `History` replaces all messages, and its reason is returned."""
        restart = None
        if isinstance(observation, History):
            restart = observation.reason if self._messages else None
            self._messages, self._open = [], []
        for message in observation:
            self._messages += self._in_request(message)
        self._messages += self._unanswered()
        return restart

    def add_turn(self, body: Body, ids: Sequence[str]) -> None:
        """Append a turn of the model. ids: of its calls."""
        self._messages.append(body)
        self._open = list(ids)

    def _in_request(self, message: Message) -> Iterator[Body]:
        if message.role == "tool" and self._open:
            has_open_id = message.tool_call_id in self._open
            index = self._open.index(message.tool_call_id or "") if has_open_id else 0
            yield {"role": "tool", "tool_call_id": self._open.pop(index), "content": _content(message)}
            return
        yield from self._unanswered()
        if message.role == "assistant":
            calls = tuple(replace(call, id=call.id or self._generated_id()) for call in message.tool_calls)
            self._open = [call.id for call in calls]
            yield assistant_body(message.text, calls)
        else:
            yield {"role": "user" if message.role == "tool" else message.role, "content": _content(message)}

    def _unanswered(self) -> Iterator[Body]:
        while self._open:
            yield {"role": "tool", "tool_call_id": self._open.pop(0), "content": ""}

    def _generated_id(self) -> str:
        self._num_generated_ids += 1
        return f"shown_{self._num_generated_ids}"


def _content(message: Message) -> JSON:
    """Text as a string; images as data URLs, in the parts of OpenAI's format."""
    if isinstance(message.content, str):
        return message.content
    return [_part(part) for part in message.content]


def _part(part: Part) -> JSON:
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.url}}
    return {"type": "text", "text": part.text}

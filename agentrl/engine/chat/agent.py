"""The agent over a chat endpoint: messages and tools, no tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from agentrl.engine.chat.endpoint import ChatClient, ChatTurn
from agentrl.engine.chat.settings import ChatSettings
from agentrl.engine.chat.wire import Body, assistant_body
from agentrl.types import JSON, Finish, History, Image, Message, Observation, Part, Restart, Usage
from agentrl.types.seams import Act, Session, ToolSchema


# A conversation in the form of a chat endpoint's requests.
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
            yield {"role": "tool", "tool_call_id": self._open.pop(index), "content": openai_content(message)}
            return
        yield from self._unanswered()
        if message.role == "assistant":
            calls = tuple(replace(call, id=call.id or self._generated_id()) for call in message.tool_calls)
            self._open = [call.id for call in calls]
            yield assistant_body(message.text, calls)
        else:
            yield {
                "role": "user" if message.role == "tool" else message.role,
                "content": openai_content(message),
            }

    def _unanswered(self) -> Iterator[Body]:
        while self._open:
            yield {"role": "tool", "tool_call_id": self._open.pop(0), "content": ""}

    def _generated_id(self) -> str:
        self._num_generated_ids += 1
        return f"shown_{self._num_generated_ids}"


def openai_content(message: Message) -> JSON:
    """Text as a string; images as data URLs, in the parts of OpenAI's format."""
    if isinstance(message.content, str):
        return message.content
    return [_part(part) for part in message.content]


def _part(part: Part) -> JSON:
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.url}}
    return {"type": "text", "text": part.text}


class ChatAgent:
    """Plays one episode through an endpoint, which receives the whole conversation in every turn.

    counts of a turn (`Act.counts`):

        chat/requests, chat/retries                       sent, and how many of them were retries
        chat/uncounted                                    turns for which the endpoint reported no usage
        chat/refusals                                     turns in which the model refused
        chat/length, chat/content_filter, chat/context_full    turns cut, by reason
    """

    def __init__(self, connection: ChatClient, settings: ChatSettings) -> None:
        self._connection = connection
        self._settings = settings
        self._transcript = Transcript()
        self._num_tokens = 0

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """Request a turn. Where the episode's limit leaves no token, it is empty with finish `length`.

        Raises:
            EndpointError: the endpoint returned none.
        """
        restart = self._transcript.add_observation(observation)
        if restart is not None:
            self._num_tokens = 0
        num_free = None if session.max_tokens is None else session.max_tokens - self._num_tokens
        if num_free is not None and num_free < 1:
            return Act(Message("assistant"), None, restart, Finish.LENGTH)
        request = self._settings.request(
            self._transcript.messages,
            tools,
            seed=session.seed,
            num_free_tokens=num_free,
            response_format=session.response_format,
        )
        turn = await self._connection.complete(request)
        reply = turn.reply
        calls = reply.message.tool_calls
        drops = self._settings.reasoning == "drop"
        body = assistant_body(reply.message.text, calls) if drops else reply.body
        self._transcript.add_turn(body, [call.id for call in calls])
        finish = reply.finish
        if reply.usage is not None:
            self._num_tokens = reply.usage.prompt_tokens + reply.usage.completion_tokens
            if session.max_tokens is not None and self._num_tokens > session.max_tokens:
                finish = Finish.LENGTH
        return Act(reply.message, None, restart, finish, _counts(turn), self._priced(reply.usage))

    async def close(self, session_id: str) -> None:
        """Nothing is held: connections belong to all agents."""
        del session_id

    def _priced(self, usage: Usage | None) -> Usage | None:
        prices = self._settings.prices
        return usage if usage is None or prices is None else replace(usage, cost=prices.cost(usage))


def _counts(turn: ChatTurn) -> Mapping[str, int]:
    reply, counts = turn.reply, Counter({"chat/requests": 1 + turn.retries})
    counts["chat/retries"] = turn.retries
    counts["chat/refusals"] = int(reply.refused)
    if reply.finish is not Finish.STOP:
        counts[f"chat/{reply.reason}"] = 1
    if reply.usage is None:
        counts["chat/uncounted"] = 1
    return +counts

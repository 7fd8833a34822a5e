"""The agent over a chat endpoint: messages and tools, no tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl.engine.chat.endpoint import ChatClient, ChatTurn
from agentrl.engine.chat.settings import ChatSettings
from agentrl.engine.chat.transcript import Transcript
from agentrl.engine.chat.wire import assistant_body
from agentrl.types import Finish, Message, Observation, Usage
from agentrl.types.seams import Act, Session, ToolSchema


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
            self._transcript.messages, tools, seed=session.seed, num_free_tokens=num_free
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

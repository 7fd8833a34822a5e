"""Requests of an episode as turns of an agent without tokens: a script, a person, a chat endpoint.

It answers one request after the other. One that continues the last reply shows it the messages since; any
other is a `History`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from agentrl.engine.served.chat_replies import ReplyTurn, turn_of
from agentrl.engine.served.requests import RefusedError
from agentrl.envs.gateway.recording import (
    Answered,
    Growing,
    ModelRequest,
    id_of,
    note,
    sent_ids,
    sent_message,
)
from agentrl.envs.gateway.tree import ConversationTree, Place, SampledReply
from agentrl.types import Completion, Finish, History, Message, Observation, Usage
from agentrl.types.seams import Seen

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request whose turn it is. is_shown: the agent has seen it. finish, usage: of its reply."""

    asked: ModelRequest
    observation: Observation
    action: asyncio.Future[Message]
    is_shown: bool = False
    finish: Finish = Finish.STOP
    usage: Usage | None = None


class TurnByTurn(Generic[_T]):
    """Replies to one request after another, until a task has ended, with its result.

    name: of the episode. counts: as of a `EpisodeRecording`. was_cut: a limit has cut a reply.
    """

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self._name, self._counts = name, counts
        self._tree = ConversationTree()
        self._last: SampledReply | None = None
        self._number = 0
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._request: _Waiting | None = None
        self._ended: asyncio.Task[_T] | None = None
        self._has_shown = self.was_cut = False

    @property
    def waiting(self) -> ModelRequest | None:
        """The request whose turn it is."""
        return None if self._request is None else self._request.asked

    @property
    def result(self) -> _T:
        """That of the task that has ended.

        Raises:
            Exception: whatever it raised.
        """
        assert self._ended is not None, "following() has returned None"
        return self._ended.result()

    def end(self, task: asyncio.Task[_T]) -> None:
        """The task that asks has ended."""
        self._ended = task
        self._news.set()

    async def following(self) -> Observation | None:
        """The next request as an observation; None = the task that asks has ended.

        Waits for: a request. Unblocked by: its arrival; the end of the task.
        """
        while self._ended is None:
            request = self._request
            if request is not None and not request.is_shown:
                request.is_shown = self._has_shown = True
                return request.observation
            self._news.clear()
            await self._news.wait()
        return None

    def took(self, finish: Finish, usage: Usage | None) -> None:
        """How the reply that comes next has ended, and its tokens; None = they are not known."""
        self.was_cut = self.was_cut or finish is Finish.LENGTH
        if self._request is not None and self._request.is_shown:
            self._request.finish, self._request.usage = finish, usage

    def reply(self, action: Message) -> None:
        """Answer the request that was shown; where its client is gone, the answer is dropped."""
        if self._request is not None and self._request.is_shown and not self._request.action.done():
            self._request.action.set_result(action)

    async def answers(self, asked: ModelRequest, growing: Growing | None = None) -> list[Answered]:
        """The reply to a request. growing: no one sees it before.

        Waits for: the requests before it, then its turn. On cancellation: it is left out.

        Raises:
            RefusedError: it asks for several replies, or for logprobs.
        """
        del growing
        if asked.n > 1:
            raise RefusedError("An agent without tokens writes one reply to a request; leave out `n`.")
        if asked.logprobs:
            raise RefusedError("An agent without tokens has no logprobs of them; leave out `logprobs`.")
        # Nothing here ends its reply.
        ends = {"max_tokens": asked.max_tokens, "stop": asked.stop}
        asked = asked.with_overruled((*asked.overruled, *(name for name, end in ends.items() if end)))
        async with self._turn:
            note(self._counts, asked)
            self._number += 1
            place = self._tree.place(asked.messages, asked.tools)
            self._counts.update({f"changed_{kind}": times for kind, times in place.changed.items()})
            request = _Waiting(asked, self._shown(place), asyncio.get_running_loop().create_future())
            action = await self._acted(request)
            turn = self._turn_of(place, asked, action)
            return [Answered(turn, _no_tokens(request.finish), 0, usage=request.usage)]

    async def num_tokens(self, asked: ModelRequest) -> int:
        """No agent of this kind has tokens.

        Raises:
            RefusedError: always.
        """
        del asked
        raise RefusedError("This agent has no tokens to count.")

    def _shown(self, place: Place) -> Observation:
        """A request as an observation of an agent that has seen those before."""
        before = place.continued
        if before is not None and before is self._last and all(m.role != "assistant" for m in place.new):
            return place.new
        return History(place.messages, place.reason) if self._has_shown else place.messages

    async def _acted(self, request: _Waiting) -> Message:
        self._request = request
        self._news.set()
        try:
            return await request.action
        except asyncio.CancelledError:
            # What its agent has seen and said stands in no conversation of a client.
            self._last = None
            raise
        finally:
            self._request = None

    def _turn_of(self, place: Place, asked: ModelRequest, action: Message) -> ReplyTurn:
        text = "".join([action.text, *(call.raw for call in action.tool_calls)])
        ids = id_of(f"{self._name}/{self._number}") if asked.tools else None
        turn = turn_of(action, lambda: text, None, ids)
        sent = sent_message(turn)
        seen = Seen((*place.messages, action), asked.tools, (), ())
        self._last = SampledReply(
            self._number, action, sent, sent_ids(turn, action), seen, None, place.continued, place.reason
        )
        place.end.add(sent, self._last)
        return turn


def _no_tokens(finish: Finish) -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(empty, np.zeros(0, dtype=np.float32), empty.copy(), finish)

"""Replies to the requests of an episode, sampled and recorded: each token is trained where it was sampled.

A request that continues a reply is sampled after its tokens and those of the new messages alone. Any other is
rendered as a whole, and begins a trajectory. Of several that continue one reply, the first goes on with its
trajectory.
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from agentrl.engine.served.chat_replies import ID_CHARS, ReplyTurn, arguments_of, is_thinking, turn_of
from agentrl.engine.served.requests import RefusedError, sentence_of
from agentrl.envs.gateway.same import Change
from agentrl.envs.gateway.tree import ConversationTree, Place, SampledReply
from agentrl.envs.generate import EpisodeEndedError, EpisodeInPlay
from agentrl.errors import RenderingError, UserError
from agentrl.runtime.stage import all_of, stage
from agentrl.types import JSON, Completion, Episode, Finish, Message, Observation, Restart, Usage
from agentrl.types.seams import Seen, ToolSchema, Watch

_MOST_REPLIES = 1000
CONTEXT_LENGTH = "context_length_exceeded"
"""The code of a refusal: the conversation is longer than an episode may be."""
RESPONSE_FORMAT = "response_format"


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request in any protocol.

    messages: the conversation; the last is not the assistant's. tools: on offer. must_call: the tool that a
    reply has to call; "" = any; None = none has to be. n: replies (count). max_tokens: of each; None = what
    the limits of the episode leave. stop: strings that end a reply, and are no part of it. logprobs: the
    reply has those of its tokens. overruled: what the request says of sampling, where the run's settings hold
    in its place. num_split: messages of the assistant that were parts of one (count). response_format: of a
    reply, as OpenAI's chat requests name it; None = any. A chat endpoint may hold it. A policy with tokens
    does not, since each of them is trained as the policy alone has chosen it.
    """

    messages: Observation
    tools: tuple[ToolSchema, ...] = ()
    must_call: str | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    overruled: tuple[str, ...] = ()
    num_split: int = 0
    response_format: JSON = None

    def with_overruled(self, names: tuple[str, ...]) -> ModelRequest:
        """The same request, of which the run overrules this."""
        return replace(self, overruled=names)


class Answered(NamedTuple):
    """A reply as a protocol writes it.

    completion: without tokens where its agent has none. stopped_by: the string of the request that has ended
    it. texts: of its tokens, where the request asks for logprobs. num_reasoning_tokens: up to the end of its
    reasoning (count). content_tokens: those of its content; all, where that is not one piece of the reply.
    usage: as a chat endpoint counts it; None = of these tokens.
    """

    turn: ReplyTurn
    completion: Completion
    num_prompt_tokens: int
    stopped_by: str | None = None
    texts: Sequence[str] = ()
    num_reasoning_tokens: int = 0
    content_tokens: slice = slice(None)
    usage: Usage | None = None

    @property
    def counted(self) -> Usage:
        """Its tokens, as its client is told them."""
        if self.usage is not None:
            return self.usage
        num_sampled, num_cached = len(self.completion.token_ids), self.completion.cached_tokens
        return Usage(self.num_prompt_tokens, num_sampled, num_cached, self.num_reasoning_tokens)


Shown: TypeAlias = Callable[[list[int]], Awaitable[ReplyTurn]]
"""What the first tokens of a reply show of it."""


class Growing:
    """A reply that is sampled, as far as it is. It never grows where the policy shows no tokens before.

    num_prompt_tokens: before it (count).
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self._ids: list[int] = []
        self._news = asyncio.Event()
        self._shown: Shown | None = None

    def begun(self, prompt: Sequence[int], shown: Shown) -> Watch:
        """It is sampled from now on; who is told its tokens. shown: what the first of them show."""
        self.num_prompt_tokens, self._shown = len(prompt), shown
        return self._add

    async def grows_before(self, end: asyncio.Task[list[Answered]]) -> bool:
        """Whether it has more tokens than `turn` has shown, before it has ended.

        Waits for: these. Unblocked by: its end.
        """
        growing = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait([growing, end], return_when="FIRST_COMPLETED")
        finally:
            growing.cancel()
        return not end.done()

    async def turn(self) -> ReplyTurn:
        """What it is so far."""
        self._news.clear()
        assert self._shown is not None, "it has begun"
        return await self._shown([*self._ids])

    def _add(self, ids: Sequence[int]) -> None:
        self._ids += ids
        self._news.set()


class EpisodeRecording:
    """The requests of an episode, their replies, and at its end its trajectories.

    counts: receives `requests`, `changed_KIND` and `overruled_NAME`. was_cut: a limit of the episode has
    refused or cut a reply.
    """

    def __init__(self, episode: EpisodeInPlay, counts: Counter[str]) -> None:
        self._episode = episode
        self._counts = counts
        self._tree = ConversationTree()
        self._replies: list[SampledReply] = []
        self._num_requests = self._num_asked = 0
        self._first_prompt: list[int] | None = None
        self.was_cut = False

    async def answers(self, asked: ModelRequest, growing: Growing | None = None) -> list[Answered]:
        """The replies to a request, in the order of their choices. growing: shows a single one before.

        Waits for: the policy. Unblocked by: its replies. On cancellation: nothing of it is recorded.

        Raises:
            RefusedError: a limit of the episode leaves no reply, or the messages have no form for the model.
            EpisodeEndedError: the engine has given up.
        """
        self._check_room(asked)
        self._num_requests, self._num_asked = self._num_requests + 1, self._num_asked + asked.n
        number = self._num_requests
        if asked.response_format is not None:
            asked = asked.with_overruled((*asked.overruled, RESPONSE_FORMAT))
        note(self._counts, asked)
        place = self._tree.place(asked.messages, asked.tools)
        self._counts.update({f"changed_{kind}": times for kind, times in place.changed.items()})
        prompt, previous, reason = await self._prompt(place, asked.tools)
        if self._first_prompt is None:
            self._first_prompt = prompt
        self._check_length(len(prompt))
        async with stage("act", None):
            watch = None if growing is None else growing.begun(prompt, self._shown(prompt, asked))
            completions = await all_of([self._sampled(prompt, asked, watch) for _ in range(asked.n)])
        if any(completion.finish is Finish.ABORT for completion in completions):
            raise EpisodeEndedError("the run stops")
        if any(c.finish is Finish.LENGTH and not len(c.token_ids) for c in completions):
            # The time of the group is over.
            self.was_cut = True
            raise EpisodeEndedError("the time of the episode is over")
        parsed = []
        for index, completion in enumerate(completions):
            seen = Seen(place.messages, asked.tools, prompt, completion.token_ids.tolist())
            parsed.append(
                (seen, completion, *await self._answered(seen, completion, asked, f"{number}/{index}"))
            )
        answers = []
        for index, (before, completion, answered, action) in enumerate(parsed):
            seen = before._replace(messages=(*place.messages, action))
            sent = sent_message(answered.turn)
            ids = sent_ids(answered.turn, action)
            # All choices but the first stand beside it.
            why = Restart.PARALLEL if index else reason
            reply = SampledReply(number, action, sent, ids, seen, completion, previous, why)
            place.end.add(sent, reply)
            self._replies.append(reply)
            answers.append(answered)
        return answers

    async def num_tokens(self, asked: ModelRequest) -> int:
        """The tokens of a request, as a whole prompt (count)."""
        return len(await self._rendered(asked.messages, asked.tools))

    def keep(self) -> None:
        """Make turns of all that was sampled; where nothing was, of the first prompt.

        Raises:
            StageError: there was no request.
        """
        _keep(self._episode, self._replies)
        if not self._replies and self._first_prompt is not None:
            self._episode.keep(self._first_prompt, [False] * len(self._first_prompt))

    def so_far(self) -> Callable[[], Episode]:
        """Makes an episode of the replies so far, in any thread; this one goes on untouched."""
        episode, replies = self._episode.copied(), [*self._replies]

        def ended() -> Episode:
            _keep(episode, replies)
            return episode.cut()

        return ended

    @property
    def has_asked(self) -> bool:
        """Whether a request was read as far as its prompt."""
        return self._first_prompt is not None

    def _check_room(self, asked: ModelRequest) -> None:
        most = min(self._episode.limits.max_turns, _MOST_REPLIES)
        if self._num_asked + asked.n > most:
            self.was_cut = True
            raise RefusedError(f"The episode has {most:,} replies at most, and these are over; end it.")

    def _check_length(self, length: int) -> None:
        limit = self._episode.limits.max_tokens
        if limit is not None and length >= limit:
            self.was_cut = True
            raise RefusedError(
                f"The messages have {length:,} tokens, and an episode has {limit:,} with the reply; "
                "send fewer.",
                CONTEXT_LENGTH,
            )

    async def _prompt(
        self, place: Place, tools: Sequence[ToolSchema]
    ) -> tuple[list[int], SampledReply | None, Restart]:
        """The tokens of a request, the reply that they go on from, and why there is none."""
        before, reason = place.continued, place.reason
        if before is not None and all(message.role != "assistant" for message in place.new):
            try:
                added = await self._episode.tokens.extend(before.seen, place.new, tools)
            except RenderingError as error:
                raise RefusedError(sentence_of(error)) from None
            if not isinstance(added, Restart):
                return [*before.seen.prompt_ids, *before.seen.completion_ids, *added], before, reason
            reason = added
        return await self._rendered(place.messages, tools), None, reason

    async def _rendered(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        try:
            return await self._episode.tokens.render(messages, tools)
        except (RenderingError, UserError) as error:
            # What a client writes may have no form in this model's template.
            raise RefusedError(sentence_of(error)) from None

    async def _sampled(self, prompt: Sequence[int], asked: ModelRequest, watch: Watch | None) -> Completion:
        tokens = self._episode.tokens
        return await tokens.sample(
            prompt, max_new_tokens=asked.max_tokens, stop=asked.stop, tools=asked.tools, watch=watch
        )

    def _shown(self, prompt: Sequence[int], asked: ModelRequest) -> Shown:
        """What the first tokens of a reply show of it."""
        tokens = self._episode.tokens

        async def shown(ids: list[int]) -> ReplyTurn:
            action = await tokens.parse(ids, asked.tools, prompt_ids=prompt)
            turn = turn_of(action, lambda: self._text(ids), None, id_of("") if asked.tools else None)
            is_open = is_thinking(lambda ids: str(tokens.tokenizer.decode(ids)), prompt, ids)
            return turn._replace(is_open=is_open)

        return shown

    def _text(self, ids: list[int]) -> str:
        return str(self._episode.tokens.tokenizer.decode(ids, skip_special_tokens=True))

    async def _answered(
        self, seen: Seen, completion: Completion, asked: ModelRequest, name: str
    ) -> tuple[Answered, Message]:
        """A reply, and the message that it was parsed as."""
        tokens, ids = self._episode.tokens, list(seen.completion_ids)
        action = await tokens.parse(ids, asked.tools, prompt_ids=seen.prompt_ids)
        matched = completion.matched
        stopped_by = matched if isinstance(matched, str) and matched in asked.stop else None
        name_of = id_of(f"{self._episode.id}/{name}")
        turn = turn_of(
            action,
            lambda: self._text(ids),
            stopped_by,
            name_of if asked.tools else None,
        )
        if completion.finish is Finish.LENGTH:
            # By the episode or the run, unless the client has asked for no more.
            self.was_cut |= asked.max_tokens is None or len(ids) < asked.max_tokens
        texts = [str(tokens.tokenizer.decode([token])) for token in ids] if asked.logprobs else ()
        num_thought = self._span(ids, "", turn.reasoning).stop if turn.reasoning else 0
        content = self._span(ids, turn.reasoning, turn.content) if asked.logprobs else slice(None)
        prompt = len(seen.prompt_ids)
        return Answered(turn, completion, prompt, stopped_by, texts, num_thought, content), action

    def _span(self, ids: list[int], before: str, piece: str) -> slice:
        """The tokens of a piece of a reply, which comes after another one; all, where it is not one of it."""
        text = self._text(ids)
        start = text.find(piece, max(text.find(before), 0) + len(before))
        if start < 0 or not piece:
            return slice(0, len(ids))
        first, last = (
            bisect_left(range(len(ids)), length, key=lambda number: len(self._text(ids[: number + 1])))
            for length in (start + 1, start + len(piece))
        )
        return slice(first, last + 1)


def note(counts: Counter[str], asked: ModelRequest) -> None:
    """Count a request."""
    counts["requests"] += 1
    counts.update(f"overruled_{name}" for name in asked.overruled)
    counts.update({f"changed_{Change.SPLIT}": asked.num_split} if asked.num_split else {})


def id_of(name: str) -> Callable[[int], str]:
    """Ids of the calls of a reply, by their numbers: equal where the episode is played again."""
    return lambda number: hashlib.sha256(f"{name}/{number}".encode()).hexdigest()[:ID_CHARS]


def sent_message(turn: ReplyTurn) -> Message:
    """A reply as its client sees it."""
    calls = tuple(replace(call, raw=arguments_of(call)) for call in turn.calls)
    return Message("assistant", turn.content, turn.reasoning or None, calls)


def sent_ids(turn: ReplyTurn, action: Message) -> Mapping[str, str]:
    """The ids of the calls that its client is sent -> those of the message that was parsed."""
    readable = [call.id for call in action.tool_calls if call.arguments is not None]
    return dict(zip((call.id for call in turn.calls), readable, strict=False))


def _keep(episode: EpisodeInPlay, replies: Sequence[SampledReply]) -> None:
    """Make turns of replies."""
    for last, why in _trajectories(replies):
        ids = [*last.seen.prompt_ids, *last.seen.completion_ids]
        trained = [False] * len(ids)
        reply: SampledReply | None = last
        while reply is not None:
            start, length = len(reply.seen.prompt_ids), len(reply.seen.completion_ids)
            trained[start : start + length] = [True] * length
            reply = reply.previous
        episode.keep(ids, trained, reason=why)


def _trajectories(replies: Sequence[SampledReply]) -> Iterator[tuple[SampledReply, Restart]]:
    """The last reply of each trajectory, in the order of the first ones, and why that one begins it."""
    following: dict[int, SampledReply] = {}
    begins: list[SampledReply] = []
    for reply in sorted(replies, key=lambda reply: reply.number):
        if reply.previous is None or id(reply.previous) in following:
            begins.append(reply)
        else:
            following[id(reply.previous)] = reply
    for first in begins:
        last = first
        while id(last) in following:
            last = following[id(last)]
        yield last, first.reason

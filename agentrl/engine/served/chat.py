"""POST /v1/chat/completions: messages are rendered, completed and parsed as in an episode.

Prompts and turns of any length are rendered and parsed in bounded time, long ones beside the event loop
(`EpisodeRenderer`). Text of the client cannot be markup of the chat template. A call that cannot be read,
and one that no tool was offered for, is part of the content.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from agentrl.engine.served import replies
from agentrl.engine.served.chat_replies import (
    ID_CHARS,
    Body,
    Deltas,
    ReplyHead,
    ReplyTurn,
    choice,
    chunk_part,
    event_of,
    finish_of,
    is_thinking,
    token_logprob,
    turn_of,
    usage_of,
)
from agentrl.engine.served.chat_wire import ChatRequest, read_chat
from agentrl.engine.served.completions import Completions
from agentrl.engine.served.pending import Client
from agentrl.engine.served.replies import Answer
from agentrl.engine.served.requests import (
    GREEDY_BELOW,
    SEEDS,
    CompletionRequest,
    RefusedError,
    RequestLimits,
    TextCodec,
    sentence_of,
)
from agentrl.errors import EngineError, RenderingError, UserError
from agentrl.http.requests import off_loop
from agentrl.http.serving import BodyReader, unless_disconnected
from agentrl.types import JSON, Completion, Finish
from agentrl.types.seams import EpisodeRenderer, Sampling

_CLIENT_IS_GONE = 499
_NO_CHAT = (
    "This model's tokenizer has no chat template that can be used; send text to /generate, or serve a folder "
    "whose tokenizer has a chat template."
)
_ABORTED = "The completion was aborted before its end; send the request again."


@dataclass(frozen=True, slots=True)
class _Chat:
    """A request with its head and its completions, which share a prompt."""

    request: ChatRequest
    head: ReplyHead
    items: tuple[CompletionRequest, ...]


class ChatCompletions:
    """The endpoint is `reply`.

    renderer: of the model's chat template; None = it has none, and every request is refused.
    name: of the model.
    """

    def __init__(
        self,
        completions: Completions,
        renderer: EpisodeRenderer | None,
        codec: TextCodec,
        *,
        name: str,
        limits: RequestLimits,
        bodies: BodyReader,
    ) -> None:
        self._completions = completions
        self._renderer = renderer
        self._codec = codec
        self._name = name
        self._limits = limits
        self._bodies = bodies

    async def reply(self, request: Request) -> Response:
        """The reply to a request.

        Raises:
            RefusedError: it is invalid, or exceeds a bound.
            HTTPException: too much is pending; the completion was aborted.
            EngineError: the engine failed.
        """
        body = await self._bodies.read(request)
        renderer = self._renderer
        if renderer is None:
            raise RefusedError(_NO_CHAT)
        parsed = await off_loop(read_chat, body)
        client = Client.of(request)
        chat = await unless_disconnected(request, self._prepared(parsed, renderer))
        if chat is None:
            return Response(status_code=_CLIENT_IS_GONE)
        self._completions.pending.check(client, chat.items)
        if parsed.stream:
            events = self._events(request, chat, renderer, client)
            return StreamingResponse(events, media_type="text/event-stream")
        whole = await unless_disconnected(request, self._whole(chat, renderer, client))
        return Response(status_code=_CLIENT_IS_GONE) if whole is None else JSONResponse(whole)

    async def _prepared(self, parsed: ChatRequest, renderer: EpisodeRenderer) -> _Chat:
        max_chars = self._limits.max_context_len * self._codec.max_token_chars
        if parsed.num_characters > max_chars:
            raise RefusedError(
                f"The messages have {parsed.num_characters:,} characters; no text of more than {max_chars:,} "
                f"fits the context of {self._limits.max_context_len:,} tokens.",
                "context_length_exceeded",
            )
        try:
            prompt = tuple(await renderer.render(parsed.messages, parsed.tools))
        except (RenderingError, UserError) as error:
            raise RefusedError(sentence_of(error)) from None
        room = self._limits.max_context_len - len(prompt)
        if room < 1:
            raise RefusedError(
                f"The messages have {len(prompt):,} tokens, and the context holds "
                f"{self._limits.max_context_len:,}, the reply included; send fewer.",
                "context_length_exceeded",
            )
        stops = renderer.stops(parsed.tools)
        sampling = Sampling(
            max_new_tokens=min(parsed.max_tokens or room, room),
            temperature=0.0 if parsed.temperature < GREEDY_BELOW else parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
            stop=(*stops.strings, *parsed.stop),
            stop_token_ids=tuple(token for token in stops.token_ids if token < self._limits.vocab_size),
        )
        head = ReplyHead(f"chatcmpl-{uuid.uuid4().hex}", self._name, int(time.time()))
        return _Chat(parsed, head, tuple(_items(parsed, head, prompt, sampling)))

    async def _whole(self, chat: _Chat, renderer: EpisodeRenderer, client: Client) -> Body:
        answers, _ = await self._completions.all(chat.items, client)
        completions = [answer.completion for answer in answers]
        if any(completion.finish is Finish.ABORT for completion in completions):
            raise HTTPException(503, _ABORTED)
        choices: list[JSON] = []
        for index, completion in enumerate(completions):
            turn = await self._turn(chat, renderer, completion, ended=True)
            choices.append(choice(index, turn, completion, self._logprobs(chat, completion, 0)))
            # The texts of the tokens of one choice are the most that is decoded at once.
            await asyncio.sleep(0)
        usage = usage_of(len(chat.items[0].prompt_ids), completions)
        return {**chat.head.body("chat.completion", choices), "usage": usage}

    async def _events(
        self, request: Request, chat: _Chat, renderer: EpisodeRenderer, client: Client
    ) -> AsyncIterator[str]:
        """Server-sent events: the role, then parts of each choice as they are certain, `[DONE]`."""
        deltas = [Deltas(bool(chat.request.tools), chat.request.stop) for _ in chat.items]
        sent, ended_ones = [0] * len(chat.items), list[Completion]()

        async def written(number: int, answer: Answer | EngineError, ended: bool) -> str:
            if isinstance(answer, EngineError):
                return event_of(replies.openai_error(str(answer), 500 if answer.__cause__ else 400))
            completion = answer.completion
            if ended and completion.finish is Finish.ABORT:
                return event_of(replies.openai_error(_ABORTED, 503))
            turn = await self._turn(chat, renderer, completion, ended=ended)
            parts = list(deltas[number].next(turn, ended=ended))
            if not parts and not ended:
                return ""
            logprobs = self._logprobs(chat, completion, sent[number])
            sent[number] = len(completion.token_ids)
            parts = parts or ([{}] if chat.request.logprobs else [])
            events = [
                _chunk(chat, number, part, logprobs if first == 0 else None)
                for first, part in enumerate(parts)
            ]
            if ended:
                ended_ones.append(completion)
                events.append(_chunk(chat, number, {}, None, finish_of(turn, completion)))
            return "".join(events)

        for number in range(len(chat.items)):
            yield _chunk(chat, number, {"role": "assistant", "content": ""}, None)
        async for event in self._completions.events(request, chat.items, client, written):
            if event:
                yield event
        if chat.request.include_usage:
            usage = usage_of(len(chat.items[0].prompt_ids), ended_ones)
            yield event_of({**chat.head.body("chat.completion.chunk", []), "usage": usage})
        yield "data: [DONE]\n\n"

    async def _turn(
        self, chat: _Chat, renderer: EpisodeRenderer, completion: Completion, *, ended: bool
    ) -> ReplyTurn:
        tools, prompt = chat.request.tools, chat.items[0].prompt_ids
        ids: list[int] = completion.token_ids.tolist()
        matched = completion.matched if ended else None
        if isinstance(matched, int) and matched not in renderer.stops(tools).token_ids:
            # An end of the model's own, which is no end of a turn in its template.
            ids = ids[:-1]
        message = await renderer.parse(ids, tools, prompt_ids=prompt)
        stopped_by = matched if isinstance(matched, str) and matched in chat.request.stop else None
        turn = turn_of(message, lambda: self._codec.decode(ids, True), stopped_by, _new_id if tools else None)
        return turn._replace(
            is_open=not ended and is_thinking(lambda ids: self._codec.decode(ids, False), prompt, ids)
        )

    def _logprobs(self, chat: _Chat, completion: Completion, start: int) -> JSON:
        """Of the tokens from `start` on, where they are asked for: of all that were sampled."""
        if not chat.request.logprobs:
            return None
        pairs = zip(completion.token_ids[start:].tolist(), completion.logprobs[start:].tolist(), strict=True)
        tokens = [token_logprob(self._codec.decode([token], False), logprob) for token, logprob in pairs]
        return {"content": tokens, "refusal": None}


def _new_id(number: int) -> str:
    del number
    return uuid.uuid4().hex[:ID_CHARS]


def _items(
    parsed: ChatRequest, head: ReplyHead, prompt: tuple[int, ...], sampling: Sampling
) -> Iterator[CompletionRequest]:
    """The completions of a request; those of one seed have seeds of their own, as copies in /generate."""
    for copy in range(parsed.n):
        rid = head.id if parsed.n == 1 else f"{head.id}_{copy}"
        seed = None if parsed.seed is None else (parsed.seed + copy) % SEEDS
        yield CompletionRequest(
            rid,
            "",
            prompt,
            replace(sampling, seed=seed),
            parsed.logprobs,
            keep_special=False,
            keep_stop=False,
        )


def _chunk(
    chat: _Chat, number: int, delta: Mapping[str, JSON], logprobs: JSON, finish_reason: str | None = None
) -> str:
    part = chunk_part(number, delta, logprobs, finish_reason)
    body = chat.head.body("chat.completion.chunk", [part])
    # OpenAI's streams have the field in every chunk where the last one has the usage.
    return event_of({**body, "usage": None} if chat.request.include_usage else body)

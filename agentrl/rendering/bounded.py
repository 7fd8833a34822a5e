"""The work of a renderer in bounded time: short work on the event loop, the rest in processes that are ended.

What a model writes is untrusted. The parsers of some families take quadratic or cubic time in the length of
a call (3,000 line ends in a call of DeepSeek-V3: 17 s), and a long text takes long in any tokenizer. So only
work that is short whatever the text says is done on the event loop:

    a turn       without a marker of a call: up to 2,048 tokens and 16,384 characters
                 with one: the same before it, and up to 320 characters from there on; an added token
                 counts as 12 at most
    messages     up to 16,384 characters, the tools of a first prompt included; a message counts as 32 more

Everything else goes to a worker, which the kernel ends at a limit of CPU time. A turn that cannot be parsed
within it is malformed text of the model, which is scored.
"""

from __future__ import annotations

import os
import pickle
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from agentrl.errors import AgentRLError, RenderingError
from agentrl.processes.forking import Death, Workers, started
from agentrl.rendering.messages import MarkupEscaper, escaped_tool, unreadable_call
from agentrl.tools import Shared
from agentrl.types import Message, Observation, Restart
from agentrl.types.seams import Seen, Stops, Tokenizer, ToolSchema

T = TypeVar("T")

_PLAIN_TOKENS, _PLAIN_CHARS, _PLAIN_PROMPT = 2_048, 16_384, 32_768
_MESSAGE_CHARS = 32
_CALL_CHARS = 320
_MARKER_CHARS = 12
_PROCESSES = 4
_MEMORY_MB = 1024
_RENDER_CPU_S = 30.0
_PARSE_CPU_S = 1.0
_PARSE_CPU_S_PER_TOKEN = 0.001
_MAX_PARSE_CPU_S = 10.0
_PROGRAM = Path(__file__).parent / "worker.py"
# Byte tokens of sentencepiece; 3C is `<` itself.
_BYTE = re.compile(r"<0x(?!3C)[0-9A-F]{2}>")
_REASONING = ("<think>", "</think>")


class TokenRenderer(ABC):
    """A Renderer over a tokenizer; can be pickled, so that a process of its own does the same."""

    has_linear_parser = True
    """Whether its parser takes linear time, whatever the text says."""
    more_stops: Stops = Stops((), ())
    """What ends a turn beside what its dialect ends it with."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._escape = MarkupEscaper(tokenizer)
        self._tools: tuple[ToolSchema, ...] = ()
        self._escaped_tools: tuple[ToolSchema, ...] = ()

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Renderer`, as of all methods."""
        return self._tokenizer

    def stops(self, tools: Sequence[ToolSchema]) -> Stops:
        """What ends a turn."""
        own, more = self.ends(tools), self.more_stops
        if not any(more):
            return own
        strings = dict.fromkeys((*own.strings, *more.strings))
        return Stops(tuple(strings), tuple(sorted({*own.token_ids, *more.token_ids})))

    @abstractmethod
    def ends(self, tools: Sequence[ToolSchema]) -> Stops:
        """What ends a turn in the dialect itself."""

    @abstractmethod
    def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The first prompt."""

    @abstractmethod
    def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """The world's tokens after a turn."""

    @abstractmethod
    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """A sampled turn as a message."""

    @abstractmethod
    def write(self, action: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens of an action."""

    def looks_back(self, observation: Observation) -> bool:
        """Whether `extend` renders the whole conversation for an observation of these roles."""
        del observation
        return False

    def rendered_on(
        self, seen: Seen, observation: Observation, otherwise: Restart = Restart.REWRITTEN
    ) -> list[int] | Restart:
        """What follows a prefix in the whole conversation, where that begins with it, token for token.

        For a turn that a stop of the run has ended, in a dialect that cannot tell how it would be closed. A
        conversation that would take long to render begins a new prefix. otherwise: why.
        """
        messages, prefix = (*seen.messages, *observation), [*seen.prompt_ids, *seen.completion_ids]
        is_closed = seen.completion_ids[-1:] and seen.completion_ids[-1] in self.ends(seen.tools).token_ids
        if is_closed or not any(self.more_stops) or _num_characters(messages) > _PLAIN_CHARS:
            return otherwise
        try:
            rendered = self.render(messages, seen.tools)
        except RenderingError:
            return otherwise
        return rendered[len(prefix) :] if rendered[: len(prefix)] == prefix else otherwise

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        # transformers looks at every id of a list, which takes longer than the decoding; not of an array.
        return str(self._tokenizer.decode(np.asarray(ids, np.int64), skip_special_tokens=False))

    def escaped_tools(self, tools: Sequence[ToolSchema]) -> tuple[ToolSchema, ...]:
        """The tools with escaped markup: a server that offers them wrote their descriptions."""
        if tuple(tools) != self._tools:
            self._tools = tuple(tools)
            self._escaped_tools = tuple(escaped_tool(tool, self._escape) for tool in tools)
        return self._escaped_tools

    @cached_property
    def bounded(self) -> BoundedRenderer:
        """The same in bounded time."""
        return BoundedRenderer(self, _Measure(self._tokenizer, self))


class BoundedRenderer:
    """An EpisodeRenderer: no text holds the event loop, whatever the renderer makes of it."""

    def __init__(self, renderer: TokenRenderer, measure: _Measure) -> None:
        self._renderer = renderer
        self._is_short = measure
        self._setup = pickle.dumps(renderer)
        self._workers = Shared(self._started, "rendering")

    def stops(self, tools: Sequence[ToolSchema]) -> Stops:
        """What ends a turn."""
        return self._renderer.stops(tools)

    async def render(self, messages: Observation, tools: Sequence[ToolSchema]) -> list[int]:
        """The tokens of a prompt.

        Waits for: a free worker, where the messages are long.

        Raises:
            RenderingError: the chat template refuses the messages, or takes longer than 30 s of CPU time.
        """
        if _num_characters(messages) + _num_of_tools(tools) <= _PLAIN_CHARS:
            return self._renderer.render(messages, tools)
        tokens = await self._result(partial(_render, messages, tools), _RENDER_CPU_S)
        if isinstance(tokens, Death):
            raise RenderingError(f"a conversation cannot be rendered: the process {_how(tokens)}")
        return list(tokens)

    async def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema]
    ) -> list[int] | Restart:
        """The tokens of an observation; or why the prefix does not hold: also where this takes too long.

        Waits for: a free worker, where the last turn or the observation is long.

        Raises:
            RenderingError: the chat template refuses the messages.
        """
        is_short = self._is_short(seen.completion_ids, seen.prompt_ids)
        rendered = observation
        if self._renderer.looks_back(observation):
            rendered = (*seen.messages, *observation)
        if is_short and _num_characters(rendered) <= _PLAIN_CHARS:
            return self._renderer.extend(seen, observation, tools)
        packed = seen._replace(
            prompt_ids=_packed(seen.prompt_ids), completion_ids=_packed(seen.completion_ids)
        )
        work = partial(_extend, packed, observation, tools)
        tokens = await self._result(work, _limit(len(seen.completion_ids)))
        if isinstance(tokens, Death):
            return Restart.REWRITTEN
        return tokens if isinstance(tokens, Restart) else list(tokens)

    async def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema], *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """A sampled turn as a message; a malformed call where its parser takes too long.

        Waits for: a free worker, where the turn is long.
        """
        if self._is_short(ids, prompt_ids):
            return self._renderer.parse(ids, tools, prompt_ids=prompt_ids)
        packed = _packed(ids)
        message = await self._result(partial(_parse, packed, tools, _packed(prompt_ids)), _limit(len(ids)))
        if not isinstance(message, Death):
            return message
        text = await self._result(partial(_decode, packed), _limit(len(ids)))
        raw = "" if isinstance(text, Death) else text
        reason = "The turn cannot be parsed in time; write a short call in the form that was asked for"
        return Message("assistant", tool_calls=(unreadable_call(reason, raw, 0),))

    async def _result(self, work: Callable[[TokenRenderer], T], cpu_s: float) -> T | Death:
        """The result of work in a worker; the worker's death where the work itself caused it.

        Raises:
            RenderingError: the processes died twice, without fault of the work.
            AgentRLError: the work raised it.
        """
        request = pickle.dumps(work)
        for _ in range(2):
            workers = await self._workers.get()
            try:
                reply = await workers.reply(request, cpu_s)
            except (OSError, EOFError):
                await self._workers.drop(workers)
                continue
            if isinstance(reply, Death):
                if reply.is_from_outside:
                    continue
                return reply
            result: T | AgentRLError = pickle.loads(reply)
            if isinstance(result, AgentRLError):
                raise result
            return result
        raise RenderingError("the processes that parse and render long texts were killed twice")

    def _started(self) -> AbstractAsyncContextManager[Workers]:
        processes = min(os.cpu_count() or 1, _PROCESSES)
        return started(_PROGRAM, processes, memory_mb=_MEMORY_MB, setup=self._setup)


class _Measure:
    """Whether a turn is parsed in a short time, whatever its text says; by a bound on its characters.

    A token is a marker where a parser of a family may take it, or text with it, for the beginning of a call:
    the added tokens, and those that hold `<`. Blanks, tokens that end a turn and those around reasoning are
    no markers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: TokenRenderer) -> None:
        vocabulary = tokenizer.get_vocab()
        # The string of a token has at least the characters of its text; some decoders add a blank.
        self._lengths = [1] * (max(vocabulary.values(), default=-1) + 1)
        added = tokenizer.get_added_vocab()
        for token, id in vocabulary.items():
            # Markers of up to 30 characters would make every call a long one.
            most = _MARKER_CHARS if token in added else len(token)
            self._lengths[id] = min(len(token), most) + 1
        self._reasoning = {vocabulary[token] for token in _REASONING if token in vocabulary}
        self._markers: set[int] = set()
        if not renderer.has_linear_parser:
            markers = {id for token, id in added.items() if token.strip()}
            written = {id for token, id in vocabulary.items() if "<" in token and not _BYTE.fullmatch(token)}
            self._markers = (markers | written) - self._reasoning - set(renderer.stops(()).token_ids)

    def __call__(self, ids: Sequence[int], prompt_ids: Sequence[int]) -> bool:
        if len(ids) > _PLAIN_TOKENS or len(prompt_ids) > _PLAIN_PROMPT:
            return False
        try:
            num_characters = self._num_characters(ids)
        except IndexError:  # engines may sample ids that the tokenizer lacks
            return False
        if num_characters <= _CALL_CHARS or num_characters > _PLAIN_CHARS:
            return num_characters <= _CALL_CHARS
        if self._markers.isdisjoint(ids):
            return True
        return self._num_characters(islice(ids, self._start_of_content(ids), None)) <= _CALL_CHARS

    def _num_characters(self, ids: Iterable[int]) -> int:
        return sum(map(self._lengths.__getitem__, ids))

    def _start_of_content(self, ids: Sequence[int]) -> int:
        """The last token around reasoning before the first marker."""
        start = 0
        for index, token in enumerate(ids):
            if token in self._markers:
                break
            if token in self._reasoning:
                start = index
        return start


def _num_characters(messages: Observation) -> int:
    return sum(
        _MESSAGE_CHARS
        + len(message.text)
        + len(message.reasoning or "")
        + sum(len(call.raw) or len(str(call.arguments)) for call in message.tool_calls)
        for message in messages
    )


def _num_of_tools(tools: Sequence[ToolSchema]) -> int:
    return sum(len(tool.name) + len(tool.description) + len(str(tool.parameters)) for tool in tools)


def _limit(num_tokens: int) -> float:
    """Seconds of CPU time: an honest call of DeepSeek-V4 takes quadratic time, too."""
    return min(_PARSE_CPU_S + _PARSE_CPU_S_PER_TOKEN * num_tokens, _MAX_PARSE_CPU_S)


def _packed(ids: Sequence[int]) -> array[int]:
    return array("i", ids)


def _how(death: Death) -> str:
    return "was ended at its limit of CPU time" if death.is_late else "crashed, or ran out of memory"


# These run in a worker, so that each can be pickled by its name.


def _render(messages: Observation, tools: Sequence[ToolSchema], renderer: TokenRenderer) -> array[int]:
    return _packed(renderer.render(messages, tools))


def _extend(
    seen: Seen, observation: Observation, tools: Sequence[ToolSchema], renderer: TokenRenderer
) -> array[int] | Restart:
    unpacked = seen._replace(prompt_ids=list(seen.prompt_ids), completion_ids=list(seen.completion_ids))
    tokens = renderer.extend(unpacked, observation, tools)
    return tokens if isinstance(tokens, Restart) else _packed(tokens)


def _parse(
    ids: array[int], tools: Sequence[ToolSchema], prompt_ids: array[int], renderer: TokenRenderer
) -> Message:
    return renderer.parse(list(ids), tools, prompt_ids=list(prompt_ids))


def _decode(ids: array[int], renderer: TokenRenderer) -> str:
    return renderer.decode(ids)

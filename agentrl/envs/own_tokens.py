"""Prompts that a generate function writes itself, token by token, and what the policy sampled after them.

    prompt     w1 w2 w3
    sample     w1 w2 w3 -> p1 p2 p3 p4
    sample     w1 w2 w3 p1 p2 p3 w4 -> p5 p6        the function dropped p4, and wrote w4
    keep       w1 w2 w3 p1 p2 p3 w4 p5 p6           trained: p1 p2 p3 p5 p6

The function may drop the end of what was sampled, and write what it likes in between. It cannot have a token
trained that the policy did not sample in this place, after exactly these tokens.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.envs.play import Game
from agentrl.errors import StageError, UserError
from agentrl.types import Completion, Finish, Message, Observation, Restart, Turn, TurnTokens
from agentrl.types.arrays import IntArray
from agentrl.types.seams import Sampling, Seen, Tokenizer, TokenSource, ToolSchema, Watch

_MAX_REQUESTS = 1000
_NONE = -2
"""No sampled token: no number follows it."""


class NeedsTokensError(UserError):
    """The agent has no tokens: it is a script, a person or a chat endpoint."""


class _Request(NamedTuple):
    """A prompt, what was sampled after it, and the number of its first sampled token in the episode."""

    prompt_ids: IntArray
    completion: Completion
    first: int


class OwnTokens:
    """The policy of an episode with one agent, asked for tokens after any others.

    sampling, render and sample need an agent with tokens.
    """

    def __init__(self, game: Game) -> None:
        self._game = game
        (self._name,) = game.players
        self._requests: list[_Request] = []
        self._num_asked = self._num_sampled = 0
        self._kept: set[int] = set()

    def copied(self) -> OwnTokens:
        """What was sampled so far, of which no trajectory has anything."""
        copy = OwnTokens(self._game)
        copy._requests = [*self._requests]
        return copy

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's, a tokenizer of Hugging Face.

        Raises:
            NeedsTokensError: the agent has no tokens, as of all methods.
        """
        return self._source.tokenizer

    @property
    def sampling(self) -> Sampling:
        """How the first turn of the episode is sampled: temperature, lengths, stops of the run."""
        session = self._game.session(self._name, 0)
        return self._source.sampling(0, self._offered(None), session)

    @property
    def was_aborted(self) -> bool:
        """Whether the engine gave up a request, as where the run ends."""
        return any(request.completion.finish is Finish.ABORT for request in self._requests)

    async def render(self, observation: Observation, tools: Sequence[ToolSchema] | None = None) -> list[int]:
        """A whole prompt in the run's own dialect, up to where the policy writes.

        tools: on offer; None = those of the environment, as of all methods.
        """
        return await self._source.render(observation, self._offered(tools))

    async def extend(
        self, seen: Seen, observation: Observation, tools: Sequence[ToolSchema] | None = None
    ) -> list[int] | Restart:
        """The tokens of new messages after a turn, up to where the policy writes again; or why the prefix
        cannot go on."""
        return await self._source.extend(seen, observation, self._offered(tools))

    async def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[ToolSchema] | None = None,
        *,
        prompt_ids: Sequence[int] = (),
    ) -> Message:
        """What was sampled after a prompt, as a message."""
        return await self._source.parse(ids, self._offered(tools), prompt_ids=prompt_ids)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        tools: Sequence[ToolSchema] | None = None,
        watch: Watch | None = None,
    ) -> Completion:
        """What the policy samples after exactly these tokens. `EpisodeInPlay.keep` makes turns of it.

        max_new_tokens: at most; None = as many as the run's limits leave. stop, stop_token_ids: what ends it
        beside the stops of the run; the end itself is sampled, too. tools: on offer.
        watch: sees it before, see `StreamingPolicy`.

        Where the limit of tokens leaves none, and after the episode's deadline, it is empty and its finish is
        `length`. `limits.max_turns` does not apply: the function says when it stops.

        Raises:
            StageError: the prompt is empty, or it is the thousandth of this episode.
        """
        if not len(prompt_ids) or self._num_asked == _MAX_REQUESTS:
            raise _invalid(f"sample() needs a prompt, and answers {_MAX_REQUESTS} in an episode")
        # Several may be asked at once: each has a number, and so a seed, of its own.
        session = self._game.session(self._name, self._num_asked)
        self._num_asked += 1
        own = self._source.sampling(len(prompt_ids), self._offered(tools), session)
        most = own.max_new_tokens if max_new_tokens is None else min(max_new_tokens, own.max_new_tokens)
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        if most < 1:
            # A function that goes on asking must not hold the event loop.
            await asyncio.sleep(0)
            return self._asked(prompt, _nothing())
        sampling = replace(
            own,
            max_new_tokens=most,
            stop=tuple(dict.fromkeys((*own.stop, *stop))),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *stop_token_ids))),
        )
        return self._asked(prompt, await self._source.sample(prompt.tolist(), sampling, session, watch))

    def turns_of(self, ids: Sequence[int], trained: Sequence[bool], step: int) -> list[Turn]:
        """The turns of a trajectory: each ends with a run of trained tokens. The world's after the last one
        are left out, since no policy reads them. A token that a trajectory has already is the world's here.

        ids: int [T]. trained: bool [T]. step: of the first turn.

        Raises:
            StageError: a trained token is not one that was sampled there.
        """
        tokens, wanted = np.asarray(ids, dtype=np.int32), np.asarray(trained, dtype=bool)
        if tokens.shape != wanted.shape or tokens.ndim != 1 or not len(tokens):
            raise _invalid(f"keep() needs as many flags as tokens, got {tokens.shape} and {wanted.shape}")
        origin = self._origin(tokens)
        unknown = np.flatnonzero(wanted & (origin == _NONE))
        if len(unknown):
            raise _invalid(self._not_sampled(tokens, int(unknown[0])))
        wanted &= ~np.isin(origin, list(self._kept))
        turns: list[Turn] = []
        before = 0
        for start, end in _runs(np.where(wanted, origin, _NONE)):
            self._kept.update(origin[start:end].tolist())
            completion, crc32 = self._sampled(int(origin[start]), end - start)
            turns.append(self._turn(tokens[before:start], completion, crc32, step + len(turns)))
            before = end
        # Tokens that no policy reads must not lengthen the sample.
        most = self._game.world.limits.max_tokens
        return turns or [self._turn(tokens[:most], _nothing(), None, step)]

    def _offered(self, tools: Sequence[ToolSchema] | None) -> Sequence[ToolSchema]:
        return self._game.world.tools_of(self._name) if tools is None else tools

    @cached_property
    def _source(self) -> TokenSource:
        agent = self._game.players[self._name]
        if not isinstance(agent, TokenSource):
            raise NeedsTokensError(
                "This generate function writes its own tokens, and a script or a chat endpoint has none; "
                "play it with a model that agentrl samples from, by --model or in a run."
            )
        return agent

    def _asked(self, prompt: IntArray, completion: Completion) -> Completion:
        self._requests.append(_Request(prompt, completion, self._num_sampled))
        # One number is left out, so that numbers that follow each other are of one request.
        self._num_sampled += len(completion.token_ids) + 1
        return completion

    def _origin(self, tokens: IntArray) -> NDArray[np.int64]:
        """The number of the sampled token that each is: the same one, after the same ones."""
        found = []
        for prompt, completion, first in self._requests:
            start = len(prompt)
            if start < len(tokens) and np.array_equal(tokens[:start], prompt):
                length = _num_equal(completion.token_ids, tokens[start:])
                found.append((start, length, first not in self._kept, first))
        origin = np.full(len(tokens), _NONE, dtype=np.int64)
        begun = np.full(len(tokens), len(tokens), dtype=np.int64)
        # Of several completions of one prompt, that one goes on here which reaches furthest, and of equal
        # ones one that no trajectory has. What begins within another and reaches no further branches off.
        for start, length, _, first in sorted(found):
            place = slice(start, start + length)
            if not length or (begun[place] < start).all():
                continue
            origin[place], begun[place] = np.arange(first, first + length), start
        return origin

    def _sampled(self, number: int, length: int) -> tuple[Completion, int | None]:
        """Some sampled tokens of one request, and the checksum of what stood before the first one."""
        asked = next(a for a in reversed(self._requests) if a.first <= number)
        start = number - asked.first
        crc32 = zlib.crc32(asked.prompt_ids.tobytes()) if start == 0 else None
        return _part(asked.completion, start, start + length), crc32

    def _turn(self, world: IntArray, completion: Completion, crc32: int | None, step: int) -> Turn:
        decode, ids = self.tokenizer.decode, completion.token_ids.tolist()
        seen = (Message("user", str(decode(world.tolist()))),) if len(world) else ()
        # The token that ends a turn is no part of its text.
        text = ids[:-1] if ids and not decode(ids[-1:], skip_special_tokens=True) else ids
        action = Message("assistant", str(decode(text)))
        return Turn(seen, action, TurnTokens(world.copy(), completion, crc32), step)

    def _not_sampled(self, tokens: IntArray, place: int) -> str:
        text = str(self.tokenizer.decode(tokens[place : place + 1].tolist()))
        return (
            f"token {place} ({text!r}) is to be trained, and the policy did not sample it after the tokens "
            "before it; keep the ids that sample() returned, and flag only these"
        )


def _num_equal(sampled: IntArray, tokens: IntArray) -> int:
    """How many of the first tokens of both are equal."""
    length = min(len(sampled), len(tokens))
    differs = np.flatnonzero(sampled[:length] != tokens[:length])
    return int(differs[0]) if len(differs) else length


def _runs(origin: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of consecutive numbers that are not `_NONE`."""
    bounds = [0, *(np.flatnonzero(np.diff(origin) != 1) + 1).tolist(), len(origin)]
    for start, end in pairwise(bounds):
        if origin[start] != _NONE:
            yield start, end


def _part(completion: Completion, start: int, end: int) -> Completion:
    """Some of its tokens. Where its end is dropped, what ended it is, too."""
    if (start, end) == (0, len(completion.token_ids)):
        return completion
    is_whole = end == len(completion.token_ids)
    return replace(
        completion,
        token_ids=completion.token_ids[start:end].copy(),
        logprobs=completion.logprobs[start:end].copy(),
        versions=completion.versions[start:end].copy(),
        finish=completion.finish if is_whole else Finish.STOP,
        matched=completion.matched if is_whole else None,
        extras={name: extra.take(range(start, end)) for name, extra in completion.extras.items()},
        # They are of what stands before its first token.
        prompt_extras={} if start else completion.prompt_extras,
        # Of the whole request, and counted once.
        speculation={} if start else completion.speculation,
    )


def _nothing() -> Completion:
    empty = np.zeros(0, dtype=np.int32)
    return Completion(empty, np.zeros(0, dtype=np.float32), empty.copy(), Finish.LENGTH)


def _invalid(detail: str) -> StageError:
    return StageError("generate", "invalid", detail)

"""A request in progress and what it has so far: in one reply, or in several where it was ended and went on.

A server reports one version for a whole reply, the one that serves when it ends. So before new weights come
every request is ended with what it has; asking again with the prompt and those tokens goes on from there, and
each part is of one version.
"""

from __future__ import annotations

import asyncio
import uuid
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from agentrl.engine.sglang import wire
from agentrl.errors import EngineError, RequestTooLargeError
from agentrl.protocols import Sampling
from agentrl.types import Completion, Finish

Decode = Callable[[Sequence[int]], str]

_SEED_STEP = 0x9E3779B97F4A7C15  # odd: no two parts of a completion share a seed


class Draft:
    """What was sampled so far. Its tokens are cut where the first stop string is whole.

    SGLang looks at the limit before it looks for stops, and overlooks a stop string that was written in more
    tokens than it would encode it in, or in two parts; all are mended here. decode: the text of tokens;
    without it nothing is cut. An end token of the model's own that is also the last one allowed is told as
    `length`.

    version: of the newest part. cached_tokens: of the prompt, when it was first asked for.
    """

    def __init__(self, sampling: Sampling, decode: Decode | None) -> None:
        self._sampling, self._decode = sampling, decode
        self._text = ""
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._finish: tuple[Finish, str | int | None] | None = None
        self.ids: list[int] = []
        self.version = 0
        self.cached_tokens: int | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing is left to ask for."""
        return self._finish is not None

    @property
    def rest(self) -> Sampling:
        """How to sample what is missing."""
        if not self.ids:
            return self._sampling
        seed = self._sampling.seed
        return replace(
            self._sampling,
            max_new_tokens=self._sampling.max_new_tokens - len(self.ids),
            seed=None if seed is None else seed + _SEED_STEP * len(self.ids),
        )

    def add(self, reply: wire.GenerateReply) -> None:
        """Append what a reply holds.

        Raises:
            EngineError: tokens and logprobs do not belong together, or it stopped at what nobody asked for.
            RequestTooLargeError: the server had room for fewer tokens than it was asked for.
        """
        meta, ids = reply.meta_info, reply.output_ids
        told = meta.output_token_logprobs
        if [entry[1] for entry in told] != ids:
            raise EngineError(
                f"the server sent {len(ids)} tokens, and logprobs of {len(told)} that are not the same; see "
                "its log."
            )
        versions = meta.output_token_versions or [meta.weight_version] * len(ids)
        if len(versions) != len(ids):
            raise EngineError(f"the server sent {len(ids)} tokens and {len(versions)} versions; see its log.")
        known = {version: wire.version_of(version) for version in {meta.weight_version, *versions}}
        self.ids += ids
        # A part's text may lack the blank that it begins with.
        joined = self._text + reply.text
        self._text = self._decode(self.ids) if self._text and self._decode else joined
        self._logprobs += [entry[0] for entry in told]
        self._versions += [known[version] for version in versions]
        self.version = known[meta.weight_version]
        if self.cached_tokens is None:
            self.cached_tokens = meta.cached_tokens
        self._finish = self._ending(meta.finish_reason)

    def completion(self) -> Completion:
        """All of it; finish = abort where it was ended before its end."""
        finish, matched = self._finish or (Finish.ABORT, None)
        size = len(self.ids)
        found = self._stop()
        if found is not None and (finish is not Finish.STOP or found[0] < size):
            finish, (size, matched) = Finish.STOP, found
        return Completion(
            np.asarray(self.ids[:size], np.int32),
            np.asarray(self._logprobs[:size], np.float32),
            np.asarray(self._versions[:size], np.int32),
            finish,
            matched,
            self.cached_tokens or 0,
            self._sampling.temperature,
        )

    def _ending(self, reason: wire.FinishReason) -> tuple[Finish, str | int | None] | None:
        """How it ended; None where it was ended before its end."""
        limit = self._sampling.max_new_tokens
        if reason.type == "abort" and (len(self.ids) < limit and self._stop() is None):
            return None
        if reason.type == "stop":
            if isinstance(reason.matched, str) and reason.matched not in self._sampling.stop:
                # Among others `NaN happened`, where the logits were no numbers.
                raise EngineError(
                    f"the server stopped at {reason.matched[:80]!r}, which nobody asked for; see its log."
                )
            return Finish.STOP, reason.matched
        if reason.type == "length" and len(self.ids) < limit:
            raise RequestTooLargeError(
                f"the server had room for {len(self.ids)} of max_new_tokens = {limit}; start it with a "
                "longer context or a larger cache, or ask for fewer tokens."
            )
        last = self.ids[-1]
        return (Finish.STOP, last) if last in self._sampling.stop_token_ids else (Finish.LENGTH, None)

    def _stop(self) -> tuple[int, str] | None:
        """After how many tokens the first stop string is whole, and which it is."""
        stops = self._sampling.stop
        ends = [(self._text.find(stop) + len(stop), stop) for stop in stops if stop in self._text]
        if not ends:
            return None
        end, stop = min(ends, key=lambda one: one[0])
        if self._decode is None or end == len(self._text):
            return len(self.ids), stop
        decode, ids = self._decode, self.ids
        size = 1 + bisect_left(range(1, len(ids)), True, key=lambda n: _holds(decode(ids[:n]), stops))
        whole = decode(ids[:size])
        return size, next((one for one in stops if one in whole), stop)


def _holds(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


ABORT_TIMEOUT_S = 30.0
ABORT_AGAIN_S = 0.2


class PendingRequest:
    """A request from when it is asked until it is answered.

    rid: names what was sent last. ticket: admits it, or, False, ends its waiting. aborted: it is to end with
    what it has. sent: a server may be working on it. idle: nothing is on its way. overdue: no server answered
    the request to end it.
    """

    def __init__(self, draft: Draft, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        self.draft, self.deadline = draft, deadline
        self.rid = ""
        self.ticket: asyncio.Future[bool] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.idle = asyncio.Event()
        self.idle.set()
        self.sent = False
        self.aborted = asyncio.Event()
        self.overdue = False

    def mark_sent(self) -> None:
        """It is about to be sent, under a name that no server has seen."""
        # An abort ends every rid that begins with its own: none is the beginning of another.
        self.rid = uuid.uuid4().hex
        self.sent = True
        self.idle.clear()

    def mark_returned(self, *, unknown: bool) -> None:
        """Nothing is on its way any longer. unknown: a server may still be working on it."""
        self.sent = unknown
        self.idle.set()

    def end(self) -> None:
        """It is answered."""
        self.idle.set()
        self.done.set_result(None)

    async def ended_by(self, abort: Callable[[str], Awaitable[None]]) -> None:
        """Ask for its end, again and again, until nothing of it is on its way.

        What ends a request may overtake the request itself. A server that does not answer in
        ABORT_TIMEOUT_S has lost it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + ABORT_TIMEOUT_S
        while not self.idle.is_set():
            if loop.time() > until and not self.deadline.expired():
                self.overdue = True
                self.deadline.reschedule(loop.time())
            await abort(self.rid)
            idle = asyncio.ensure_future(self.idle.wait())
            await asyncio.wait([idle], timeout=ABORT_AGAIN_S)
            idle.cancel()

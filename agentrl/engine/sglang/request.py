"""A request in progress and its tokens so far: from one reply, or several where it was ended and resumed.

A server reports one version per reply, the current one at its end. So before an update of the weights every
request is ended with its tokens so far, and resumed with a prompt that includes them: each part has one
version.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from agentrl.engine.config import MAX_TOP_LOGPROBS
from agentrl.engine.sglang import wire
from agentrl.engine.sglang.routed import RoutedDraft
from agentrl.engine.sglang.wire import MetaInfo
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError, RequestTooLargeError
from agentrl.runtime.clocks import clocks_stopped
from agentrl.types import KEPT_IDS, Completion, Extra, Finish, NumberArray, RequestTimes
from agentrl.types.seams import Sampling, Watch
from agentrl.types.statistics import SPECULATION, summed

# The ids that top-k and top-p kept, from what a server reports of them.
Likeliest = Sequence[tuple[float | None, int, str | None]]


def kept_tokens(meta: MetaInfo, sampling: Sampling) -> tuple[list[NumberArray], list[float]]:
    """The kept ids of each token of a reply, and its logprob in the distribution renormalised over them.

    Raises:
        ConfigError: the server reports neither the kept ids nor the likeliest ones.
        EngineError: it reports those of another number of tokens, or without the sampled one.
    """
    entries = meta.output_token_logprobs
    if meta.output_kept_ids is not None:
        _check_number(len(meta.output_kept_ids), len(entries))
        kept: list[NumberArray] = [np.array(ids, np.int32) for ids in meta.output_kept_ids]
        if any(entry[1] not in ids for entry, ids in zip(entries, kept, strict=True)):
            raise EngineError("the server sent kept ids without the token that was sampled; see its log.")
        return kept, [entry[0] for entry in entries]
    if meta.output_top_logprobs is None and entries:
        raise ConfigError(
            "the server does not report which tokens are kept (replay_sampling_mask); set rollout_top_k to 1 "
            f"to {MAX_TOP_LOGPROBS}, or switch replay_sampling_mask off."
        )
    top = meta.output_top_logprobs or []
    _check_number(len(top), len(entries))
    pairs = [
        _prefix(likeliest or (), entry[1], entry[0], sampling)
        for likeliest, entry in zip(top, entries, strict=True)
    ]
    return [ids for ids, _ in pairs], [logprob for _, logprob in pairs]


def _prefix(
    likeliest: Likeliest, token: int, logprob: float, sampling: Sampling
) -> tuple[NumberArray, float]:
    """The ids among the k likeliest that have at most the mass p before them, and the token's logprob.

    The token is always kept: one that is as likely as the last of them may be drawn in its place, and
    rounding may have ended the prefix before it.
    """
    kept: dict[int, float] = {}
    before = 0.0
    for logp, id_, _ in likeliest[: sampling.top_k]:
        if before > sampling.top_p or logp is None:
            break
        kept[id_] = logp
        before += math.exp(logp)
    kept[token] = logprob
    largest = max(kept.values())
    total = largest + math.log(math.fsum(math.exp(logp - largest) for logp in kept.values()))
    return np.array(sorted(kept), np.int32), logprob - total


def _check_number(reported: int, sampled: int) -> None:
    if reported != sampled:
        raise EngineError(f"the server sent {sampled} tokens, and kept ids of {reported}; see its log.")


Decode = Callable[[Sequence[int]], str]

_SEED_STEP = 0x9E3779B97F4A7C15  # odd: no two parts of a completion share a seed


class Draft:
    """The tokens sampled so far, truncated after the first complete stop string.

    SGLang checks the limit before the stops, and misses a stop string that was sampled in more tokens than
    its encoding has, or in two parts; this class corrects all of these. decode: the text of tokens; without
    it nothing is truncated. An end token of the model that is also the last one allowed counts as `length`.

    num_prompt: tokens of the prompt (count). version: of the latest part. cached_tokens: of the prompt, in
    the first reply. seconds: of all parts. speculation: the same, without those of `continues`.
    """

    def __init__(self, sampling: Sampling, decode: Decode | None, num_prompt: int = 0) -> None:
        self._sampling, self._decode, self._num_prompt = sampling, decode, num_prompt
        self._routed = RoutedDraft(sampling, num_prompt)
        self._text = ""
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._kept: list[NumberArray] = sampling.kept_before()
        self._finish: tuple[Finish, str | int | None] | None = None
        self.ids: list[int] = []
        self.version = 0
        self.cached_tokens: int | None = None
        self.seconds = RequestTimes()
        self.speculation: Counter[str] = Counter()
        if (begun := sampling.continues) is not None:
            self.ids += begun.token_ids.tolist()
            self._logprobs += begun.logprobs.tolist()
            self._versions += begun.versions.tolist()
            self._text = decode(self.ids) if decode else ""
            self.seconds = begun.seconds

    @property
    def ended(self) -> bool:
        """Whether no more tokens are to be sampled."""
        return self._finish is not None

    @property
    def rest(self) -> Sampling:
        """The sampling parameters of the missing tokens."""
        if not self.ids:
            return replace(self._sampling, routed_experts_start_len=self._routed.start)
        seed = self._sampling.seed
        return replace(
            self._sampling,
            routed_experts_start_len=self._routed.start,
            max_new_tokens=self._sampling.max_new_tokens - len(self.ids),
            seed=None if seed is None else seed + _SEED_STEP * len(self.ids),
        )

    def add(self, reply: wire.GenerateReply, version: str | None = None) -> None:
        """Append the tokens of a reply. version: that the request asked for; None = the reply says it.

        Raises:
            ConfigError: the server does not report the kept ids, or experts, that were asked for.
            EngineError: tokens and logprobs do not match, or the stop string is not one of the request.
            RequestTooLargeError: the server's capacity ended the request before its limit.
        """
        meta, ids = reply.meta_info, reply.output_ids
        entries = meta.output_token_logprobs
        if [entry[1] for entry in entries] != ids:
            raise EngineError(
                f"the server sent {len(ids)} tokens, and logprobs of {len(entries)} that are not the same; "
                "see its log."
            )
        latest = version or meta.weight_version
        versions = meta.output_token_versions or [latest] * len(ids)
        if len(versions) != len(ids):
            raise EngineError(f"the server sent {len(ids)} tokens and {len(versions)} versions; see its log.")
        number_of = {version: wire.version_of(version) for version in {latest, *versions}}
        self.ids += ids
        # A part's text may lack its leading space.
        joined = self._text + reply.text
        self._text = self._decode(self.ids) if self._text and self._decode else joined
        logprobs = [entry[0] for entry in entries]
        if self._sampling.keeps_ids:
            kept, logprobs = kept_tokens(meta, self._sampling)
            self._kept += kept
        self._logprobs += logprobs
        self._routed.add(meta, self._num_prompt + len(self.ids))
        self._versions += [number_of[version] for version in versions]
        self.version = number_of[latest]
        self.seconds += meta.times
        own = (meta.spec_num_proposed_drafts, meta.spec_num_correct_drafts, meta.spec_verify_ct)
        self.speculation.update(dict(zip(SPECULATION, own, strict=True)))
        if self.cached_tokens is None:
            self.cached_tokens = meta.cached_tokens
        self._finish = self._ending(meta.finish_reason)

    def completion(self) -> Completion:
        """The completion; finish = abort where the request was ended early."""
        finish, matched = self._finish or (Finish.ABORT, None)
        size = len(self.ids)
        stop_match = self._first_stop()
        if stop_match is not None and (finish is not Finish.STOP or stop_match[0] < size):
            finish, (size, matched) = Finish.STOP, stop_match
        extras, of_prompt = self._routed.parts(size)
        begun = self._sampling.continues
        if self._sampling.keeps_ids:
            extras = {**extras, KEPT_IDS: Extra.of_lists(self._kept[:size])}
        return Completion(
            np.asarray(self.ids[:size], np.int32),
            np.asarray(self._logprobs[:size], np.float32),
            np.asarray(self._versions[:size], np.int32),
            finish,
            matched,
            self.cached_tokens or 0,
            self._sampling.temperature,
            extras,
            self.seconds,
            of_prompt,
            summed([+self.speculation, begun.speculation if begun else {}]),
        )

    def _ending(self, reason: wire.FinishReason) -> tuple[Finish, str | int | None] | None:
        """How the request ended; None where it was ended early and can be resumed."""
        limit = self._sampling.max_new_tokens
        if reason.type == "abort" and (len(self.ids) < limit and self._first_stop() is None):
            return None
        if reason.type == "stop":
            if isinstance(reason.matched, str) and reason.matched not in self._sampling.stop:
                # Among others `NaN happened`, where the logits were no numbers.
                raise EngineError(
                    f"the server stopped at {reason.matched[:80]!r}, which is no stop string of the "
                    "request; see its log."
                )
            return Finish.STOP, reason.matched
        if reason.type == "length" and len(self.ids) < limit:
            raise RequestTooLargeError(
                f"the server had memory for {len(self.ids)} of max_new_tokens = {limit}; start it with a "
                "longer context or a larger cache, or ask for fewer tokens."
            )
        last = self.ids[-1]
        return (Finish.STOP, last) if last in self._sampling.stop_token_ids else (Finish.LENGTH, None)

    def _first_stop(self) -> tuple[int, str] | None:
        """The first stop string, after the number of tokens that complete it."""
        stops = self._sampling.stop
        ends = [(self._text.find(stop) + len(stop), stop) for stop in stops if stop in self._text]
        if not ends:
            return None
        end, stop = min(ends, key=lambda match: match[0])
        if self._decode is None or end == len(self._text):
            return len(self.ids), stop
        decode, ids = self._decode, self.ids
        size = 1 + bisect_left(range(1, len(ids)), True, key=lambda n: _contains_any(decode(ids[:n]), stops))
        text = decode(ids[:size])
        return size, next((candidate for candidate in stops if candidate in text), stop)


def _contains_any(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


ABORT_TIMEOUT_S = 30.0
ABORT_RETRY_S = 0.2
_ABORT_ALL_S = 0.02


class PendingRequest:
    """A call of generate until it returns.

    number: of the call, in order. owner: 20 characters that no other policy has. rid: of the last HTTP
    request. ticket: True admits the call, False ends its wait. aborted: it is to end with its tokens so far.
    sent: a server may be processing it. idle: no HTTP request is in flight. interrupted: the last HTTP
    request is ended to make room in a cache. overdue: no server answered the abort. flight: the deadline of
    the HTTP request in flight. is_resent: a request that a server has lost is sent again. watch: is told its
    tokens; None = nobody is.
    """

    watch: Watch | None = None

    def __init__(
        self, draft: Draft, deadline: asyncio.Timeout, number: int, owner: str, *, is_resent: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        self.draft, self.deadline, self.number = draft, deadline, number
        self._owner, self._num_sent, self._num_told = owner, 0, 0
        self.rid = ""
        self.ticket: asyncio.Future[bool] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.idle = asyncio.Event()
        self.idle.set()
        self.sent = False
        self.aborted = asyncio.Event()
        self.interrupted = False
        self.overdue = False
        self.flight = asyncio.timeout(None)
        self.is_resent = is_resent

    def tell(self, ids: Sequence[int]) -> None:
        """Tell those of its tokens that are new. ids: of the HTTP request in flight, so far."""
        new = [*self.draft.ids, *ids][self._num_told :]
        if self.watch is not None and new:
            self._num_told += len(new)
            self.watch(new)

    def mark_sent(self) -> None:
        """Record that it is about to be sent, with a new rid."""
        # An abort ends every rid with its prefix: no rid may be a prefix of another.
        self.rid = f"{self._owner}{self.number:08x}{self._num_sent:04x}"
        self._num_sent += 1
        self.sent = True
        self.interrupted = self.overdue = False
        self.idle.clear()

    @asynccontextmanager
    async def in_flight(self, url: str) -> AsyncIterator[None]:
        """A block in which a server has the HTTP request.

        Raises:
            EngineUnavailableError: it did not end the request, as an abort asked it to.
        """
        try:
            async with asyncio.timeout(None) as self.flight:
                yield
        except TimeoutError:
            raise EngineUnavailableError(f"{url} did not end a request in {ABORT_TIMEOUT_S:g} s.") from None

    def mark_returned(self, *, may_run: bool) -> None:
        """Record that no HTTP request is in flight. may_run: a server may still be processing it."""
        self.sent = may_run
        self.idle.set()

    def end(self) -> None:
        """Record that the call has ended."""
        self.idle.set()
        self.done.set_result(None)

    async def ended_by(self, abort: Callable[[str], Awaitable[None]], *, aborted: bool = False) -> None:
        """Send aborts until the HTTP request in flight has ended.

        An abort may overtake its request, so it is repeated. A server that does not answer in
        ABORT_TIMEOUT_S has lost the request.

        aborted: one was sent already, with others; where it acts at once, no other is sent.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + ABORT_TIMEOUT_S
        rid = self.rid
        # One that was interrupted may be sent again at once, under another rid.
        while not self.idle.is_set() and self.rid == rid:
            if loop.time() > deadline_s and not (self.overdue or self.deadline.expired()):
                self.overdue = True
                # One that only had to pause is sent again.
                paused = self.is_resent and not self.aborted.is_set()
                (self.flight if paused else self.deadline).reschedule(loop.time())
            if not aborted:
                await abort(rid)
            idle = asyncio.ensure_future(self.idle.wait())
            await asyncio.wait([idle], timeout=_ABORT_ALL_S if aborted else ABORT_RETRY_S)
            idle.cancel()
            aborted = False


class PendingRequests:
    """The requests of a policy that have not returned: aborts them, and holds all of them.

    abort: ends a request on the servers, by its rid.

    consumes: requests, holds. waits for: the end of a request that it aborts or holds. unblocked by: that, or
    ABORT_TIMEOUT_S without an answer.
    """

    def __init__(self, abort: Callable[[str], Awaitable[None]]) -> None:
        self._abort = abort
        self._by_session: dict[str, PendingRequest] = {}
        self._numbers, self._owner = itertools.count(), uuid.uuid4().hex[:20]
        self._open = asyncio.Event()
        self._open.set()
        self._num_holds = 0
        self._aborting: set[asyncio.Task[None]] = set()

    def __contains__(self, session: str) -> bool:
        return session in self._by_session

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(self._by_session.values())

    def __len__(self) -> int:
        return len(self._by_session)

    def begin(
        self, session: str, draft: Draft, deadline: asyncio.Timeout, *, is_resent: bool
    ) -> PendingRequest:
        """A new request in a session that has none. is_resent: see `PendingRequest`."""
        pending = PendingRequest(draft, deadline, next(self._numbers), self._owner, is_resent=is_resent)
        self._by_session[session] = pending
        return pending

    def end(self, session: str) -> None:
        """The request of a session has returned."""
        self._by_session.pop(session).end()

    async def abort(self, session: str) -> None:
        """End a session's request, if it has one, with its tokens so far, and wait until it has returned."""
        pending = self._by_session.get(session)
        if pending is not None:
            await self._abort_request(pending)

    async def abort_all(self) -> None:
        """End every request with its tokens so far, and wait until all have returned."""
        await asyncio.gather(*(self._abort_request(pending) for pending in self))

    def abandon(self, pending: PendingRequest) -> None:
        """Abort a request on the server in the background: its caller has stopped waiting."""
        if pending.sent:
            task = asyncio.create_task(self._abort_abandoned(pending.rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def interrupt(self, requests: Iterable[PendingRequest]) -> None:
        """End the HTTP requests of these; they are sent again with their tokens so far."""
        await asyncio.gather(*(pending.ended_by(self._abort) for pending in requests))

    @property
    def is_held(self) -> bool:
        """Whether no request may be sent."""
        return not self._open.is_set()

    async def released(self, pending: PendingRequest) -> None:
        """Wait until requests may be sent, or this one is aborted; the clocks of its episode stand still."""
        with clocks_stopped():
            await _wait_first([self._open.wait(), pending.aborted.wait()])

    @asynccontextmanager
    async def held(self, abort_all: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[float]:
        """Hold all requests during the block; see `SGLangPolicy.held`."""
        self._num_holds += 1
        self._open.clear()
        ended_at: list[float] = []

        async def end(pending: PendingRequest, *, aborted: bool) -> None:
            await pending.ended_by(self._abort, aborted=aborted)
            ended_at.append(time.perf_counter())

        try:
            running = [pending for pending in self if not pending.idle.is_set()]
            ends_all = abort_all is not None and any(pending.sent for pending in self)
            if abort_all is not None and ends_all:
                await abort_all()
            await asyncio.gather(*(end(pending, aborted=ends_all) for pending in running))
            yield min(ended_at, default=time.perf_counter())
        finally:
            self._num_holds -= 1
            if not self._num_holds:
                self._open.set()

    async def close(self) -> None:
        """End every request, and wait for those that were abandoned."""
        await self.abort_all()
        while self._by_session:
            await asyncio.sleep(0)
        await asyncio.gather(*self._aborting)

    async def _abort_request(self, pending: PendingRequest) -> None:
        """End a request, whether it waits or runs, and wait until it has ended."""
        pending.aborted.set()
        if not pending.ticket.done():
            pending.ticket.set_result(False)
        await pending.ended_by(self._abort)
        await asyncio.wait([pending.done])

    async def _abort_abandoned(self, rid: str) -> None:
        await self._abort(rid)
        # Twice: the first abort may have overtaken the request. What then still runs ends when the server
        # detects the closed connection, up to 4 s later.
        await asyncio.sleep(ABORT_RETRY_S)
        await self._abort(rid)


async def _wait_first(coroutines: Sequence[Coroutine[None, None, object]]) -> None:
    """Wait for the first coroutine to end; the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    finally:
        for task in tasks:
            task.cancel()

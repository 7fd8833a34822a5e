"""The policy at an address: an SGLang server, the embedded engine over HTTP, or a router.

A call of generate waits for a slot (max_concurrency), then for the server; where `adaptive`, in between for a
place among those that the servers have room for (see `concurrency`). It ends with the reply; at its deadline;
on `abort` and `close`, which have the server reply with the tokens so far; or on cancellation, which aborts
it on the server. A request that ends early for another reason (an update of the weights, a full cache) is
sent again with its tokens so far. `close` ends every request and closes every connection.

Every request has a salt: the server attends only to cached prefixes of requests with the same one. So after
an update of the weights no prefix of older weights is used, and no cache has to be flushed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.concurrency import AdaptiveLimit, Admission, LoadPoller
from agentrl.engine.sglang.connection import ServerConnection, UntouchedError
from agentrl.engine.sglang.request import ABORT_TIMEOUT_S, Decode, Draft, PendingRequest, PendingRequests
from agentrl.engine.sglang.wire import Requested
from agentrl.engine.watches import Watches
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError
from agentrl.http.requests import Backoff
from agentrl.runtime.gate import Gate
from agentrl.types import Completion, Finish
from agentrl.types.seams import MemoryTag, Sampling, WeightSink

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


class AdapterChoice:
    """The adapter that a request names: each version is one, by the salt that its sink has set.

    keep: versions that stay loaded, the last ones (count). is_pinned: the requests of a session name the
    one of its first request, as long as it is loaded; else the last one.
    """

    def __init__(self, keep: int, *, is_pinned: bool) -> None:
        self._keep, self._is_pinned = keep, is_pinned
        self._of_session: dict[str, str | None] = {}

    def of(self, session: str, salt: str | None) -> Requested:
        """What a request asks for. salt: of the last version; None = none was sent: the model alone."""
        adapter = salt
        if self._is_pinned:
            adapter = self._of_session.setdefault(session, salt)
            if _version_in(adapter) <= _version_in(salt) - self._keep:
                adapter = self._of_session[session] = salt
        version = str(_version_in(adapter))
        return Requested(adapter or version, adapter, version)

    def end(self, session: str) -> None:
        """Forget a session."""
        self._of_session.pop(session, None)


def _version_in(salt: str | None) -> int:
    return 0 if salt is None else wire.version_of(salt.partition(".")[0])


class Sender:
    """Sends a request until it has all its tokens or is aborted: again where a server ended it early.

    requests: may be held meanwhile. admission: of requests that are in flight at once; None = all are.
    backoff: between attempts without a new token. counts: see `SGLangPolicy`.
    requested: by a request of a session.
    version: that the server reported last; 0 before its first reply.
    """

    def __init__(
        self,
        connection: ServerConnection,
        requests: PendingRequests,
        admission: Admission | None,
        backoff: Backoff,
        counts: Counter[str],
        requested: Callable[[str], Requested],
    ) -> None:
        self._connection, self._requests, self._admission = connection, requests, admission
        self._backoff, self._counts, self._requested = backoff, counts, requested
        self.version = 0
        self._connecting = asyncio.Lock()

    async def connect(self) -> wire.Capacity:
        """Fetch the server's version and capacity; see `SGLangPolicy.connect`."""
        self.version, capacity = await self._connection.facts()
        return capacity

    async def sample(self, pending: PendingRequest, prompt_ids: Sequence[int], session: str) -> None:
        """Send requests until the draft has ended, or the request is aborted."""
        if not isinstance(prompt_ids, list):
            prompt_ids = [int(token) for token in prompt_ids]
        failures = 0
        while not (pending.draft.ended or pending.aborted.is_set()):
            if self._requests.is_held:
                # The weights are being updated, which is no part of the episode's time.
                await self._requests.released(pending)
                continue
            num_before = len(pending.draft.ids)
            try:
                if self._connection.capacity is None:
                    await self._connect_once()
                    # Requests may be held by now.
                    continue
                if not await self._send_admitted(pending, prompt_ids, session, self._connection.capacity):
                    continue
            except EngineUnavailableError as error:
                untouched = isinstance(error, UntouchedError)
                failures += 1
                if self._backoff.is_last(failures) or not (untouched or pending.is_resent):
                    raise
                self._counts["retries" if untouched else "lost"] += 1
                await self._backoff.wait(failures)
                continue
            if pending.draft.ended or pending.aborted.is_set():
                return
            if pending.interrupted:
                self._counts["interrupted"] += 1
                continue
            failures = 0 if len(pending.draft.ids) > num_before else failures + 1
            if self._backoff.is_last(failures):
                raise EngineUnavailableError(
                    f"{self._connection.url} ended a request {failures} times before it sampled a token; "
                    "see its log."
                )
            self._counts["resumed"] += 1

    async def _send_admitted(
        self, pending: PendingRequest, prompt_ids: Sequence[int], session: str, capacity: wire.Capacity
    ) -> bool:
        """Send the request once it is admitted; False where it was aborted, or all were held, meanwhile."""
        if self._admission is None:
            await self._send(pending, prompt_ids, session, capacity)
            return True
        if not await self._admission.enter(pending):
            return False
        try:
            if self._requests.is_held:
                return False
            await self._send(pending, prompt_ids, session, capacity)
        finally:
            self._admission.leave(pending)
        return True

    async def _send(
        self, pending: PendingRequest, prompt_ids: Sequence[int], session: str, capacity: wire.Capacity
    ) -> None:
        """Send the request once, and append its reply to the draft."""
        draft, rest = pending.draft, pending.draft.rest
        ids = [*prompt_ids, *draft.ids]
        capacity.check(len(ids), rest.max_new_tokens)
        pending.mark_sent()
        may_run = True
        tell = None if pending.watch is None else pending.tell
        asked = self._requested(session)._replace(stream=tell is not None)
        if asked.salt is None:
            asked = asked._replace(salt=str(self.version))
        try:
            body = wire.generate_body(pending.rid, ids, rest, asked)
            bounds = wire.bounds_of(rest, len(ids))
            async with pending.in_flight(self._connection.url):
                reply = await self._connection.generate(body, session, bounds, tell)
            may_run = False
        except UntouchedError:
            may_run = False
            raise
        finally:
            pending.mark_returned(may_run=may_run)
        draft.add(reply, asked.version)
        self.version = draft.version

    async def _connect_once(self) -> wire.Capacity:
        """The server's capacity; the first of several concurrent requests fetches it."""
        async with self._connecting:
            if self._connection.capacity is None and self._admission is not None:
                # A server that does not report its load is refused here, rather than never followed.
                await self._connection.loads()
            return self._connection.capacity or await self.connect()


@dataclass(eq=False, kw_only=True)
class SGLangPolicy:
    """Samples from one server, or from all servers behind one router.

    A request is retried only where no server has started it: the connection was refused, or the status is
    429 or 503. Any other failure is an EngineUnavailableError, because tokens may have been sampled; the
    caller decides. With `resend_lost` the policy sends such a request again: where a server crashed during
    it, the tokens that it had not returned are sampled again. (The client has not received those tokens, so
    this selects nothing by their content, as long as crashes do not depend on the sampled tokens.)

    url: of the server or router. headers: sent with every request (`Authorization`).
    max_concurrency: concurrent requests; more of them wait here, in order. adaptive: fewer are in flight
        where a server has a queue or a full cache; then the youngest are interrupted, and go on later.
    num_clients: policies of the same run at this address, each in a process of its own (count).
    attempts: the maximum number of attempts without a new token; the waits between them grow.
    timeout_s: for one request from call to reply, with the wait for a slot.
    vocab_size: of the model. SGLang crashes on a token beyond it; None = prompts are not checked.
    decode: the text of tokens, for stop strings that a server misses (see `request.Draft`).
    salt: of the weights that the servers hold; whoever sends them weights sets it while requests are held.
        None = nobody does here: the version that the server reported last takes its place. Whoever updates
        the weights of such a server has to flush its cache, too.
    is_routed: whether a router may be before servers that the run has started, see `wire.Requested`.
    adapters: which of the servers' adapters a request names, where each version is one; None = a version is
        weights of the whole model.
    counts: `requests`, of them `aborts`; requests sent again: `retries` of unstarted ones, `lost` with their
        server, `resumed` from their own tokens, `interrupted` since a cache was full; `prompt_tokens`,
        `cached_tokens`; and those of `SPECULATION`.

    Raises:
        ConfigError: the address is invalid, or a setting is out of range.
    """

    url: str = field(kw_only=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_concurrency: int = 256
    adaptive: bool = False
    num_clients: int = 1
    attempts: int = 5
    timeout_s: float = 600.0
    vocab_size: int | None = None
    decode: Decode | None = field(default=None, repr=False)
    resend_lost: bool = False
    is_routed: bool = False
    adapters: AdapterChoice | None = None
    salt: str | None = field(default=None, init=False)
    counts: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        if min(self.max_concurrency, self.attempts) < 1 or not self.timeout_s > 0:
            raise ConfigError(
                "An SGLang policy needs max_concurrency and attempts of at least 1 and a timeout_s above 0."
            )
        self._connection = ServerConnection(self.url, self.headers)
        self._gate = Gate(self.max_concurrency)
        self._pending = PendingRequests(self._abort_on_server)
        self._admission = Admission(AdaptiveLimit(self.max_concurrency)) if self.adaptive else None
        self._poller = None
        if self._admission is not None:
            loads = self._connection.loads
            self._poller = LoadPoller(self._admission, self._pending, loads, self.num_clients)
        backoff = Backoff(self.attempts, _FIRST_WAIT_S, _LONGEST_WAIT_S)
        self._sender = Sender(
            self._connection, self._pending, self._admission, backoff, self.counts, self._requested
        )
        self._watches = Watches()
        self.watched = self._watches.watched
        self._closed = False

    @property
    def version(self) -> int:
        """The version that the server reported last; 0 before its first reply."""
        return self._sender.version

    @property
    def sink(self) -> WeightSink:
        """Not available: the policy of an address sends no weights.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"the server at {self.url} takes no weights from a policy; a Fleet feeds servers.")

    async def release_memory(self, tags: Collection[MemoryTag]) -> int | None:
        """Not available: the policy of an address controls no server.

        Raises:
            EngineError: always.
        """
        del tags
        raise EngineError(f"the server at {self.url} releases no memory for a policy; a Fleet asks servers.")

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Nothing to do: nothing can have been released."""

    async def connect(self) -> wire.Capacity:
        """Fetch the server's version and capacity; the first generate() does so, too.

        Raises:
            EngineUnavailableError: no server answers.
            EngineError: it uses another protocol.
        """
        return await self._sender.connect()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of the full prefix `prompt_ids`; cancelling ends the request on the server.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens exceed the server's capacity.
            EngineUnavailableError: the server is not reachable, dropped the connection, or took longer than
                timeout_s.
            EngineError: the policy is closed, the request is invalid, the session is busy, the server refused
                the request, or its reply is invalid.
        """
        self._check(prompt_ids, sampling, session)
        deadline = asyncio.timeout(self.timeout_s)
        if self.vocab_size is not None and sampling.top_k > self.vocab_size:
            # No server can report more of the likeliest tokens.
            sampling = replace(sampling, top_k=self.vocab_size)
        draft = Draft(sampling, self.decode, len(prompt_ids))
        pending = self._pending.begin(session, draft, deadline, is_resent=self.resend_lost)
        pending.watch = self._watches.get(session)
        if self._poller is not None:
            self._poller.start()
        try:
            async with deadline:
                if await self._gate.enter(pending.ticket, "the engine"):
                    try:
                        await self._sender.sample(pending, prompt_ids, session)
                    finally:
                        self._gate.leave()
            return self._count(pending.draft, len(prompt_ids))
        except TimeoutError:
            self._pending.abandon(pending)
            limit_s = ABORT_TIMEOUT_S if pending.overdue else self.timeout_s
            raise EngineUnavailableError(f"{self.url} did not answer in {limit_s:g} s.") from None
        except asyncio.CancelledError:
            self._pending.abandon(pending)
            raise
        finally:
            self._pending.end(session)

    async def close_session(self, session: str) -> None:
        """End a request that runs in the session. The server evicts the session's cache by itself."""
        await self._pending.abort(session)
        if self.adapters is not None:
            self.adapters.end(session)

    async def abort(self) -> None:
        """End every request of this policy, but no other client's, with its tokens so far; finish = abort."""
        await self._pending.abort_all()

    def held(
        self, abort_all: Callable[[], Awaitable[None]] | None = None
    ) -> AbstractAsyncContextManager[float]:
        """Hold all requests during the block: running ones end with their tokens so far and resume
        afterwards, new ones wait. Where blocks overlap, they resume after the last one.

        abort_all: ends all requests of the servers, in fewer calls than one for each request. What runs still
        is ended one by one.

        Yields:
            When the first running request had ended (`time.perf_counter`): the servers sampled until then.
        """
        return self._pending.held(abort_all)

    async def close(self) -> None:
        """Abort, wait for the replies, close the connections. A closed policy refuses requests."""
        self._closed = True
        await self._pending.close()
        if self._poller is not None:
            await self._poller.close()
        await self._connection.close()

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> None:
        if self._closed:
            raise EngineError("the policy is closed; build a new one.")
        _check_prompt(prompt_ids, sampling, self.vocab_size)
        if session in self._pending:
            raise EngineError(
                f"session {session} already runs a request; wait for it or name another session."
            )

    def _requested(self, session: str) -> Requested:
        own = Requested(self.salt) if self.adapters is None else self.adapters.of(session, self.salt)
        return own._replace(routed=self.is_routed)

    def _count(self, draft: Draft, prompt_len: int) -> Completion:
        completion = draft.completion()
        if draft.cached_tokens is not None:
            self.counts["requests"] += 1
            self.counts["aborts"] += completion.finish is Finish.ABORT
            self.counts["prompt_tokens"] += prompt_len
            self.counts["cached_tokens"] += completion.cached_tokens
            self.counts.update(+draft.speculation)
        return completion

    async def _abort_on_server(self, rid: str) -> None:
        # On a server that is not reachable, nothing runs.
        with suppress(EngineError):
            await self._connection.abort(rid)


def _check_prompt(prompt_ids: Sequence[int], sampling: Sampling, vocab_size: int | None) -> None:
    if not len(prompt_ids) or sampling.max_new_tokens < 1:
        raise EngineError("a request needs a prompt and at least one token to sample; give it both.")
    lowest, highest = min(prompt_ids), max(prompt_ids)
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        most = "any" if vocab_size is None else vocab_size - 1
        raise EngineError(
            f"the prompt's tokens go from {lowest} to {highest}, the vocabulary is 0 to {most}; encode "
            "it with the model's own tokenizer."
        )

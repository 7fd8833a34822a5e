"""The policy behind an address: an SGLang server, the embedded engine over HTTP, or a router before several.

A call of generate waits for a place (max_concurrency), then for the server. The reply unblocks it, or its
deadline, `abort` and `close`, which ask the server to answer with what it has, or cancellation, which
aborts it on the server. Where something else ends it before its end (new weights are about to come), it
is asked for again from the tokens that it has. `close` leaves no request and no connection behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.connection import ServerConnection, UntouchedError
from agentrl.engine.sglang.request import ABORT_AGAIN_S, ABORT_TIMEOUT_S, Decode, Draft, PendingRequest
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError
from agentrl.gate import Gate
from agentrl.protocols import Sampling, WeightSink
from agentrl.retrying import Backoff
from agentrl.types import Completion, Finish

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


@dataclass(eq=False, kw_only=True)
class SGLangPolicy:
    """Samples from one server, or from all servers behind one router.

    A request is sent again only where no server has begun with it: the connection was refused, or the answer
    is 429 or 503. Anything else that breaks is an EngineUnavailableError, for its tokens may have been
    sampled; whoever asked decides. With `resend_lost` the policy sends it again: where a server died over
    a request, what it had not told yet is sampled again. (Nobody has seen those tokens, so nothing is chosen
    by them, as long as servers do not die of what they sample.)

    url: of the server or router. headers: sent with every request (`Authorization`).
    max_concurrency: requests at a time; more of them wait here, first come, first served.
    attempts: how often a request is sent, at most, without a token to show for it; the waits between grow.
    timeout_s: for one request from first to last, waiting included.
    vocab_size: what the model knows. SGLang dies of a token beyond it; None = nothing is checked.
    decode: the text of tokens, for stop strings that a server overlooks (see `request.Draft`).
    counts: `requests`, of them `aborts`; how often one was sent again: `retries` of what nobody had begun
        with, `lost` with their server, `resumed` from their own tokens; `prompt_tokens`, `cached_tokens`.

    Raises:
        ConfigError: the address is none, or a setting is out of range.
    """

    url: str = field(kw_only=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_concurrency: int = 256
    attempts: int = 5
    timeout_s: float = 600.0
    vocab_size: int | None = None
    decode: Decode | None = field(default=None, repr=False)
    resend_lost: bool = False
    counts: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        if min(self.max_concurrency, self.attempts) < 1 or not self.timeout_s > 0:
            raise ConfigError(
                "An SGLang policy needs max_concurrency and attempts of at least 1 and a timeout_s above 0."
            )
        self._connection = ServerConnection(self.url, self.headers)
        self._gate = Gate(self.max_concurrency)
        self._backoff = Backoff(self.attempts, _FIRST_WAIT_S, _LONGEST_WAIT_S)
        self._pending: dict[str, PendingRequest] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._holds = 0
        self._aborting: set[asyncio.Task[None]] = set()
        self._connecting = asyncio.Lock()
        self._version = 0
        self._closed = False

    @property
    def version(self) -> int:
        """The version that the server told last; 0 before it told any."""
        return self._version

    @property
    def sink(self) -> WeightSink:
        """A server by address takes no weights from here.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"the server at {self.url} takes no weights from a policy; a Fleet feeds servers.")

    async def connect(self) -> wire.Capacity:
        """See who is there, and how much fits. generate() does it by itself.

        Raises:
            EngineUnavailableError: nobody is.
            EngineError: it speaks another protocol.
        """
        self._version, capacity = await self._connection.facts()
        return capacity

    async def servers(self) -> list[str]:
        """The servers behind the address: it itself, or those that a router sends to.

        Raises:
            EngineError: nobody is there, or it speaks another protocol.
        """
        return await self._connection.workers()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of the whole prefix `prompt_ids`; cancelling ends the request on the server.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens exceed what the server holds.
            EngineUnavailableError: the server is not there, broke off, or took longer than timeout_s.
            EngineError: the policy is closed, the request makes no sense, the session is busy, the server
                refused, or its reply is none.
        """
        self._check(prompt_ids, sampling, session)
        deadline = asyncio.timeout(self.timeout_s)
        pending = self._pending[session] = PendingRequest(Draft(sampling, self.decode), deadline)
        try:
            async with deadline:
                if await self._gate.enter(pending.ticket):
                    try:
                        await self._sample(pending, prompt_ids, session)
                    finally:
                        self._gate.leave()
            return self._counted(pending.draft, len(prompt_ids))
        except TimeoutError:
            self._abandon(pending)
            limit_s = ABORT_TIMEOUT_S if pending.overdue else self.timeout_s
            raise EngineUnavailableError(f"{self.url} did not answer in {limit_s:g} s.") from None
        except asyncio.CancelledError:
            self._abandon(pending)
            raise
        finally:
            del self._pending[session]
            pending.end()

    async def close_session(self, session: str) -> None:
        """End a request that runs in the session. What the server cached it forgets by itself."""
        pending = self._pending.get(session)
        if pending is not None:
            await self._abort_request(pending)

    async def abort(self) -> None:
        """End every request of this policy with what it has, finish = abort. Others' requests go on."""
        await asyncio.gather(*(self._abort_request(pending) for pending in self._pending.values()))

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold all requests while the block runs: those on their way are ended with what they have, and go on
        from there afterwards; new ones wait."""
        self._holds += 1
        self._open.clear()
        try:
            await asyncio.gather(
                *(pending.ended_by(self._abort_on_server) for pending in self._pending.values())
            )
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._open.set()

    async def close(self) -> None:
        """Abort, wait for the answers, close the connections. A closed policy refuses requests."""
        self._closed = True
        await self.abort()
        while self._pending:
            await asyncio.sleep(0)
        await asyncio.gather(*self._aborting)
        await self._connection.close()

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> None:
        if self._closed:
            raise EngineError("the policy is closed; build a new one.")
        if not len(prompt_ids) or sampling.max_new_tokens < 1:
            raise EngineError("a request needs a prompt and at least one token to sample; give it both.")
        lowest, highest = min(prompt_ids), max(prompt_ids)
        if lowest < 0 or (self.vocab_size is not None and highest >= self.vocab_size):
            most = "any" if self.vocab_size is None else self.vocab_size - 1
            raise EngineError(
                f"the prompt's tokens go from {lowest} to {highest}, the model knows 0 to {most}; encode it "
                "with the model's own tokenizer."
            )
        if session in self._pending:
            raise EngineError(
                f"session {session} already runs a request; wait for it or name another session."
            )

    async def _sample(self, pending: PendingRequest, prompt_ids: Sequence[int], session: str) -> None:
        """Ask until the draft is whole, or the request is aborted."""
        if not isinstance(prompt_ids, list):
            prompt_ids = [int(token) for token in prompt_ids]
        failures = 0
        while not (pending.draft.ended or pending.aborted.is_set()):
            if not self._open.is_set():
                await _first([self._open.wait(), pending.aborted.wait()])
                continue
            had = len(pending.draft.ids)
            try:
                await self._ask(pending, prompt_ids, session)
            except EngineUnavailableError as error:
                untouched = isinstance(error, UntouchedError)
                failures += 1
                if self._backoff.is_last(failures) or not (untouched or self.resend_lost):
                    raise
                self.counts["retries" if untouched else "lost"] += 1
                await self._backoff.wait(failures)
                continue
            if pending.draft.ended or pending.aborted.is_set():
                return
            failures = 0 if len(pending.draft.ids) > had else failures + 1
            if self._backoff.is_last(failures):
                raise EngineUnavailableError(
                    f"{self.url} ended a request {failures} times before it sampled a token; see its log."
                )
            self.counts["resumed"] += 1

    async def _ask(self, pending: PendingRequest, prompt_ids: Sequence[int], session: str) -> None:
        """Send the request once, and append what comes to the draft."""
        draft = pending.draft
        capacity = self._connection.capacity or await self._connected()
        ids = [*prompt_ids, *draft.ids]
        capacity.check(len(ids), draft.rest.max_new_tokens)
        pending.mark_sent()
        unknown = True
        try:
            reply = await self._connection.generate(wire.written(pending.rid, ids, draft.rest), session)
            unknown = False
        except UntouchedError:
            unknown = False
            raise
        finally:
            pending.mark_returned(unknown=unknown)
        draft.add(reply)
        self._version = draft.version

    def _counted(self, draft: Draft, prompt_len: int) -> Completion:
        completion = draft.completion()
        if draft.cached_tokens is not None:
            self.counts["requests"] += 1
            self.counts["aborts"] += completion.finish is Finish.ABORT
            self.counts["prompt_tokens"] += prompt_len
            self.counts["cached_tokens"] += completion.cached_tokens
        return completion

    async def _connected(self) -> wire.Capacity:
        """What the server holds; the first of several requests asks for all of them."""
        async with self._connecting:
            return self._connection.capacity or await self.connect()

    async def _abort_request(self, pending: PendingRequest) -> None:
        """End a request, wherever it is, and see that it left."""
        pending.aborted.set()
        if not pending.ticket.done():
            pending.ticket.set_result(False)
        await pending.ended_by(self._abort_on_server)
        await asyncio.wait([pending.done])

    def _abandon(self, pending: PendingRequest) -> None:
        """Nobody waits for the request any longer: the server need not go on."""
        if pending.sent:
            task = asyncio.create_task(self._abort_abandoned(pending.rid))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _abort_abandoned(self, rid: str) -> None:
        await self._abort_on_server(rid)
        # Twice: the first may have overtaken the request. What then still runs ends when the server sees that
        # the connection is closed, up to 4 s later.
        await asyncio.sleep(ABORT_AGAIN_S)
        await self._abort_on_server(rid)

    async def _abort_on_server(self, rid: str) -> None:
        # A server that is not there does not go on either.
        with suppress(EngineError):
            await self._connection.abort(rid)


async def _first(several: Sequence[Coroutine[None, None, object]]) -> None:
    """Wait for one of several; the others are cancelled."""
    tasks = [asyncio.create_task(one) for one in several]
    try:
        await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    finally:
        for task in tasks:
            task.cancel()

"""The policy behind an address: an SGLang server, the embedded engine over HTTP, or a router before several.

A call of generate waits for room (max_concurrency), then for the server. It is unblocked by the reply, by its
deadline, by `abort` and `close`, which ask the server to answer with what it has, and by cancellation, which
tells the server not to go on. `close` leaves no request and no connection behind.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.connection import Connection, UntouchedError
from agentrl.engine.sglang.gate import Gate
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError
from agentrl.protocols import Sampling, WeightSink
from agentrl.types import Completion, Finish

_ABORT_AGAIN_S = 0.2
_ABORT_TIMEOUT_S = 30.0
_LONGEST_WAIT_S = 5.0


@dataclass(eq=False, slots=True)
class _Flight:
    """A request on its way. ticket: lets it in, or, False, ends its waiting. done: it has left."""

    rid: str
    deadline: asyncio.Timeout
    ticket: asyncio.Future[bool]
    done: asyncio.Future[None]
    sent: bool = False
    cut: bool = False


@dataclass(eq=False, kw_only=True)
class SGLangPolicy:
    """Samples from one server, or from all servers behind one router.

    A request is sent again only where no server has begun with it: the connection was refused, or the answer
    is 429 or 503. Anything else that breaks is an EngineUnavailableError, for its tokens may have been
    sampled; whoever asked decides.

    url: of the server or router. headers: sent with every request (`Authorization`).
    max_concurrency: requests at a time; more of them wait here, first come, first served.
    attempts: how often a request is sent, at most, with growing waits between.
    timeout_s: for one request from first to last, waiting included.
    vocab_size: what the model knows. SGLang dies of a token beyond it; None = nothing is checked.
    decode: the text of tokens, for stop strings that a server overlooks (see `wire.completion_of`).
    counts: `requests`, of them `retries` and `aborts`; `prompt_tokens`, of them `cached_tokens`.

    Raises:
        ConfigError: the address is none, or a setting is out of range.
    """

    url: str = field(kw_only=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_concurrency: int = 256
    attempts: int = 5
    timeout_s: float = 600.0
    vocab_size: int | None = None
    decode: wire.Decode | None = field(default=None, repr=False)
    counts: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        if min(self.max_concurrency, self.attempts) < 1 or not self.timeout_s > 0:
            raise ConfigError(
                "An SGLang policy needs max_concurrency and attempts of at least 1 and a timeout_s above 0."
            )
        self._connection = Connection(self.url, self.headers)
        self._gate = Gate(self.max_concurrency)
        self._flights: dict[str, _Flight] = {}
        self._goodbyes: set[asyncio.Task[None]] = set()
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
        raise EngineError(f"the server at {self.url} takes no weights; train with engine = embedded.")

    async def connect(self) -> wire.Room:
        """See who is there, and how much fits. generate() does it by itself.

        Raises:
            EngineUnavailableError: nobody is.
            EngineError: it speaks another protocol.
        """
        self._version, room = await self._connection.facts()
        return room

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of the whole prefix `prompt_ids`; cancelling ends the request on the server.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens exceed what the server holds.
            EngineUnavailableError: the server is not there, broke off, or took longer than timeout_s.
            EngineError: the policy is closed, the request makes no sense, the session is busy, the server
                refused, or its reply is none.
        """
        self._check(prompt_ids, sampling, session)
        loop = asyncio.get_running_loop()
        deadline = asyncio.timeout(self.timeout_s)
        flight = _Flight(uuid.uuid4().hex, deadline, loop.create_future(), loop.create_future())
        self._flights[session] = flight
        try:
            async with deadline:
                return await self._fly(flight, prompt_ids, sampling, session)
        except TimeoutError:
            self._end(flight)
            limit_s = _ABORT_TIMEOUT_S if flight.cut else self.timeout_s
            raise EngineUnavailableError(f"{self.url} did not answer in {limit_s:g} s.") from None
        except asyncio.CancelledError:
            self._end(flight)
            raise
        finally:
            del self._flights[session]
            flight.done.set_result(None)

    async def close_session(self, session: str) -> None:
        """End a request that runs in the session. What the server cached it forgets by itself."""
        flight = self._flights.get(session)
        if flight is not None:
            await self._cut(flight)

    async def abort(self) -> None:
        """End every request of this policy with what it has, finish = abort. Others' requests go on."""
        await asyncio.gather(*(self._cut(flight) for flight in self._flights.values()))

    async def close(self) -> None:
        """Abort, wait for the answers, close the connections. A closed policy refuses requests."""
        self._closed = True
        await self.abort()
        while self._flights:
            await asyncio.sleep(0)
        await asyncio.gather(*self._goodbyes)
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
        if session in self._flights:
            raise EngineError(
                f"session {session} already runs a request; wait for it or name another session."
            )

    async def _fly(
        self, flight: _Flight, prompt_ids: Sequence[int], sampling: Sampling, session: str
    ) -> Completion:
        if not await self._gate.enter(flight.ticket):
            return _nothing()
        try:
            reply = await self._reply(flight, prompt_ids, sampling, session)
        finally:
            self._gate.leave()
        if reply is None:
            return _nothing()
        completion = wire.completion_of(reply, sampling, self.decode)
        self._version = wire.version_of(reply.meta_info.weight_version)
        self.counts["requests"] += 1
        self.counts["aborts"] += completion.finish is Finish.ABORT
        self.counts["prompt_tokens"] += len(prompt_ids)
        self.counts["cached_tokens"] += completion.cached_tokens
        return completion

    async def _reply(
        self, flight: _Flight, prompt_ids: Sequence[int], sampling: Sampling, session: str
    ) -> wire.GenerateReply | None:
        """The server's reply, or None where the request was cut before it was sent."""
        for left in reversed(range(self.attempts)):
            if flight.cut:
                break
            try:
                room = self._connection.room or await self._connected()
                room.check(len(prompt_ids), sampling.max_new_tokens)
                flight.sent = True
                return await self._connection.generate(
                    wire.written(flight.rid, prompt_ids, sampling), session
                )
            except UntouchedError:
                flight.sent = False
                if not left:
                    raise
            self.counts["retries"] += 1
            longest = min(_LONGEST_WAIT_S, 0.1 * 2 ** (self.attempts - left))
            await asyncio.sleep(random.uniform(longest / 2, longest))
        return None

    async def _connected(self) -> wire.Room:
        """What the server holds; the first of several requests asks for all of them."""
        async with self._connecting:
            return self._connection.room or await self.connect()

    async def _cut(self, flight: _Flight) -> None:
        """End a request, wherever it is, and see that it left.

        The server is asked again and again: what ends a request may overtake the request itself.
        """
        flight.cut = True
        if not flight.ticket.done():
            flight.ticket.set_result(False)
        loop = asyncio.get_running_loop()
        until = loop.time() + _ABORT_TIMEOUT_S
        while not flight.done.done():
            if loop.time() > until and not flight.deadline.expired():
                flight.deadline.reschedule(loop.time())
            if flight.sent:
                await self._told(flight.rid)
            await asyncio.wait([flight.done], timeout=_ABORT_AGAIN_S)

    def _end(self, flight: _Flight) -> None:
        """Nobody waits for the request any longer: the server need not go on."""
        if flight.sent:
            task = asyncio.create_task(self._say_goodbye(flight.rid))
            self._goodbyes.add(task)
            task.add_done_callback(self._goodbyes.discard)

    async def _say_goodbye(self, rid: str) -> None:
        await self._told(rid)
        # Twice: the first may have overtaken the request. What then still runs ends when the server sees that
        # the connection is closed, up to 4 s later.
        await asyncio.sleep(_ABORT_AGAIN_S)
        await self._told(rid)

    async def _told(self, rid: str) -> None:
        # A server that is not there does not go on either.
        with suppress(EngineError):
            await self._connection.abort(rid)


def _nothing() -> Completion:
    return Completion(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), Finish.ABORT)

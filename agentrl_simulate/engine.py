"""A model of engines: requests that are decoded together, one token each in a step.

    step of an engine   decode_step_s + decode_request_s x requests        each of them gets a token
    a prompt            tokens that are not cached / prefill_tok_per_s      nothing is decoded meanwhile
    new weights         standstill_s, then every prefix is computed again   caches belong to a version

Between two events (a request begins or ends, new weights come) all requests of an engine get tokens at the
same rate. So an engine is one number, the tokens that a request has got which runs since its begin, and
costs nothing for a token.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agentrl_simulate.config import EngineSection
from agentrl_simulate.virtual_time import now_s

_SAME_TOKEN = 1e-6
"""Less of a token than this is a rounding error."""


Sampled: TypeAlias = Mapping[int, int]
"""What a request got: tokens (count) by the version of the weights that sampled them."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request. prompt: its tokens; size: tokens to sample (counts). begin: the engine's mark at its begin.

    cuts: where new weights came, the version before and the tokens by then.
    """

    session: str
    prompt: int
    size: int
    answer: asyncio.Future[Sampled]
    begin: float = 0.0
    is_running: bool = False
    cuts: list[tuple[int, int]] = field(default_factory=list)

    def num_sampled(self, mark: float) -> int:
        """Tokens so far (count)."""
        return min(round(mark - self.begin), self.size)

    def sampled(self, version: int) -> Sampled:
        """All tokens, the last of them of this version."""
        by_version: dict[int, int] = {}
        before = 0
        for one, number in (*self.cuts, (version, self.size)):
            if number > before:
                by_version[one] = by_version.get(one, 0) + number - before
            before = number
        return by_version


class SimulatedEngine:
    """One engine; see above.

    consumes: requests. waits for: nothing; its timer ends the request that is done next. unblocked by: new
    requests, cancelled ones, new weights. at its end: `pause` stops the timer.

    version: of its weights. busy_s, request_s: the time with a request, and requests x time (seconds).
    num_sampled, num_prefilled: tokens so far (counts).
    """

    def __init__(self, section: EngineSection) -> None:
        self._section, self._slowdown = section, 1.0
        self.version = 0
        self.busy_s = self.request_s = 0.0
        self.num_sampled = self.num_prefilled = 0
        self._running: dict[_Request, None] = {}
        self._ends: list[tuple[float, int, _Request]] = []
        self._waiting: deque[_Request] = deque()
        # Sessions between two requests, the least recently used first, and how many tokens are cached.
        self._cached: OrderedDict[str, int] = OrderedDict()
        self._mark, self._stall_s, self._at_s, self._number = 0.0, 0.0, now_s(), 0
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_requests(self) -> int:
        """Requests that run or wait (count)."""
        return len(self._running) + len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether it computes something."""
        return bool(self._running) and not self._is_paused

    async def generate(self, session: str, prompt: int, size: int) -> Sampled:
        """Sample `size` tokens after a prompt of `prompt` tokens; cancelling it frees its place."""
        request = _Request(session, prompt, size, asyncio.get_running_loop().create_future())
        self.account()
        self._waiting.append(request)
        self._go_on()
        try:
            return await request.answer
        except asyncio.CancelledError:
            self.account()
            self._running.pop(request, None)
            if request in self._waiting:
                self._waiting.remove(request)
            request.is_running = False
            self._cached.pop(session, None)
            self._go_on()
            raise

    def close_session(self, session: str) -> None:
        """Drop the prefix of a session."""
        self._cached.pop(session, None)

    def install(self, version: int, standstill_s: float) -> None:
        """Serve new weights after a standstill; prefixes are computed again."""
        self.account()
        self._cached.clear()
        again = 0
        for request in self._running:
            request.cuts.append((self.version, request.num_sampled(self._mark)))
            again += request.prompt + request.num_sampled(self._mark)
        self.num_prefilled += again
        # Paused, it has lost its caches anyway, and loads weights in the turn of the trainer.
        self._stall_s += 0.0 if self._is_paused else standstill_s
        self._stall_s += again / self._section.prefill_tok_per_s
        self.version = version
        self._go_on()

    def pause(self) -> None:
        """Hold all requests, and lose every cache."""
        self.account()
        self._is_paused = True
        self._go_on()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.account()
        self._is_paused = False
        self._go_on()

    def slow_down(self, factor: float) -> None:
        """Be slower by this factor from now on (1 = as measured)."""
        self.account()
        self._slowdown = factor
        self._go_on()

    @property
    def _step_s(self) -> float:
        section = self._section
        return section.decode_step_s + section.decode_request_s * len(self._running)

    def account(self) -> None:
        """Account for the time since the last event."""
        seconds, self._at_s = now_s() - self._at_s, now_s()
        if self._is_paused or seconds <= 0.0:
            return
        self.request_s += seconds * len(self._running)
        work_s = seconds / self._slowdown
        stalled_s = min(self._stall_s, work_s)
        self._stall_s -= stalled_s
        if self._running:
            self.busy_s += seconds
            self._mark += (work_s - stalled_s) / self._step_s

    def _go_on(self) -> None:
        """End what is done, begin what waits and has a place, and set the timer to the next end."""
        self._end_done()
        self._begin_waiting()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and not self._ends[0][2].is_running:
            heapq.heappop(self._ends)
        if self._ends and not self._is_paused:
            seconds = self._stall_s + max(self._ends[0][0] - self._mark, 0.0) * self._step_s
            self._timer = asyncio.get_running_loop().call_later(seconds * self._slowdown, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.account()
        self._go_on()

    def _end_done(self) -> None:
        while self._ends and (
            not self._ends[0][2].is_running or self._ends[0][0] <= self._mark + _SAME_TOKEN
        ):
            _, _, request = heapq.heappop(self._ends)
            if request.is_running:
                self._end(request)

    def _end(self, request: _Request) -> None:
        request.is_running = False
        del self._running[request]
        self.num_sampled += request.size
        self._cached[request.session] = request.prompt + request.size
        if not request.answer.done():
            request.answer.set_result(request.sampled(self.version))

    def _begin_waiting(self) -> None:
        slots = self._section.engine_slots
        while self._waiting and len(self._running) < slots and not self._is_paused:
            request = self._waiting.popleft()
            if request.answer.done():
                continue
            self._begin(request)

    def _begin(self, request: _Request) -> None:
        cached = min(self._cached.pop(request.session, 0), request.prompt)
        limit = self._section.cached_sessions
        while limit is not None and self._cached and len(self._cached) + len(self._running) >= limit:
            self._cached.popitem(last=False)
        self.num_prefilled += request.prompt - cached
        self._stall_s += (request.prompt - cached) / self._section.prefill_tok_per_s
        request.begin, request.is_running = self._mark, True
        self._running[request] = None
        self._number += 1
        heapq.heappush(self._ends, (self._mark + request.size, self._number, request))


class SimulatedEngines:
    """All engines: a session stays at the one that had the fewest sessions when it began."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self.engines = engines
        self._of_session: dict[str, int] = {}
        self._loads = [0] * len(engines)
        # Loads with their engines; those that are out of date are skipped.
        self._by_load = [(0, index) for index in range(len(engines))]

    async def generate(self, session: str, prompt: int, size: int) -> Sampled:
        """See `SimulatedEngine`."""
        index = self._of_session.get(session)
        if index is None:
            index = self._of_session[session] = self._least()
            self._count(index, 1)
        return await self.engines[index].generate(session, prompt, size)

    def close_session(self, session: str) -> None:
        """The session has ended."""
        index = self._of_session.pop(session, None)
        if index is not None:
            self.engines[index].close_session(session)
            self._count(index, -1)

    @property
    def is_busy(self) -> bool:
        """Whether any of them computes."""
        return any(engine.is_busy for engine in self.engines)

    def total(self, of: Callable[[SimulatedEngine], float]) -> float:
        """The sum of a count over all engines, up to now."""
        for engine in self.engines:
            engine.account()
        return sum(of(engine) for engine in self.engines)

    def _least(self) -> int:
        while (first := self._by_load[0])[0] != self._loads[first[1]]:
            heapq.heappop(self._by_load)
        return first[1]

    def _count(self, index: int, number: int) -> None:
        self._loads[index] += number
        heapq.heappush(self._by_load, (self._loads[index], index))

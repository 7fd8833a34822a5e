"""The state of all slots: the session and request of each, and its tokens, as arrays over all slots.

A slot is free, idle (a session's tokens are cached, no request runs) or active (a request runs in it).
Of a slot's `num_tokens` tokens the first `cached` have keys in the cache. The token sampled last is not
cached: it is computed together with the tokens after it.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.engine.embedded.sampler import Rules
from agentrl.types import (
    KEPT_IDS,
    UNKNOWN_EXPERT,
    Completion,
    ExpertLayers,
    Extra,
    Finish,
    FloatArray,
    IntArray,
    NumberArray,
    RequestTimes,
    RoutedArray,
    is_known,
    routed_parts,
)
from agentrl.types.seams import Sampling

_NO_TOKEN = -1
_MIN_SHARED = 16
"""Fewest tokens for whose keys and values it pays to look at other slots (count)."""
_COMPARED = 8
"""Slots that are compared with one, token by token (count)."""


class Asker(NamedTuple):
    """Whose a request is.

    client: its names; several clients take turns for the slots, see `Turns`. salt: what requests with another
    one have computed is not used for it.
    """

    client: tuple[str, ...] = ()
    salt: str = ""


NOBODY = Asker()


@dataclass(eq=False, slots=True)
class Request:
    """A pending call of generate: waiting while `slot` is None, then running in that slot.

    asker: whose it is. kept_ids: of each sampled token, where they are asked for.
    score_from: the tokens of the prompt after this one are scored, and none is sampled; None = one samples.
    scores: float32, their logprobs, once they are computed.
    arrived_s, admitted_s, prefilled_s: when it came, got its slot, and had its first token.
    """

    prompt: IntArray
    sampling: Sampling
    session: str
    seed: int
    stop_token_ids: tuple[int, ...]
    answer: asyncio.Future[Completion]
    slot: int | None = None
    cached_tokens: int = 0
    asker: Asker = NOBODY
    kept_ids: list[NumberArray] = field(default_factory=list)
    score_from: int | None = None
    scores: FloatArray | None = None
    arrived_s: float = field(default_factory=time.perf_counter)
    admitted_s: float = 0.0
    prefilled_s: float | None = None

    @property
    def seconds(self) -> RequestTimes:
        """What it took until now, once it has a slot, and before it was stopped."""
        now, begun = time.perf_counter(), self.sampling.continues
        first = now if self.prefilled_s is None else self.prefilled_s
        admitted = self.admitted_s
        own = RequestTimes(now - self.arrived_s, admitted - self.arrived_s, first - admitted, now - first)
        return own if begun is None else begun.seconds + own

    @property
    def ids(self) -> IntArray:
        """The prompt, and the tokens that the request has sampled before it was stopped."""
        begun = self.sampling.continues
        return self.prompt if begun is None else np.concatenate([self.prompt, begun.token_ids])


class SlotSessions:
    """Which session has which slot. One whose session has no request is idle: it keeps the tokens of that."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._sessions: dict[int, str] = {}
        # Insertion order is the order of last use: the first is evicted first.
        self._idle: dict[str, int] = {}

    @property
    def is_any_free(self) -> bool:
        """Whether a slot is free or idle."""
        return bool(self._free or self._idle)

    @property
    def taken(self) -> tuple[int, ...]:
        """The slots that are not free."""
        return tuple(self._sessions)

    @property
    def idle_sessions(self) -> tuple[str, ...]:
        """The sessions whose slots are idle."""
        return tuple(self._idle)

    def idle_slot(self, session: str) -> int | None:
        """The idle slot of a session; None = it has none."""
        return self._idle.get(session)

    def oldest_idle(self) -> int | None:
        """The slot to release before the next one is claimed; None = one is free."""
        return None if self._free else next(iter(self._idle.values()))

    def claim(self, session: str) -> int:
        """The session's slot, or a free one."""
        if session in self._idle:
            return self._idle.pop(session)
        slot = heapq.heappop(self._free)
        self._sessions[slot] = session
        return slot

    def rest(self, slot: int) -> None:
        """A slot is idle from now on."""
        self._idle[self._sessions[slot]] = slot

    def release(self, slot: int) -> None:
        """A slot is free from now on."""
        self._idle.pop(self._sessions.pop(slot), None)
        heapq.heappush(self._free, slot)

    def exchange(self, active: int, other: int) -> None:
        """Swap an active slot with a free or idle one."""
        evicted = self._sessions.pop(other, None)
        self._sessions[other] = self._sessions.pop(active)
        if evicted is None:
            self._free[self._free.index(other)] = active
            heapq.heapify(self._free)
        else:
            self._sessions[active] = evicted
            self._idle[evicted] = active


class RoutedSlots:
    """The experts of the cached tokens of each slot, by their columns, from the first request on that asks.

    layers: those of the model. A token keeps the experts of the first pass that it was an input of, also
    where new weights compute it again.
    """

    def __init__(self, layers: ExpertLayers, num_slots: int, context_len: int) -> None:
        self.layers = layers
        self._shape = (num_slots, context_len)
        self._rows: RoutedArray | None = None

    @property
    def is_on(self) -> bool:
        """Whether a request has asked."""
        return self._rows is not None

    def begin(self, slot: int, cached: int, sampling: Sampling) -> None:
        """A request begins in a slot, of which the first `cached` tokens are not computed again."""
        if sampling.return_routed_experts is not None and self._rows is None:
            num_slots, context_len = self._shape
            rows = self.layers.unknown(num_slots * context_len)
            self._rows = rows.reshape(num_slots, context_len, *rows.shape[1:])
        if self._rows is not None:
            self._rows[slot, cached:] = UNKNOWN_EXPERT

    def put(self, slot: int, first: int, rows: RoutedArray) -> None:
        """The experts of tokens from column `first` on, [tokens, layers, k]."""
        if self._rows is not None:
            place = self._rows[slot, first : first + len(rows)]
            is_missing = ~is_known(place)
            place[is_missing] = rows[is_missing]

    def parts(self, slot: int, request: Request, end: int) -> tuple[Mapping[str, Extra], Mapping[str, Extra]]:
        """The extras of what a request has sampled, up to column `end`, and of its prompt, if it asks."""
        before = request.sampling.routed_before()
        if before is None or self._rows is None:
            return {}, {}
        first, start = request.sampling.routed_experts_start_len, len(request.prompt)
        rows = self._rows[slot, first:end].copy()
        rows[: len(before)] = before[: len(rows)]
        return routed_parts(rows, start - first, end - start)

    def exchange(self, a: int, b: int) -> None:
        """Swap two slots."""
        if self._rows is not None:
            self._rows[[a, b]] = self._rows[[b, a]]


class Slots:
    """The state of all slots. Arrays have one row per slot. sessions: whose slots they are.

    routed: the experts of their tokens; None = the model has none that are known.
    """

    def __init__(self, num_slots: int, context_len: int, routed: RoutedSlots | None = None) -> None:
        self.routed = routed
        self.ids = np.zeros((num_slots, context_len), np.int64)
        self.logprobs: FloatArray = np.zeros((num_slots, context_len), np.float32)
        self.versions: IntArray = np.zeros((num_slots, context_len), np.int32)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.cached = np.zeros(num_slots, np.int64)
        self.start = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.active = np.zeros(num_slots, np.bool_)
        self.scoring = np.zeros(num_slots, np.bool_)
        # Hashes of prompts, by which siblings are found, and of salts.
        self.prompts = np.zeros(num_slots, np.int64)
        self.salts = np.zeros(num_slots, np.int64)
        self.requests: list[Request | None] = [None] * num_slots
        self.searching: set[int] = set()
        self._rules = _no_rules(num_slots)
        self._stops = np.full((num_slots, 1), _NO_TOKEN, np.int64)
        self.sessions = SlotSessions(num_slots)

    def admit(self, request: Request) -> None:
        """Assign the request its session's slot, a free one, or the least recently used idle one."""
        is_own = self.sessions.idle_slot(request.session) is not None
        slot = self._claim(request.session)
        sampling, start = request.sampling, len(request.prompt)
        ids, size = request.ids, len(request.ids)
        shared, salt = _shared(self.ids[slot, : self.cached[slot]], ids), hash(request.asker.salt)
        is_known = self.salts[slot] == salt and (is_own or shared >= _MIN_SHARED)
        self.cached[slot] = shared if is_known else 0
        self.salts[slot] = salt
        if request.score_from is not None:
            self.cached[slot] = min(int(self.cached[slot]), request.score_from)
            self.scoring[slot] = True
        self.ids[slot, :size] = ids
        if sampling.continues is not None:
            self.logprobs[slot, start:size] = sampling.continues.logprobs
            self.versions[slot, start:size] = sampling.continues.versions
            request.kept_ids = sampling.kept_before()
        self.num_tokens[slot], self.start[slot] = size, start
        self.prompts[slot] = hash(request.prompt.tobytes())
        self.limit[slot] = start + sampling.max_new_tokens
        _set_rules(self._rules, slot, request)
        self._set_stops(slot, request.stop_token_ids)
        if sampling.stop:
            self.searching.add(slot)
        self.requests[slot] = request
        self.active[slot] = True
        request.slot = slot
        request.cached_tokens = min(int(self.cached[slot]), start)
        if self.routed is not None:
            self.routed.begin(slot, int(self.cached[slot]), sampling)

    def rules(self, slots: npt.NDArray[np.int64]) -> Rules:
        """The sampling rules of these slots, for the next token of each."""
        all_rules = self._rules
        return Rules(
            temperature=all_rules.temperature[slots],
            top_p=all_rules.top_p[slots],
            top_k=all_rules.top_k[slots],
            seeds=all_rules.seeds[slots],
            indices=(self.num_tokens[slots] - self.start[slots]).astype(np.uint64),
            keeps=all_rules.keeps[slots],
        )

    def append(
        self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], logprobs: FloatArray, version: int
    ) -> None:
        """Append one sampled token to each of these slots."""
        ends = self.num_tokens[slots]
        self.ids[slots, ends] = tokens
        self.logprobs[slots, ends] = logprobs
        self.versions[slots, ends] = version
        self.num_tokens[slots] = ends + 1

    def stopped(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether the last token of each of these slots is one of its stop tokens."""
        last = self.ids[slots, self.num_tokens[slots] - 1]
        hits: npt.NDArray[np.bool_] = (self._stops[slots] == last[:, None]).any(-1)
        return hits

    def request(self, slot: int) -> Request:
        """The request that runs in an active slot."""
        request = self.requests[slot]
        if request is None:
            raise ValueError(f"no request runs in slot {slot}")
        return request

    def completion(self, slot: int, finish: Finish, matched: str | int | None) -> Completion:
        """The tokens that the slot's request has sampled so far."""
        sampled = slice(int(self.start[slot]), int(self.num_tokens[slot]))
        request = self.request(slot)
        routed, end = self.routed, int(self.num_tokens[slot])
        extras, of_prompt = ({}, {}) if routed is None else routed.parts(slot, request, end)
        if request.sampling.keeps_ids:
            extras = {**extras, KEPT_IDS: Extra.of_lists(request.kept_ids)}
        return Completion(
            self.ids[slot, sampled].astype(np.int32),
            self.logprobs[slot, sampled].copy(),
            self.versions[slot, sampled].copy(),
            finish,
            matched,
            request.cached_tokens,
            request.sampling.temperature,
            extras,
            request.seconds,
            of_prompt,
        )

    def scored(self, slot: int) -> Request:
        """The request of a slot with all its logprobs; they are copied from the slot."""
        request = self.request(slot)
        first = (request.score_from or 0) + 1
        request.scores = self.logprobs[slot, first : int(self.num_tokens[slot])].copy()
        return request

    def keep(self, slot: int) -> None:
        """Make an active slot idle: the request has ended, its tokens stay for the session's next turn."""
        self._deactivate(slot)
        self.sessions.rest(slot)

    def release(self, slot: int) -> None:
        """Free a slot. What is cached stays, for others that begin alike, until the slot is used again."""
        self._deactivate(slot)
        self.sessions.release(slot)

    def forget(self, session: str) -> None:
        """Release the idle slot of a session; a session without one is ignored."""
        if (slot := self.sessions.idle_slot(session)) is not None:
            self.release(slot)

    def clear(self) -> None:
        """Release every slot that is not free, and drop what is cached."""
        for slot in self.sessions.taken:
            self.release(slot)
        self.cached[:] = 0

    def drop_caches(self) -> None:
        """Invalidate all cached keys and values: idle slots are freed, active ones compute theirs again."""
        for session in self.sessions.idle_sessions:
            self.forget(session)
        self.cached[:] = 0

    def running(self) -> npt.NDArray[np.int64]:
        """The active slots, in order."""
        return np.flatnonzero(self.active)

    def num_due(self) -> npt.NDArray[np.int64]:
        """The tokens of each slot that are computed: where they are scored, nothing follows the last one."""
        due: npt.NDArray[np.int64] = self.num_tokens - self.scoring
        return due

    def exchange(self, active: int, other: int) -> None:
        """Swap an active slot with a free or idle one; the caller moves the cached keys and values."""
        arrays = (
            self.ids,
            self.logprobs,
            self.versions,
            self.num_tokens,
            self.cached,
            self.start,
            self.limit,
            self.prompts,
            self.salts,
        )
        rules = self._rules
        more = (rules.temperature, rules.top_p, rules.top_k, rules.seeds, rules.keeps)
        for array in (*arrays, self.active, self.scoring, self._stops, *more):
            array[[active, other]] = array[[other, active]]
        requests = self.requests
        requests[active], requests[other] = requests[other], requests[active]
        moved = requests[other]
        if moved is not None:
            moved.slot = other
        if active in self.searching:
            self.searching = (self.searching - {active}) | {other}
        self.sessions.exchange(active, other)

    def _claim(self, session: str) -> int:
        if self.sessions.idle_slot(session) is None and (oldest := self.sessions.oldest_idle()) is not None:
            self.release(oldest)
        return self.sessions.claim(session)

    def _deactivate(self, slot: int) -> None:
        self.active[slot] = self.scoring[slot] = False
        self.requests[slot] = None
        self.searching.discard(slot)

    def _set_stops(self, slot: int, token_ids: Sequence[int]) -> None:
        width = self._stops.shape[1]
        if len(token_ids) > width:
            more = ((0, 0), (0, len(token_ids) - width))
            self._stops = np.pad(self._stops, more, constant_values=_NO_TOKEN)
        self._stops[slot] = _NO_TOKEN
        self._stops[slot, : len(token_ids)] = token_ids


def _shared(cached: npt.NDArray[np.int64], prompt: IntArray) -> int:
    """How many of the cached tokens a prompt begins with."""
    # The last token is always computed: the next one is sampled from its logits.
    most = min(len(cached), len(prompt) - 1)
    differs = np.flatnonzero(cached[:most] != prompt[:most])
    return int(differs[0]) if len(differs) else most


def _set_rules(rules: Rules, slot: int, request: Request) -> None:
    """The rules of a slot, for all tokens of a request."""
    sampling = request.sampling
    rules.temperature[slot] = sampling.temperature
    rules.top_p[slot] = sampling.top_p
    rules.top_k[slot] = sampling.top_k
    rules.seeds[slot] = request.seed
    rules.keeps[slot] = sampling.keeps_ids


def _no_rules(num_slots: int) -> Rules:
    return Rules(
        temperature=np.ones(num_slots, np.float32),
        top_p=np.ones(num_slots, np.float32),
        top_k=np.zeros(num_slots, np.int64),
        seeds=np.zeros(num_slots, np.uint64),
        indices=np.zeros(num_slots, np.uint64),
        keeps=np.zeros(num_slots, np.bool_),
    )


def shared_prefix(
    slots: Slots, slot: int, others: npt.NDArray[np.bool_], held: npt.NDArray[np.int64]
) -> tuple[int, int]:
    """Which of the other slots begins with most of a slot's tokens, and with how many; the last is left out.

    others: whether each slot may be it. held: how many tokens of each count. 0 tokens = none begins with
    `_MIN_SHARED` more than are cached of the slot itself.
    """
    most, least = int(slots.num_tokens[slot]) - 1, int(slots.cached[slot]) + _MIN_SHARED
    best = slot, 0
    if most < least:
        return best
    # One column leaves those that begin alike, as all do that have one system prompt.
    column = slots.ids[:, least - 1]
    alike = others & (held >= least) & (column == column[slot]) & (slots.salts == slots.salts[slot])
    siblings = np.flatnonzero(alike & (slots.prompts == slots.prompts[slot]))
    for other in (*siblings[:1].tolist(), *np.flatnonzero(alike)[:_COMPARED].tolist()):
        size = min(most, int(held[other]))
        differs = np.flatnonzero(slots.ids[slot, :size] != slots.ids[other, :size])
        shared = int(differs[0]) if len(differs) else size
        if shared >= max(least, best[1] + 1):
            best = other, shared
    return best


def no_tokens(finish: Finish = Finish.ABORT) -> Completion:
    """The completion of a request that was aborted before it had a slot, or that samples none."""
    return Completion(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), finish)

"""Statistics of tool calls, and token usage at a chat endpoint: sums over one episode or many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

LATENCY_BINS_MS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000)
"""Upper ends of the bins of `ToolStats.took`, in milliseconds; longer calls are in the bin `more`."""


@dataclass(frozen=True, slots=True)
class ToolStats:
    """The calls of one tool (counts, unless stated otherwise).

    calls: all calls but surplus ones, which are not executed. malformed: calls that could not be parsed
    (broken JSON and the like). coerced: calls that fitted the schema only after a correction.
    timeouts: calls that were stopped at a deadline. truncated: calls with results longer than
    `Limits.max_tool_chars`.
    rejected: calls that violate the schema, by keyword of JSON Schema (`required`, `type`, `enum`, ...) or
    `value` (a pydantic model's own check); or that the tool refused: `tool`, or a kind of the tool's own.
    failed: calls that failed without fault of the model, by kind (`error`, `unavailable`, `crashed`, ...).
    took: calls by latency, the upper end of the bin as name (`30ms`, `more`).
    seconds: wall time in the tool, summed over the calls. queue_seconds: that of waiting for a free slot.
    """

    calls: int = 0
    malformed: int = 0
    coerced: int = 0
    timeouts: int = 0
    truncated: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    took: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    queue_seconds: float = 0.0

    @property
    def latency_ms(self) -> float | None:
        """Mean wall time of the calls that could be parsed, in milliseconds; None where there are none."""
        return 1e3 * self.seconds / readable if (readable := self.calls - self.malformed) > 0 else None

    def events(self) -> Iterator[tuple[str, int]]:
        """The counts that are equal in every replay of an episode, by name (`rejected/type`)."""
        counts = {
            "calls": self.calls,
            "malformed": self.malformed,
            "coerced": self.coerced,
            "timeouts": self.timeouts,
            "truncated": self.truncated,
        }
        yield from ((name, count) for name, count in counts.items() if count)
        for name, table in (("rejected", self.rejected), ("failed", self.failed)):
            yield from ((f"{name}/{kind}", count) for kind, count in sorted(table.items()))

    def __add__(self, other: ToolStats) -> ToolStats:
        """The sums of both."""
        return ToolStats(
            calls=self.calls + other.calls,
            malformed=self.malformed + other.malformed,
            coerced=self.coerced + other.coerced,
            timeouts=self.timeouts + other.timeouts,
            truncated=self.truncated + other.truncated,
            rejected=summed((self.rejected, other.rejected)),
            failed=summed((self.failed, other.failed)),
            took=summed((self.took, other.took)),
            seconds=self.seconds + other.seconds,
            queue_seconds=self.queue_seconds + other.queue_seconds,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as a chat endpoint counts them.

    cached_tokens: of the prompt. reasoning_tokens: of the completion.
    cost: in the currency of the prices; None = no prices.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cost: float | None = None

    def __add__(self, other: Usage) -> Usage:
        """The sums of both."""
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            sum(costs) if costs else None,
        )


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """How long an engine took for a request (seconds); None = it does not say.

    request: from its arrival to its end. queue: until its prompt was computed. prefill: of the prompt, with
    the first token. decode: of the tokens after that.
    """

    request: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None

    def __add__(self, other: RequestTimes) -> RequestTimes:
        """The sums of both, of a request that was made in two parts."""
        return RequestTimes(
            _sum(self.request, other.request),
            _sum(self.queue, other.queue),
            _sum(self.prefill, other.prefill),
            _sum(self.decode, other.decode),
        )


SPECULATION = ("spec_proposed", "spec_accepted", "spec_verified")
"""Counts of speculative decoding: proposed tokens, those that were taken, passes that verified some."""

UNTIMED = RequestTimes()
"""Of an engine that says nothing."""


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


def summed(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Tables of counts, added up by name."""
    total: Counter[str] = Counter()
    for table in tables:
        total.update(table)
    return dict(total)


def latency_bin(seconds: float) -> str:
    """The bin of `ToolStats.took` for a call of `seconds`."""
    return next((f"{limit}ms" for limit in LATENCY_BINS_MS if seconds * 1e3 <= limit), "more")

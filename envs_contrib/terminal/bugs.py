"""The mistakes that are planted in the packages: one of them in each repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Bug(NamedTuple):
    """A change of a module's text. kind: of mistake. old: occurs once in the module."""

    kind: str
    old: str
    new: str


BUGS: Mapping[str, Sequence[Bug]] = {
    "intervals": (
        Bug("boundary", "start <= merged[-1][1] + 1:", "start <= merged[-1][1]:"),
        Bug("wrong value", "merged[-1][1] = max(merged[-1][1], end)", "merged[-1][1] = end"),
        Bug("off by one", "sum(end - start + 1 for", "sum(end - start for"),
        Bug("off by one", "[before[1] + 1, after[0] - 1]", "[before[1], after[0]]"),
    ),
    "ledger": (
        Bug("boundary", "cents > self.balances.get(source, 0)", "cents >= self.balances.get(source, 0)"),
        Bug("missing statement", "        self.balances[source] -= cents\n", ""),
        Bug("format", "{cents % 100:02d}", "{cents % 100}"),
        Bug("order", "(-ledger.balances[account], account)", "(ledger.balances[account], account)"),
    ),
    "schedule": (
        Bug("order", "ready = sorted(job for", "ready = list(job for"),
        Bug("wrong value", "hours.get(job, 1)", "hours.get(job, 0)"),
        Bug(
            "wrong value",
            "max((ends[needed] for needed in jobs.get(job, [])), default=0)",
            "sum(ends[needed] for needed in jobs.get(job, []))",
        ),
        Bug("condition", "if frontier & set(needed)", "if job in needed"),
    ),
    "cache": (
        Bug(
            "missing statement",
            "        self.values.move_to_end(key)\n        return self.values[key]",
            "        return self.values[key]",
        ),
        Bug("order", "popitem(last=False)", "popitem(last=True)"),
        Bug("boundary", "len(self.values) > self.capacity", "len(self.values) >= self.capacity"),
        Bug(
            "missing statement",
            "        self.values[key] = value\n        self.values.move_to_end(key)\n",
            "        self.values[key] = value\n",
        ),
    ),
    "grid": (
        Bug("order", "zip(*reversed(rows), strict=True)", "zip(*rows, strict=True)"),
        Bug("wrong value", "0 <= c < len(rows[0])", "0 <= c < len(rows)"),
        Bug("order", "queue.popleft()", "queue.pop()"),
        Bug("order", "sorted(sizes, reverse=True)", "sorted(sizes)"),
    ),
    "codec": (
        Bug("wrong value", "digits += character", "digits = character"),
        Bug("condition", 'word.strip(".,;:!?").lower()', 'word.strip(".,;:!?")'),
        Bug("missing statement", '(4, "IV"), ', ""),
        Bug("missing statement", '(900, "CM"), ', ""),
    ),
}
"""By module; the last of each is in the test split only."""

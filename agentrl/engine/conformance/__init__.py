"""The guarantees of every engine, as checks that run against any implementation.

The author of an engine describes it once, as a `Subject`, and runs `run_conformance`; or, for one test per
guarantee, each `ConformanceCheck` of `CHECKS`. An engine declares a missing capability in its `EngineCaps`:
the report lists the checks that were skipped, with that capability. No check is skipped without a
declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

from agentrl.engine.conformance.checks import CHECKS, ConformanceCheck
from agentrl.engine.conformance.subject import ConformanceError, EngineCaps, Subject, WeightVersion

__all__ = [
    "CHECKS",
    "ConformanceCheck",
    "ConformanceError",
    "EngineCaps",
    "Report",
    "Subject",
    "WeightVersion",
    "lack",
    "run_conformance",
]


class Report(NamedTuple):
    """passed: names of checks. skipped: names of checks, each with the missing capability."""

    passed: tuple[str, ...]
    skipped: tuple[str, ...]


def lack(check: ConformanceCheck, caps: EngineCaps) -> str | None:
    """The reason why a check cannot run on an engine with these capabilities; None where it can."""
    missing = [cap.name for cap in fields(caps) if cap.name == check.needs and not getattr(caps, cap.name)]
    return f"{check.name}: the engine declares that it lacks {missing[0]}" if missing else None


async def run_conformance(make: Callable[[], Subject]) -> Report:
    """Run every applicable check, each on a new engine, and close the engine.

    Raises:
        ConformanceError: the first check that fails.
    """
    passed: list[str] = []
    skipped: list[str] = []
    for check in CHECKS:
        subject = make()
        reason = lack(check, subject.caps)
        if reason is None:
            await check.run(subject)
        (skipped if reason else passed).append(reason or check.name)
        await subject.engine.close()
    return Report(tuple(passed), tuple(skipped))

"""The results of probes: findings and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentrl.types import JSON

Severity: TypeAlias = Literal["error", "warning"]
"""Of a finding. With an error do not train on this world; a warning is for the author to judge."""
Code: TypeAlias = Literal[
    # Parts of the class.
    "make-fails",
    "tasks-fails",
    "class-fails",
    "close-fails",
    # Tasks.
    "no-tasks",
    "duplicate-task-id",
    "tasks-differ",
    "splits-overlap",
    "splits-nearly-overlap",
    "prompt-too-long",
    "answer-in-prompt",
    "answer-in-long-prompt",
    # The expert and other policies.
    "no-expert",
    "expert-fails",
    "expert-falls-short",
    "expert-score-too-low",
    "expert-too-long",
    "nothing-to-learn",
    "above-chance",
    "leaving-pays",
    "length-pays",
    "never-full-marks",
    "crash",
    # What the world says, and what it lets do.
    "observation-unbounded",
    "observation-cut",
    "answer-in-observation",
    "answer-in-tools",
    "tool-undeclared",
    "host-readable",
    "host-writable",
    "network-undeclared",
    # Whether an episode is itself alone, and the same again.
    "not-repeatable",
    "not-replayable",
    "scores-differ",
    "global-random",
    "episodes-interfere",
    "state-lost",
    "ignores-cancelling",
    "leaves-thread",
    "leaves-process",
    "leaves-file",
    "leaves-socket",
    "leaves-task",
    # What it costs.
    "memory-grows",
    "blocks-loop",
    "slow-reset",
    "slow-step",
    "slow-last-step",
    "slow-rewards",
]
"""The codes of all findings. Each has a planted fault in the tests, and a row in the guide."""
LEAVES: Mapping[str, Code] = {
    "thread": "leaves-thread",
    "process": "leaves-process",
    "file": "leaves-file",
    "socket": "leaves-socket",
    "task": "leaves-task",
}
"""By the kind of what is left behind."""
_MAX_NAMES = 5
_KIND = re.compile(r": (?=[a-z_]+ [a-z_]+: )")
"""Where the failure of an episode begins, as `failure_line` writes it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of an environment. code: its name. text: a sentence with the next step."""

    code: Code
    severity: Severity
    text: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The findings and figures of one probe.

    probe: its name, by which the checks of RFC 008 say what must have been tried; "" = none asks for it.
    declared: what it has read of the environment's own statements.
    """

    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, float] | None = None
    probe: str = ""
    declared: Mapping[str, JSON] | None = None


def error(code: Code, text: str) -> Finding:
    """A finding that fails the check."""
    return Finding(code, "error", _single_line(text))


def warning(code: Code, text: str) -> Finding:
    """A finding that does not fail the check."""
    return Finding(code, "warning", _single_line(text))


def some(names: Sequence[str]) -> str:
    """The first few of some names, and how many more there are."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def some_failures(lines: Sequence[str]) -> str:
    """The first few of some failures, `who: what`, and how many more there are; each once, with who has it.

    who: a task, or a policy and a task.
    """
    by_kind: dict[str, list[str]] = {}
    for line in lines:
        place = _KIND.search(line)
        who, what = (line[: place.start()], line[place.start() + 2 :]) if place else ("", line)
        by_kind.setdefault(what, []).append(who)
    return some([f"{what} ({some(whos)})" if any(whos) else what for what, whos in by_kind.items()])


def only_rewards(lines: Sequence[str]) -> bool:
    """Whether all these failures are of rewards, and none is of the world."""
    places = [(_KIND.search(line), line) for line in lines]
    return all(place and line[place.end() :].startswith(("reward ", "score ")) for place, line in places)


def findings_of(results: Sequence[ProbeResult]) -> Iterator[Finding]:
    """All findings, in the order of the probes."""
    for result in results:
        yield from result.findings


def _single_line(text: str) -> str:
    """A text in one line, with unprintable characters escaped: it may quote exceptions of other packages."""
    line = " ".join(text.split())
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)

"""The results of a check: findings, figures, and the report of both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from html import escape

from agentrl.types import JSON

_MAX_NAMES = 5
_KIND = re.compile(r": (?=[a-z_]+ [a-z_]+: )")
"""Where the failure of an episode begins, as `failure_line` writes it."""


class Severity(StrEnum):
    """Of a finding. With an error do not train on this world; a warning is for the author to judge."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of an environment. code: its name, kebab-case. text: a sentence with the next step."""

    code: str
    severity: Severity
    text: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The report of `check_env` on an environment.

    env_id: its id, or `module:Class` of an unregistered one. seed: the seed of all randomness of the check.
    findings: in the order of the checks.
    figures: name -> number; units are in the names (`reset_ms`, `memory_mib_per_100_episodes`).
    """

    env_id: str
    seed: int
    findings: tuple[Finding, ...]
    figures: Mapping[str, float]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.ERROR)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of all findings, in the order of the checks."""
        return tuple(finding.code for finding in self.findings)

    def to_json(self) -> dict[str, JSON]:
        """The report as JSON."""
        findings: list[JSON] = [asdict(finding) for finding in self.findings]
        head: dict[str, JSON] = {"env": self.env_id, "ok": self.ok, "seed": self.seed}
        return {**head, "findings": findings, "figures": dict(self.figures)}

    def __str__(self) -> str:
        """One line for each finding, as a failed assertion prints it."""
        lines = [f"{finding.severity} {finding.code}: {finding.text}" for finding in self.findings]
        return "\n".join([f"{self.env_id}: {'passed' if self.ok else 'failed'}", *lines])

    def _repr_html_(self) -> str:
        """The same lines, where a notebook shows the report."""
        return f"<pre style='white-space: pre-wrap'>{escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The findings and figures of one probe."""

    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, float] | None = None


def error(code: str, text: str) -> Finding:
    """A finding that fails the check."""
    return Finding(code, Severity.ERROR, _single_line(text))


def warning(code: str, text: str) -> Finding:
    """A finding that does not fail the check."""
    return Finding(code, Severity.WARNING, _single_line(text))


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


def findings_of(results: Sequence[ProbeResult]) -> Iterator[Finding]:
    """All findings, in the order of the probes."""
    for result in results:
        yield from result.findings


def _single_line(text: str) -> str:
    """A text in one line, with unprintable characters escaped: it may quote exceptions of other packages."""
    line = " ".join(text.split())
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)

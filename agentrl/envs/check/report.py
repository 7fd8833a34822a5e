"""What a check found: findings, figures, and the one report that holds both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from agentrl.types import JSON

_MOST_NAMED = 5


class Severity(StrEnum):
    """error: do not train on this world. warning: look at it."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. code: its name, kebab-case; text: a sentence that says what to do next."""

    code: str
    severity: Severity
    text: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check_env` found out about an environment.

    env_id: its id, or `module:Class` of one that has none. seed: what the check drew everything from.
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
        """Everything, for machines."""
        findings: list[JSON] = [asdict(finding) for finding in self.findings]
        head: dict[str, JSON] = {"env": self.env_id, "ok": self.ok, "seed": self.seed}
        return {**head, "findings": findings, "figures": dict(self.figures)}

    def __str__(self) -> str:
        """One line for each finding: what an assertion shows that did not hold."""
        lines = [f"{finding.severity} {finding.code}: {finding.text}" for finding in self.findings]
        return "\n".join([f"{self.env_id}: {'passed' if self.ok else 'failed'}", *lines])


@dataclass(frozen=True, slots=True)
class Probed:
    """What one probe found out."""

    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, float] | None = None


def error(code: str, text: str) -> Finding:
    """A finding that fails the check."""
    return Finding(code, Severity.ERROR, _one_line(text))


def warning(code: str, text: str) -> Finding:
    """A finding that does not."""
    return Finding(code, Severity.WARNING, _one_line(text))


def some(names: Sequence[str]) -> str:
    """The first few of some names, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def findings_of(probed: Sequence[Probed]) -> Iterator[Finding]:
    """All findings, in the order of the probes."""
    for one in probed:
        yield from one.findings


def _one_line(text: str) -> str:
    """Other people's exceptions are quoted: without line breaks, and with what no terminal shows escaped."""
    line = " ".join(text.split())
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)

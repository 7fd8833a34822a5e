"""The report of a check: findings, figures, and the outcome of every check of RFC 008."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from agentrl.envs.check.findings import Code, Finding
from agentrl.envs.check.outcomes import CheckOutcome, Status, counted, openenv_report, outcomes
from agentrl.envs.check.package.folder import PackageFolder
from agentrl.errors import ConfigError
from agentrl.runtime.files import write_text
from agentrl.types import JSON

_LABEL = "agentrl envs check"
_PASSED, _FAILED = "#3c873a", "#b03030"
_EDGE, _CHARACTER = 12, 7
"""Pixels at the ends of a text, and of a character of the badge's font."""
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img" aria-label="{label}: {text}">
<rect width="{first}" height="20" fill="#555"/>
<rect x="{first}" width="{second}" height="20" fill="{colour}"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11">
<text x="{left}" y="14">{label}</text><text x="{right}" y="14">{text}</text>
</g>
</svg>
"""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The report of `check_env` on an environment.

    env_id: its id, or `module:Class` of an unregistered one. seed: the seed of all randomness of the check.
    findings: in the order of the checks.
    figures: name -> number; units are in the names (`reset_ms`, `memory_mib_per_100_episodes`).
    probes: what was tried: name -> seconds that it took.
    declared: what the environment says of itself: scores, limits, resources, tools, tasks of each split.
    package: the folder of OpenEnv that was checked; None = it was a class.
    """

    env_id: str
    seed: int
    findings: tuple[Finding, ...]
    figures: Mapping[str, float]
    probes: Mapping[str, float] = field(default_factory=dict)
    declared: Mapping[str, JSON] = field(default_factory=dict)
    package: PackageFolder | None = None

    @property
    def ok(self) -> bool:
        """Whether no finding is an error, and no check of a package's files or declarations fails."""
        return not self.errors and not any(outcome.status == "fail" for outcome in self.of_package)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def codes(self) -> tuple[Code, ...]:
        """The codes of all findings, in the order of the checks."""
        return tuple(finding.code for finding in self.findings)

    @property
    def outcomes(self) -> tuple[CheckOutcome, ...]:
        """The outcome of every check of OpenEnv's RFC 008, in the order of its policy."""
        return outcomes(self.findings, self.figures, self.probes, self.declared, self.package)

    @property
    def of_package(self) -> tuple[CheckOutcome, ...]:
        """The outcomes of what the files of a package decide, and of what its manifest declares otherwise
        than it is; of a class there are none."""
        if self.package is None:
            return ()
        ids = {*self.package.decided, *self.package.misdeclared(self.declared, self.figures)}
        return tuple(outcome for outcome in self.outcomes if outcome.check.id in ids)

    @property
    def counts(self) -> Mapping[Status, int]:
        """How many checks of RFC 008 came out how; without those that are reserved for operators of hubs."""
        return counted(self.outcomes)

    @property
    def summary(self) -> str:
        """The verdict, and how many checks of RFC 008 passed: the text of the badge."""
        passed, total = self.counts.get("pass", 0), sum(self.counts.values())
        return f"{'passed' if self.ok else 'failed'}, RFC 008 {passed} of {total}"

    def badge(self) -> str:
        """The badge for a README, as an image (SVG): no other host is asked for it."""
        left, right = _LABEL, self.summary
        widths = [_EDGE + _CHARACTER * len(text) for text in (left, right)]
        return _SVG.format(
            total=sum(widths),
            first=widths[0],
            second=widths[1],
            colour=_PASSED if self.ok else _FAILED,
            label=left,
            text=right,
            left=widths[0] // 2,
            right=widths[0] + widths[1] // 2,
        )

    def badge_line(self, file: str) -> str:
        """The line of Markdown that shows the badge in `file`."""
        return f"![{_LABEL}: {self.summary}]({file})"

    def write(self, file: Path) -> None:
        """The report in OpenEnv's schema; beside it `.agentrl.json` has everything, and `.svg` the badge.

        Raises:
            ConfigError: a file cannot be written.
        """
        try:
            write_text(file, json.dumps(self.to_openenv(), indent=1) + "\n")
            write_text(file.with_suffix(".agentrl.json"), json.dumps(self.to_json(), indent=1) + "\n")
            write_text(file.with_suffix(".svg"), self.badge())
        except OSError as error:
            raise ConfigError(f"{file} cannot be written ({error.strerror}); choose another path.") from None

    def to_json(self) -> dict[str, JSON]:
        """The report as JSON."""
        findings: list[JSON] = [asdict(finding) for finding in self.findings]
        checks: list[JSON] = [outcome.to_json() for outcome in self.outcomes]
        head: dict[str, JSON] = {"env": self.env_id, "ok": self.ok, "seed": self.seed}
        return {**head, "findings": findings, "figures": dict(self.figures), "checks": checks}

    def to_openenv(self) -> dict[str, JSON]:
        """The report in the JSON schema of OpenEnv's `openenv validate` (version 2, policy v2)."""
        return openenv_report(self.env_id, self.outcomes, self.declared, self.package)

    def __str__(self) -> str:
        """One line for each finding, as a failed assertion prints it."""
        lines = [f"{finding.severity} {finding.code}: {finding.text}" for finding in self.findings]
        return "\n".join([f"{self.env_id}: {'passed' if self.ok else 'failed'}", *lines])

    def _repr_html_(self) -> str:
        """The same lines, where a notebook shows the report."""
        return f"<pre style='white-space: pre-wrap'>{escape(str(self))}</pre>"

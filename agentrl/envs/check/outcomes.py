"""The outcome of each check of RFC 008, from the findings of ours; and the report in OpenEnv's schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentrl.envs.check.findings import Finding
from agentrl.envs.check.package.dockerfile import Decided
from agentrl.envs.check.package.folder import PackageFolder
from agentrl.envs.check.rfc008 import CHECKS, DETERMINISM, LEVELS, Check, Facts
from agentrl.types import JSON

Figures = Mapping[str, float]
Status: TypeAlias = Literal["pass", "fail", "warn", "skipped"]
"""The outcome of a check. OpenEnv's schema says `skip` for `skipped`, and `fail` for `warn`, too."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """How a check came out. evidence: sentences. measured: its figures. seconds: that its probes took."""

    check: Check
    status: Status
    evidence: tuple[str, ...]
    measured: Figures
    seconds: float = 0.0

    def to_json(self) -> dict[str, JSON]:
        """As in the JSON of `CheckReport`."""
        return {
            "id": self.check.id,
            "level": LEVELS[self.check.level],
            "lane": self.check.lane,
            "severity": self.check.severity,
            "status": self.status,
            "evidence": list(self.evidence),
            "measured": dict(self.measured),
        }

    def to_openenv(self) -> dict[str, JSON]:
        """As a result of OpenEnv's report, which has no outcome `warn`: severities are the policy's."""
        status = {"skipped": "skip", "warn": "fail"}.get(self.status, self.status)
        failed = self.status in ("fail", "warn")
        return {
            "check_id": self.check.id,
            "status": status,
            "measured": dict(self.measured),
            "evidence": list(self.evidence),
            "remediation": f"Decided here: {self.check.here}" if failed else None,
            "duration_s": self.seconds,
        }


def outcomes(
    findings: Sequence[Finding],
    figures: Figures,
    probes: Figures,
    declared: Facts,
    package: PackageFolder | None = None,
) -> tuple[CheckOutcome, ...]:
    """The outcome of each of `CHECKS`. probes: seconds by name of what was tried. package: of which it is."""
    by_folder = {} if package is None else package.decided
    misdeclared = {} if package is None else package.misdeclared(declared, figures)
    decided = [
        _of_folder(check, by_folder[check.id])
        if check.id in by_folder
        else _outcome(check, findings, figures, probes, declared, misdeclared.get(check.id, ""))
        for check in CHECKS
    ]
    if any(outcome.check.id == DETERMINISM and outcome.status == "fail" for outcome in decided):
        decided = [_without_determinism(outcome) for outcome in decided]
    return tuple(decided)


def counted(found: Sequence[CheckOutcome]) -> Counter[Status]:
    """How many checks of an author's lane came out how."""
    return Counter(outcome.status for outcome in found if outcome.check.lane == "local")


def openenv_report(
    target: str, found: Sequence[CheckOutcome], declared: Facts, package: PackageFolder | None = None
) -> dict[str, JSON]:
    """The report in OpenEnv's JSON schema, version 2: checks of an author's lane alone, as it asks.

    The schema names the three kinds of packages that OpenEnv reads. A class is none of them: without a
    package, `signature` has the one of environments with reset and step, and `manifest` is null.
    """
    results = [outcome.to_openenv() for outcome in found if outcome.check.lane == "local"]
    for result in results:
        if result["check_id"] == "static.manifest":
            result["measured"] = dict(declared)
    decided = {outcome.check.level for outcome in found if outcome.status != "skipped"}
    levels: list[JSON] = [level for level in LEVELS if level in decided]
    return {
        "report_schema_version": "2",
        "target": target,
        "source_digest": str(declared.get("source_digest", "")) if package is None else package.digest,
        "signature": "openenv.yaml",
        "manifest": None if package is None or package.manifest is None else package.manifest.to_json(),
        "policy_version": "v2",
        "lane": "local",
        "levels_run": levels,
        "results": list(results),
        "verdict": verdict(found),
    }


def verdict(found: Sequence[CheckOutcome]) -> Literal["pass", "warn", "fail"]:
    """As their policy rolls up a report: a check that was skipped leaves `warn` at best."""
    statuses = counted(found)
    if statuses["fail"]:
        return "fail"
    return "warn" if statuses["warn"] or statuses["skipped"] else "pass"


def _outcome(
    check: Check,
    findings: Sequence[Finding],
    figures: Figures,
    probes: Figures,
    declared: Facts,
    misdeclared: str,
) -> CheckOutcome:
    measured = {name: figures[name] for name in check.figures if name in figures}
    seconds = sum(probes.get(name, 0.0) for name in check.probes)
    evidence = [f"{finding.code}: {finding.text}" for finding in findings if finding.code in check.codes]
    missing = [name for name in check.probes if name not in probes]
    if check.also is not None and not missing and (wrong := check.also({**declared, **figures})):
        evidence.append(wrong)
    if misdeclared:
        evidence.append(misdeclared)
    if evidence:
        status: Status = "fail" if check.severity == "fail" else "warn"
        return CheckOutcome(check, status, tuple(evidence), measured, seconds)
    if not check.probes:
        reason = f"{check.here}."
    elif missing:
        first = f", because of {findings[0].code}" if findings else ""
        reason = f"not tried ({', '.join(missing)}){first}."
    elif check.needs[0] and not declared.get(check.needs[0]):
        reason = f"{check.needs[1]}."
    else:
        return CheckOutcome(check, "pass", (f"{check.here}.",), measured, seconds)
    return CheckOutcome(check, "skipped", (reason,), measured, seconds)


def _of_folder(check: Check, decided: Decided) -> CheckOutcome:
    if decided.faults is None:
        return CheckOutcome(check, "skipped", (f"{decided.why}.",), {})
    if decided.faults:
        return CheckOutcome(check, "fail" if check.severity == "fail" else "warn", decided.faults, {})
    return CheckOutcome(check, "pass", (f"{decided.why}.",), {})


def _without_determinism(outcome: CheckOutcome) -> CheckOutcome:
    if outcome.check.level != 3 or outcome.status == "skipped":
        return outcome
    reason = f"it needs {DETERMINISM}, which fails."
    return CheckOutcome(outcome.check, "skipped", (reason,), outcome.measured, outcome.seconds)

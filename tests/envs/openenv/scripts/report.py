"""Reads reports with OpenEnv's own models, JSON schema and policy; prints what it makes of each, as JSON.

python report.py REPORT.json ...
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import jsonschema
from openenv.validation.policy import apply_policy, load_policy
from openenv.validation.report import ValidationReportV2, write_report
from openenv.validation.types import Lane

SCHEMA = json.loads(files("openenv.validation").joinpath("schemas", "report-v2.schema.json").read_text())


def read(path):
    content = json.loads(path.read_text())
    errors = [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(content)]
    try:
        report = ValidationReportV2.model_validate(content, strict=False)
    except ValueError as error:
        return {"errors": [*errors, str(error)]}
    policy = load_policy(report.policy_version)
    return {
        "errors": errors,
        "verdict": apply_policy(report.results, policy, Lane.LOCAL).value,
        "missing": sorted(policy.entries_for_lane(Lane.LOCAL).keys() - {r.check_id for r in report.results}),
        "same": json.loads(write_report(report)) == content,
    }


policy = load_policy("v2")
told = {
    "version": version("openenv"),
    "bounds": policy.bounds.model_dump(),
    "checks": [[e.check_id, int(e.level), e.lane.value, e.severity.value] for e in policy.entries],
    "reports": [read(Path(path)) for path in sys.argv[1:]],
}
print(json.dumps(told))

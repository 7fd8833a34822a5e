"""The checks of RFC 008: every one has an outcome, a planted fault that fails it, and OpenEnv's form."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from xml.etree import ElementTree

import jsonschema
import pytest

from agentrl import Limits
from agentrl.cli import main
from agentrl.envs.check import CheckOutcome, CheckReport, Finding, check_env
from agentrl.envs.check.outcomes import outcomes, verdict
from agentrl.envs.check.rfc008 import CHECKS, DETERMINISM, MAX_EPISODE_S, MIN_FLOOR_MARGIN
from agentrl.types import Resources
from tests.docs.rfc008 import PAGE, page
from tests.envs.check import cheated, hacked, leaking
from tests.envs.check.broken import FAULTS, Counting, Good, OwnChance
from tests.house.source import ROOT

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
READER = ROOT / "tests/envs/openenv/scripts/report.py"
MODULES = (cheated, hacked, leaking)  # with broken.py, the modules of the worlds of FAULTS
BY_FIGURES = {"static.timeout_ceiling", "semantic.floor_gap", "semantic.resource_envelope"}
"""Checks that compare a figure or a declaration; `test_what_is_declared_is_compared` has their faults."""
HERE_ALWAYS = {
    "runtime.rubric_introspectable",
    "runtime.trajectory_record",
    "runtime.reward_attribution",
    "static.resource_declaration",
}
"""Checks that hold by construction, wherever they are not skipped."""

# What the schema of OpenEnv 0.10.0 asks of a report; where OpenEnv reads them, it has the schema itself.
RESULT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["check_id", "status", "duration_s"],
    "properties": {
        "check_id": {"pattern": r"^[a-z_]+\.[a-z_]+$"},
        "status": {"enum": ["pass", "fail", "skip", "error"]},
        "measured": {"type": "object"},
        "evidence": {"type": "array", "items": {"type": "string"}},
        "remediation": {"type": ["string", "null"]},
        "duration_s": {"type": "number", "minimum": 0},
    },
}
FIELDS = {
    "report_schema_version": {"const": "2"},
    "target": {"type": "string"},
    "source_digest": {"type": "string"},
    "signature": {"enum": ["openenv.yaml", "task.toml", "task.md"]},
    "manifest": {"type": ["object", "null"]},
    "policy_version": {"type": "string"},
    "lane": {"enum": ["local", "hub"]},
    "levels_run": {"type": "array", "items": {"enum": [1, 2, 3, 4]}},
    "results": {"type": "array", "items": RESULT},
    "verdict": {"enum": ["pass", "warn", "fail"]},
}
SCHEMA = {"type": "object", "additionalProperties": False, "required": list(FIELDS), "properties": FIELDS}


def by_id(report: CheckReport) -> dict[str, CheckOutcome]:
    return {outcome.check.id: outcome for outcome in report.outcomes}


@pytest.fixture(scope="module")
def good():
    return check_env(Counting, n=4)


def test_the_table_has_the_checks_of_their_policy():
    """The counts that the RFC gives of its policy; v2 adds `runtime.startup` to the 45 of v1."""
    ids = [check.id for check in CHECKS]
    assert len(ids) == len(set(ids)) == 46
    assert Counter(check.severity for check in CHECKS) == {"fail": 35, "warn": 10, "advisory": 1}
    assert Counter(check.lane for check in CHECKS) == {"local": 34, "hub": 12}
    for check in CHECKS:
        level = {"static": 1, "runtime": 2, "semantic": 3, "statistical": 4}.get(check.id.partition(".")[0])
        assert level in (check.level, None)
        assert bool(check.probes) or not check.codes
        assert check.lane == "local" or not check.probes


def test_every_check_that_is_decided_here_has_a_planted_fault():
    planted = {code for fault in FAULTS for code in fault.split()[:-1]}
    decided = {check.id: set(check.codes) for check in CHECKS if check.probes}
    assert all(codes <= planted for codes in decided.values())
    assert {id for id, codes in decided.items() if not codes} == (BY_FIGURES | HERE_ALWAYS) - {
        "semantic.floor_gap"
    }


def test_a_good_world_passes_all_that_is_decided_and_says_why_the_rest_is_not(good):
    found = by_id(good)
    assert list(found) == [check.id for check in CHECKS]
    skipped = {id for id, outcome in found.items() if outcome.status == "skipped"}
    assert {id for id, outcome in found.items() if outcome.status == "pass"} == set(found) - skipped
    # It declares no memory; the others are not decided for any environment.
    undecided = {check.id for check in CHECKS if not check.probes}
    assert skipped == undecided | {"static.resource_declaration", "semantic.resource_envelope"}
    assert all(outcome.evidence and outcome.evidence[0].endswith(".") for outcome in found.values())
    assert good.to_openenv()["verdict"] == "warn"


@pytest.mark.parametrize(
    "fault",
    [
        "above-chance PaysWords",
        "tool-undeclared Whispers",
        "answer-in-tools DescribesAnswers",
        "scores-differ Drifts",
        "no-expert Bookless",
        "not-repeatable OwnChance",
        "make-fails Unmade",
        "no-tasks Empty",
    ],
)
def test_a_finding_fails_its_checks_in_both_reports(fault):
    code = fault.split()[0]
    report = check_env(FAULTS[fault], n=4)
    failed = {id for id, outcome in by_id(report).items() if outcome.status == "fail"}
    expected = {check.id for check in CHECKS if code in check.codes}
    # Nothing semantic can be said of a world that is not the same again.
    expected -= {id for id in expected if code == "not-repeatable" and id.startswith("semantic.")}
    assert failed == expected != set()
    theirs = report.to_openenv()
    jsonschema.validate(json.loads(json.dumps(theirs)), SCHEMA)
    assert theirs["verdict"] == "fail"
    for id in failed:
        assert any(line.startswith(f"{code}: ") for line in by_id(report)[id].evidence)


def test_without_determinism_no_semantic_check_is_decided():
    found = by_id(check_env(OwnChance, n=2))
    semantic = [outcome for id, outcome in found.items() if id.startswith("semantic.")]
    assert {outcome.status for outcome in semantic} == {"skipped"}
    assert DETERMINISM in found["semantic.oracle_max"].evidence[0]


def test_what_was_not_tried_does_not_pass():
    found = by_id(check_env(FAULTS["tasks-fails Strings"], n=2))
    assert found["runtime.host_containment"].status == "skipped"
    assert found["runtime.host_containment"].evidence == ("not tried (host), because of tasks-fails.",)
    assert "pass" not in {outcome.status for outcome in found.values()}


class Endless(Good):
    limits = Limits(max_turns=4, max_tokens=512, episode_timeout_s=None)


class Cramped(Good):
    resources = Resources(memory_gb=1e-6)


class Generous(Good):
    """An empty answer earns nearly as much as the right one, as it says."""

    chance_score = 0.95

    def reward(self, task, answer):
        return 1.0 if answer == task.answer else 0.95


@pytest.mark.parametrize(
    ("world", "check", "sentence"),
    [
        (Endless, "static.timeout_ceiling", "episode_timeout_s is None"),
        (Generous, "semantic.floor_gap", "the expert earns 1.000, doing nothing 0.950"),
        (Cramped, "semantic.resource_envelope", "resources.memory_gb is 1e-06"),
    ],
)
def test_what_is_declared_is_compared(world, check, sentence):
    outcome = by_id(check_env(world, n=4))[check]
    assert outcome.status == "fail"
    assert sentence in outcome.evidence[0]


def test_a_fault_of_low_severity_is_a_warning_and_so_is_a_check_that_was_skipped():
    finding = Finding("above-chance", "error", "It pays.")
    probes = {name: 1.0 for check in CHECKS for name in check.probes}
    declared = dict.fromkeys({check.needs[0] for check in CHECKS}, True)
    found = outcomes([], {}, probes, {**declared, "timeout_s": 60.0})
    assert verdict([outcome for outcome in found if outcome.status == "pass"]) == "pass"
    assert verdict(found) == "warn"
    assert verdict(outcomes([finding], {}, probes, declared)) == "fail"


def test_the_good_report_has_the_form_of_theirs(good):
    theirs = good.to_openenv()
    jsonschema.validate(json.loads(json.dumps(theirs)), SCHEMA)
    assert len(theirs["results"]) == 34
    assert theirs["levels_run"] == [1, 2, 3]
    assert len(theirs["source_digest"]) == 64
    assert theirs["results"][0]["measured"]["tasks_by_split"] == {"train": 4, "test": 4}


@pytest.mark.full
def test_openenv_reads_the_reports_with_its_own_models_schema_and_policy(good, tmp_path):
    """Of its released package: the models and JSON schema of a report, and the severities of policy v2."""
    assert PYTHON.exists(), "make .venv-clients/.installed makes the environment of OpenEnv"
    faults = ("above-chance PaysWords", "not-repeatable OwnChance", "no-tasks Empty", "make-fails Unmade")
    reports = [good, *(check_env(FAULTS[fault], n=2) for fault in faults), check_env("HopSearch-v0", n=2)]
    files = [tmp_path / f"{number}.json" for number in range(len(reports))]
    for report, file in zip(reports, files, strict=True):
        report.write(file)
    done = subprocess.run([PYTHON, READER, *files], capture_output=True, text=True, check=True, timeout=120)
    theirs = json.loads(done.stdout)
    assert theirs["version"] == "0.10.0"
    assert [[c.id, c.level, c.lane, c.severity] for c in CHECKS] == theirs["checks"]
    assert theirs["bounds"]["max_episode_timeout_s"] == MAX_EPISODE_S
    assert theirs["bounds"]["min_floor_margin"] == MIN_FLOOR_MARGIN
    read = {"errors": [], "missing": [], "same": True}
    assert theirs["reports"] == [{**read, "verdict": verdict(report.outcomes)} for report in reports]
    assert [report["verdict"] for report in theirs["reports"]] == ["warn", *["fail"] * len(faults), "warn"]
    broken = {**json.loads(files[0].read_text()), "verdict": "fine"}
    files[0].write_text(json.dumps(broken))
    done = subprocess.run([PYTHON, READER, files[0]], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout)["reports"][0]["errors"], "the comparison bites"


def test_the_badge_is_an_image_of_the_verdict(good):
    empty = check_env(FAULTS["no-tasks Empty"], n=1)
    for report, verdict_, colour in ((good, "passed", "#3c873a"), (empty, "failed", "#b03030")):
        passed = report.counts.get("pass", 0)
        root = ElementTree.fromstring(report.badge())
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert texts == ["agentrl envs check", f"{verdict_}, RFC 008 {passed} of 34"]
        assert root.findall("{*}rect")[1].get("fill") == colour
    assert good.counts["pass"] == 25


def test_the_command_writes_both_reports_and_a_badge(tmp_path, capsys):
    file = tmp_path / "report.json"
    main(["envs", "check", f"{Good.__module__}:Good", "--n", "2", "--report", str(file)])
    printed = capsys.readouterr().out.replace("\n", "")
    assert "Checks of RFC 008: 24 pass, 10 skipped." in printed
    assert "![agentrl envs check: passed, RFC 008 24 of 34](report.svg)" in printed
    assert (tmp_path / "report.svg").read_text().startswith("<svg ")
    jsonschema.validate(json.loads(file.read_text()), SCHEMA)
    ours = json.loads((tmp_path / "report.agentrl.json").read_text())
    assert len(ours["checks"]) == 46
    assert {check["status"] for check in ours["checks"]} == {"pass", "skipped"}


def test_a_report_without_a_folder_is_refused_before_anything_is_played(tmp_path, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["envs", "check", f"{Good.__module__}:Good", "--report", str(tmp_path / "no" / "report.json")])
    assert leaving.value.code == 2
    assert "its folder does not exist" in capsys.readouterr().err


def test_the_guide_has_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make reference`"

"""Each broken world has exactly its expected finding, and a good one has none."""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from typing import get_args

import pytest

from agentrl import UserError, register
from agentrl.envs.check import CheckReport, check_env, check_env_async
from agentrl.envs.check.findings import Code
from agentrl.envs.check.probes import cost_probe
from agentrl.errors import UnknownEnvError
from tests.envs.check import cheated, hacked, leaking
from tests.envs.check.broken import FAULTS, Counting, Good
from tests.envs.check.honest import HONEST, YesNo
from tests.house.source import ROOT

WARNINGS = {
    "no-expert",
    "expert-score-too-low",
    "answer-in-long-prompt",
    "expert-too-long",
    "memory-grows",
    "blocks-loop",
    *("slow-reset", "slow-step", "slow-last-step", "slow-rewards"),
    *("network-undeclared", "scores-differ"),
    *("observation-cut", "length-pays", "splits-nearly-overlap", "never-full-marks"),
}

LONG_FAULTS = ("leaves-file", "leaves-socket", "leaves-task", "slow-reset", "slow-step", "slow-last-step")
MODULES = (cheated, hacked, leaking)  # with broken.py, the modules of the worlds of FAULTS


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    leaking.let_all_go()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("agentrl.envs.check.traces._MAX_POLLS", 5)
    monkeypatch.setattr(cost_probe, "SLOW_MS", 100.0)
    monkeypatch.setattr(cost_probe, "_EPISODES", 20)


def test_a_good_world_has_no_findings_and_reports_its_figures():
    report = check_env(Good, n=8)
    assert report.findings == ()
    assert report.ok
    assert report.figures["tasks"] == 8
    assert report.figures["expert_score"] == report.figures["expert_score_high"] == 1.0
    assert report.figures["random_score"] == report.figures["best_adversary_score"] == 0.0
    assert report.figures["leaving_gain"] == 0.0
    assert report.figures["cancels"] == 2  # the two turns of the expert are the only awaits
    assert {"reset_ms", "step_ms", "last_step_ms", "memory_mib_per_100_episodes"} <= set(report.figures)
    assert str(report).startswith("tests.envs.check.broken:Good: passed")


@pytest.mark.parametrize(
    "fault",
    # One of each kind of leak in the quick tests.
    [pytest.param(f, marks=pytest.mark.full if f.startswith(LONG_FAULTS) else ()) for f in FAULTS],
)
def test_a_broken_world_is_caught_by_exactly_its_finding(fault, monkeypatch):
    *codes, _ = fault.split()
    if fault.startswith("blocks-loop"):
        monkeypatch.setattr(cost_probe, "HOLDS_S", 0.01)
    if fault.startswith("slow-"):
        monkeypatch.setattr(cost_probe, "SLOW_MS", 3.0)
    report = check_env(FAULTS[fault], n=8)
    assert list(report.codes) == codes, report
    assert report.ok == (set(codes) <= WARNINGS), report
    warnings = {finding.code for finding in report.findings if finding.severity == "warning"}
    assert warnings == set(codes) & WARNINGS
    for finding in report.findings:
        assert finding.text.endswith("."), finding.text
        assert finding.text.isprintable()
        assert len(finding.text) < 700


class Waiting(Good):
    """Its steps wait in a thread, or without holding the event loop."""

    async def step(self, action):
        await asyncio.to_thread(time.sleep, 0.06)
        return await super().step(action)


def test_steps_that_wait_for_others_do_not_block_the_loop(monkeypatch):
    monkeypatch.setattr(cost_probe, "HOLDS_S", 0.05)
    assert "blocks-loop" not in check_env(Waiting, n=1).codes


def test_one_failure_of_many_episodes_is_told_once():
    report = check_env(Failing, n=4)
    texts = [finding.text for finding in report.findings if finding.code in ("expert-fails", "crash")]
    assert len(texts) == 2
    assert all(text.count("no database") == 1 for text in texts)
    assert "random: " in texts[1]
    assert "and " in texts[1]


class Quoting(Good):
    """Its tool fails with its argument, however long that is."""

    def partner(self, word):
        return super().partner(word) if word[:50].isalpha() and len(word) < 50 else {}[word]


class Unrated(Good):
    """Its reward is no number."""

    def reward(self, task, answer):
        return float("nan")


def test_a_failure_is_cut_but_for_its_line_and_the_advice_is_of_its_fault():
    (text,) = [finding.text for finding in check_env(Quoting, n=2).findings if finding.code == "crash"]
    assert "x" * 100 not in text
    assert text.count("test_faults.py, line") == text.count("KeyError")
    assert text.endswith("answer it with a sentence.")
    (text,) = [finding.text for finding in check_env(Unrated, n=2).findings if finding.code == "crash"]
    assert text.endswith("give every answer a finite reward.")


class Failing(Good):
    async def step(self, action):
        raise RuntimeError("no database")


def test_a_world_that_saves_what_its_steps_change_has_no_findings():
    assert check_env(Counting, n=2).findings == ()


@pytest.mark.parametrize("env_class", HONEST)
def test_an_honest_world_is_not_complained_of(env_class):
    report = check_env(env_class, n=32)
    assert report.findings == (), str(report)


def test_an_honest_world_that_claims_too_little_chance_is_caught():
    class Boasts(YesNo):
        chance_score = 0.0

    assert check_env(Boasts, n=32).codes == ("answer-in-prompt",)


@pytest.mark.parametrize(
    ("world", "gain", "policies"),
    [
        (cheated.ChargesLosing, 0.3, "never answer (0.000, while random play that loses gets -0.300)"),
        (
            cheated.ChargesForm,
            0.5,
            "stop early (0.000, while an answer to another task that loses gets -0.500)",
        ),
    ],
)
def test_a_world_that_pays_for_leaving_names_what_a_loss_and_leaving_earn(world, gain, policies):
    report = check_env(world, n=8)
    (finding,) = report.findings
    assert report.figures["leaving_gain"] == pytest.approx(gain)
    assert finding.code == "leaving-pays"
    assert policies in finding.text
    assert "`Reward` that charges truncated episodes" in finding.text


def test_an_environment_is_checked_by_its_id_too_and_the_report_names_it():
    register("GoodForCheck-v0", Good)
    report = check_env("GoodForCheck-v0", n=2)
    assert (report.env_id, report.ok) == ("GoodForCheck-v0", True)
    assert report.to_json() == {
        "env": "GoodForCheck-v0",
        "ok": True,
        "seed": 0,
        "findings": [],
        "figures": dict(report.figures),
        "checks": [outcome.to_json() for outcome in report.outcomes],
    }


async def test_inside_an_event_loop_both_forms_work():
    assert check_env(Good, n=1).ok
    factory = asyncio.get_running_loop().get_task_factory()
    assert (await check_env_async(Good, n=2)).ok
    assert asyncio.get_running_loop().get_task_factory() is factory


def test_bad_input_is_a_one_sentence_error():
    with pytest.raises(UnknownEnvError, match="NoSuch-v0"):
        check_env("NoSuch-v0")
    with pytest.raises(UserError, match="n = 0"):
        check_env(Good, n=0)


def test_progress_is_reported_in_the_order_of_the_checks():
    steps = []
    check_env(Good, n=2, progress=steps.append)
    assert steps[0] == "tasks"
    assert steps[-1] == "memory"
    assert len(steps) == 8


def test_the_same_seed_gives_the_same_report_and_global_generators_are_not_touched():
    from agentrl.envs.check.probes.same_probe import global_random_state

    before = global_random_state()
    scores = [check_env(Good, n=4, seed=3).figures["random_score"] for _ in range(2)]
    assert scores[0] == scores[1]
    assert global_random_state() == before


def test_the_guide_explains_every_finding_and_no_other():
    guide = (ROOT / "docs" / "write-an-environment.md").read_text(encoding="utf-8")
    section = guide.partition("\n## Check it\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    explained = {code for row in table for code in re.findall(r"`([\w-]+)`", row)}
    assert explained == {*get_args(Code)}


def test_every_code_has_a_planted_fault():
    """mypy lets no other code into a finding."""
    caught = {code for fault in FAULTS for code in fault.split()[:-1]}
    assert caught == {*get_args(Code)}


class Sized(Good):
    """One that takes an argument, without which it cannot be made."""

    def __init__(self, size):
        super().__init__()
        assert size == 3, "the size that was chosen"


def test_arguments_and_functions_make_the_instances():
    assert check_env(Sized, n=1, env_kwargs={"size": 3}).ok
    assert check_env(partial(Sized, size=3), n=1).env_id == "partial"
    with pytest.raises(UserError, match="missing a required argument: 'size'"):
        check_env(Sized)


def test_a_notebook_shows_the_findings_as_text():
    shown = CheckReport("<b>", 0, (), {})._repr_html_()
    assert "&lt;b&gt;: passed" in shown
    assert "<b>" not in shown

"""Evaluations beside training: they hold no iteration up, and say which weights they scored."""

from __future__ import annotations

import json
import signal
from collections import Counter

import pytest

import agentrl
from agentrl.cli.runs import facts_of
from agentrl.errors import WorldBrokenError
from agentrl.records import read_journal
from agentrl.run.checkpoints import Checkpoints
from tests.flow.runs import metrics_of, options_of, train
from tests.flow.test_asynchronous import LATE, accounted_for, served_versions
from tests.flow.test_resume import hang
from tests.flow.worlds import Examined, Struck

# When an evaluation begins, at most 4 groups of 4 are in flight: further ones start when others were trained.
IN_FLIGHT, BATCH = 16, 8


@pytest.fixture(autouse=True)
def examined():
    Struck.at, Struck.resets = None, 0
    Examined.hold, Examined.begun, Examined.until, Examined.error = None, 0, None, None
    yield
    Struck.at = None


def run(tmp_path, name="x", **settings):
    return train("Examined", tmp_path, name, **{**LATE, **settings}).folder


def evaluated(folder):
    """The records of evaluations, by step, in the order in which they were logged."""
    return {row["step"]: row for row in metrics_of(folder) if "eval/sampled" in row}


def steps_logged(folder):
    """The steps of metrics.jsonl in their order: of iterations, and as negative numbers of evaluations."""
    return [int(-row["step"] if "eval/sampled" in row else row["step"]) for row in metrics_of(folder)]


def shares_of(entries):
    """The share of each version among all tokens that were sampled."""
    counts = Counter(
        int(version)
        for entry in entries
        for trajectory in entry.episode.trajectories
        for turn in trajectory.turns
        for version in turn.tokens.completion.versions
    )
    return {str(version): count / sum(counts.values()) for version, count in sorted(counts.items())}


def test_training_goes_on_while_an_evaluation_is_held_up_and_its_versions_are_reported(tmp_path):
    Examined.hold = IN_FLIGHT + 2 * BATCH
    folder = run(tmp_path, eval_interval=2)
    order = steps_logged(folder)
    # That of step 2 was held up until two more batches had been trained.
    assert order.index(-2) > order.index(4)
    rows = evaluated(folder)
    row, served = rows[2], served_versions(folder)
    assert served[2] <= row["eval/sampled/version_min"] < row["eval/sampled/version_max"]
    milestones = {m["step"]: m for m in json.loads((folder / "summary.json").read_text())["milestones"]}
    for step, logged in rows.items():
        for mode in ("sampled", "greedy"):
            (path,) = (folder / "trajectories").glob(f"eval_{mode}-*_{step:06d}.jsonl.gz")
            shares = shares_of(read_journal(path))
            assert milestones[step][mode]["versions"] == pytest.approx(shares)
            oldest = min(map(int, shares))
            name = f"eval/{mode}/version_share/"
            expected = {f"{name}{int(version) - oldest}": share for version, share in shares.items()}
            assert {k: v for k, v in logged.items() if k.startswith(name)} == pytest.approx(expected)
    assert accounted_for(folder).ahead == 0


def test_an_engine_of_its_own_scores_one_version_and_what_was_due_is_counted(tmp_path):
    Examined.hold = IN_FLIGHT + BATCH
    folder = run(tmp_path, eval_interval=1, eval_engine="own")
    order, rows, served = steps_logged(folder), evaluated(folder), served_versions(folder)
    assert order.index(-1) > order.index(3)
    shown = facts_of(folder)
    assert (shown["step"], shown["evaluation"]) == (8, metrics_of(folder)[-1])
    for step, row in rows.items():
        for mode in ("sampled", "greedy"):
            assert row[f"eval/{mode}/version_min"] == row[f"eval/{mode}/version_max"] == served[int(step)]
    # One was due after each of 7 iterations.
    between = [row for step, row in rows.items() if 0 < step < 8]
    assert len(between) < 7
    assert sum(1 + row["perf/eval_replaced"] for row in between) + rows[8]["perf/eval_replaced"] == 7
    assert all(row["perf/eval_delay"] >= 0 for row in between)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["shared", "own"])
def test_an_evaluation_that_was_pending_is_repeated_once(tmp_path, monkeypatch, capsys, engine):
    """A signal arrives while the one after iteration 2 is held up for good."""
    monkeypatch.setattr(Struck, "strike", lambda self: hang(signal.SIGTERM))
    Examined.hold, Struck.at = 10**6, IN_FLIGHT + 2 * BATCH + 4
    settings = {**LATE, "save_interval": 1, "eval_engine": engine}
    with pytest.raises(SystemExit):
        agentrl.train(**options_of("Examined", tmp_path, "x", **settings))
    printed = " ".join(capsys.readouterr().out.split())
    sentence = "The evaluation after iteration 2 was dropped; it is played again when the run resumes."
    assert printed.count(sentence) == 1
    folder = tmp_path / "x"
    state = Checkpoints(folder / "checkpoints", keep=1).newest().state
    assert (state.due_evaluations[0], state.evaluating) == (2, 2)
    assert list(evaluated(folder)) == [0]
    Examined.hold = Struck.at = None
    agentrl.train(folder, quiet=True)
    steps = Counter(row["step"] for row in metrics_of(folder) if "eval/sampled" in row)
    # It has the weights of the checkpoint, and stands where they do.
    assert set(steps.values()) == {1}
    assert state.step in steps
    row = evaluated(folder)[state.step]
    assert row["eval/sampled/version_min"] >= served_versions(folder)[state.step]
    assert row["perf/eval_delay"] == state.step - state.due_evaluations[-1]
    assert row["perf/eval_replaced"] == len(state.due_evaluations) - 1
    assert {path.name.rpartition("_")[2] for path in (folder / "trajectories").glob("eval_*")} == {
        f"{int(step):06d}.jsonl.gz" for step in steps
    }


def test_an_evaluation_that_fails_ends_the_run_as_ever(tmp_path):
    Examined.error = ConnectionError("the examiner left")
    with pytest.raises(WorldBrokenError, match=r"all 4 episodes failed .*the examiner left"):
        run(tmp_path)
    assert Checkpoints(tmp_path / "x" / "checkpoints", keep=1).newest().state.due_evaluations[0] == 2


def test_a_synchronous_run_waits_for_its_evaluations_unless_asked(tmp_path):
    synchronous = {"max_staleness": 0, "num_rollout": 3, "eval_interval": 1}
    waits = run(tmp_path, "waits", **synchronous)
    assert steps_logged(waits) == [0, 1, -1, 2, -2, 3, -3]
    assert not any("version" in name or "eval_" in name for row in metrics_of(waits) for name in row)
    beside = run(tmp_path, "beside", **synchronous, async_eval=True)
    assert steps_logged(beside)[:3] == [0, 1, 2]

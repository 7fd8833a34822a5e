"""A run without signal says so while it runs, records it, and ends; a run that is solved does not."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.errors import NoSignalError
from agentrl.records import reconcile
from agentrl.records.diagnoses import read_diagnoses
from tests.flow.runs import metrics_of, train

SILENT = {
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 2,
    "eval_episodes": 4,
    "eval_interval": 100,
    "rollout_max_response_len": 4,
    "use_tensorboard": False,
    "max_idle_rollouts": 3,
    "quiet": False,
}


def steps_of(folder):
    return max(row["step"] for row in metrics_of(folder))


class Attempts(NamedTuple):
    """What is left of a run: its folder, the sentences that ended attempts, and what all of them printed."""

    folder: Path
    sentences: list[str]
    printed: str


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    """A run of two iterations that trained on nothing, and two attempts to go on with it."""
    place, sentences = tmp_path_factory.mktemp("runs"), []
    with redirect_stdout(io.StringIO()) as output:
        folder = train("Bandit", place, "idle", num_rollout=2, **SILENT).folder
        for _ in range(2):
            with pytest.raises(NoSignalError) as caught:
                train("Bandit", place, "idle", num_rollout=20, resume=True, **SILENT)
            sentences.append(str(caught.value))
    return Attempts(folder, sentences, output.getvalue())


def test_a_run_without_signal_ends_after_as_many_iterations_as_one_that_was_not_interrupted(idle):
    # Two iterations before, and one after; the next attempt goes on for three more.
    assert "ended after 3 of 20 iterations: the last 3 trained on nothing" in idle.sentences[0]
    assert "ended after 6 of 20 iterations: the last 3 trained on nothing" in idle.sentences[1]
    assert all("max_idle_rollouts = 0" in sentence and "\n" not in sentence for sentence in idle.sentences)
    assert steps_of(idle.folder) == 6


def test_it_warns_once_of_what_it_read_over_all_attempts(idle):
    warning = "Warning: no-signal: in all 96 groups of the last 3 iterations the siblings earned the same"
    assert idle.printed.count(warning) == idle.printed.count("no-signal") == 1


def test_what_it_played_is_recorded_and_its_report_names_the_fault(idle):
    folder = idle.folder
    assert reconcile(folder, played=6 * 64).problems == ()
    assert (folder / "checkpoints" / "step_000006").is_dir()
    (diagnosis,) = read_diagnoses(folder)
    assert (diagnosis.name, diagnosis.step) == ("no-signal", 3)
    assert "a warm start (warm_start_steps)" in diagnosis.remedy
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["diagnoses"][0]["name"] == "no-signal"
    assert [milestone["name"] for milestone in summary["milestones"]] == ["before", "after RL"]
    assert "What goes wrong" in (folder / "report.html").read_text()


def test_a_run_whose_tasks_are_all_solved_goes_on_undiagnosed(tmp_path, capsys):
    result = train("Generous", tmp_path, "solved", num_rollout=4, **{**SILENT, "max_idle_rollouts": 1})
    assert steps_of(result.folder) == 4
    assert result.diagnoses == ()
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if "Warning" in line)
    assert "the model is new and has no warm start" in warning


def test_prompts_that_leave_no_room_are_counted_and_named(tmp_path, capsys):
    rows = [{"input": "word " * (200 if n == 3 else 2), "label": "x"} for n in range(4)]
    given = {
        **SILENT,
        "env": "SingleTurn-v0",
        "prompt_data": rows,
        "label_key": "label",
        "reward": "exact_match",
    }
    sizes = {
        "rollout_batch_size": 4,
        "rollout_max_context_len": 48,
        "num_rollout": 1,
        "rollout_shuffle": False,
    }
    result = train("Bandit", tmp_path, "long", **{**given, **sizes})
    (row,) = (row for row in metrics_of(result.folder) if "rollout/no_room_ratio" in row)
    assert row["rollout/no_room_ratio"] == 0.25
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if "no-room" in line)
    assert "in 25% of the episodes of an iteration the prompt was as long as an episode may be" in warning
    assert [diagnosis.name for diagnosis in result.diagnoses] == ["no-room"]

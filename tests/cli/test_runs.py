"""`agentrl runs compare` and `agentrl runs clean`: what they read of a folder, and what they remove."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agentrl.assembly.config import RunConfig
from agentrl.cli import cli, main
from agentrl.cli.runs import watch
from agentrl.config import by_section, parse, write_toml
from agentrl.records.history import begin_attempt, end_attempt, locked
from agentrl.run.checkpoints import Checkpoints
from agentrl.view.status import status_lines
from tests.run.test_checkpoints import Saver, names, state
from tests.view.test_status import BUSY


def config_of(**settings: object) -> RunConfig:
    return parse(RunConfig, by_section(RunConfig, settings), source="a test")


def made(output_dir: Path, name: str, *, score: float | None = None, **settings: object) -> Path:
    """The folder of a run of two steps. score: its last evaluation; None = it has not ended."""
    folder = output_dir / name
    folder.mkdir(parents=True)
    write_toml(config_of(name=name, output_dir=str(output_dir), **settings), folder / "config.toml")
    rows = [
        {
            "step": step,
            "time_s": 40.0 * step,
            "rollout/raw_reward": reward,
            "eval/greedy": (score or 0) * step / 2,
        }
        for step, reward in enumerate([0.1, None, 0.5])
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if score is not None:
        milestones = [("before", 0, 0.0), ("iteration 1", 1, 0.3), ("after RL", 2, score)]
        summary = {
            "env": "x",
            "milestones": [
                {
                    "name": name,
                    "step": step,
                    "greedy": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": 16},
                }
                for name, step, mean in milestones
            ],
            "stages": [["RL", 2, 30.0, 55.0], ["evaluation", 2, 10.0, 5.0]],
        }
        keys = ("name", "steps", "wall_s", "cpu_s")
        summary["stages"] = [dict(zip(keys, stage, strict=True)) for stage in summary["stages"]]
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def invoked(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["runs", *map(str, arguments)], catch_exceptions=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence with which a command ends."""
    with pytest.raises(SystemExit) as ended:
        main(["runs", *map(str, arguments)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_status_of_a_run_is_what_it_wrote_last(tmp_path, capsys):
    folder = made(tmp_path, "a")
    assert "a has no status.json" in refused(capsys, "status", "a", "--output-dir", tmp_path)
    BUSY.write(folder)
    shown = json.loads(invoked("status", "a", "--output-dir", tmp_path, "--json").stdout)
    assert shown == {"name": "a", "state": "not begun", **BUSY.as_json()}
    text = invoked("status", "a", "--output-dir", tmp_path).stdout
    assert text.splitlines()[2:] == list(status_lines(BUSY, ""))[2:]
    begin_attempt(folder, resumed_from=None, changes={})
    with locked(folder):
        assert invoked("status", "a", "--output-dir", tmp_path).stdout.startswith("state            running")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    made(tmp_path, "a", score=0.5, lr=2e-3)
    made(tmp_path, "b", score=0.75, rollout_batch_size=8, env_kwargs={"hops": 2})
    return tmp_path


def test_a_comparison_has_what_differs_and_what_came_of_it(two):
    compared = json.loads(invoked("compare", "a", "b", "--output-dir", two, "--json").stdout)
    default = config_of()
    assert compared["runs"] == ["a", "b"]
    assert compared["settings"] == {
        "trainer.lr": {"a": 2e-3, "b": default.trainer.lr},
        "rollout.rollout_batch_size": {"a": default.rollout.rollout_batch_size, "b": 8},
        "env.env_kwargs": {"a": {}, "b": {"hops": 2}},
    }
    assert list(compared["scores"]) == ["before, greedy", "after RL, greedy"]
    assert compared["scores"]["after RL, greedy"] == {
        "a": {"mean": 0.5, "low": 0.4, "high": 0.6},
        "b": {"mean": 0.75, "low": 0.65, "high": 0.85},
    }
    assert compared["metrics"]["rollout/raw_reward"] == {"a": 0.5, "b": 0.5}
    assert compared["metrics"]["eval/greedy"] == {"a": 0.5, "b": 0.75}
    assert compared["wall_s"] == {"a": 80.0, "b": 80.0}
    assert compared["cpu_s"] == {"a": 60.0, "b": 60.0}


def test_a_page_follows_a_run_until_it_ends(tmp_path):
    folder, page = made(tmp_path, "a"), tmp_path / "page.html"
    BUSY.write(folder)
    states, pages = iter(["running", "running", "finished"]), []

    def pause(seconds):
        assert seconds == 7
        pages.append(page.read_text())
        with (folder / "metrics.jsonl").open("a") as file:
            step = 2 + len(pages)
            file.write(json.dumps({"step": step, "time_s": 9.0, "rollout/raw_reward": 0.75}) + "\n")

    watch(folder, page, every_s=7, state_of=lambda _: next(states), pause=pause)
    last = page.read_text()
    assert len(pages) == 2
    assert all('<meta http-equiv="refresh" content="7">' in text for text in pages)
    assert "refresh" not in last
    assert "The run has ended." in last
    assert "16 of 16 taken" in pages[0]
    assert "<script" not in last
    curves = [text[text.index("Reward in training") :].partition("</figure>")[0] for text in (*pages, last)]
    assert len(set(curves)) == 3


def test_a_run_that_has_ended_has_one_page_and_a_name_of_none_is_a_sentence(tmp_path, capsys):
    folder = made(tmp_path, "a")
    shown = invoked("watch", "a", "--output-dir", tmp_path)
    assert (folder / "live.html").exists()
    assert "is not begun" in shown.stdout
    assert "holds no run `b`" in refused(capsys, "watch", "b", "--output-dir", tmp_path)


def test_its_text_marks_defaults_and_shows_intervals(two):
    lines = [
        re.split(r" {2,}", line.strip())
        for line in invoked("compare", "a", "b", "--output-dir", two).stdout.splitlines()
    ]
    assert lines[0] == ["a", "b"]
    assert ["trainer.lr", "0.002", f"{json.dumps(config_of().trainer.lr)} (default)"] in lines
    assert ["before, greedy", "0.000 (-0.100 to 0.100)", "0.000 (-0.100 to 0.100)"] in lines
    assert ["after RL, greedy", "0.500 (0.400 to 0.600)", "0.750 (0.650 to 0.850)"] in lines
    assert ["Reward in training", "0.500", "0.500"] in lines
    assert ["wall", "1 min 20 s", "1 min 20 s"] in lines
    assert ["CPU", "1 min 00 s", "1 min 00 s"] in lines


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_its_text_fits_the_terminal_and_shows_every_run(tmp_path, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [f"run-with-a-long-name-{n}" for n in range(7)]
    for n, name in enumerate(names):
        made(tmp_path, name, score=0.1 * n, lr=0.001 * (n + 1), env_kwargs={"text": "x" * 200, "n": n})
    text = invoked("compare", *names, "--output-dir", tmp_path).stdout
    assert max(map(len, text.splitlines())) <= columns
    assert all(name in text for name in names)
    scores = [f"{0.1 * n:.3f} (" for n in range(7)]
    assert all(text.count(score) >= 1 for score in scores)


def test_facts_of_a_run_are_lines(two):
    lines = invoked("show", "a", "--output-dir", two).stdout.splitlines()
    assert [line.split() for line in lines][:2] == [["name", "a"], ["command", "train"]]
    assert ["rollout/raw_reward", "0.500"] in [line.split() for line in lines]
    assert "{" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_the_evaluation_after_the_last_step_hides_no_metric_of_the_step(tmp_path):
    folder = made(tmp_path, "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "time_s": 81.0, "eval/sampled": 0.25}) + "\n")
    facts = json.loads(invoked("show", "a", "--output-dir", tmp_path, "--json").stdout)
    assert facts["metrics"]["rollout/raw_reward"] == 0.5
    assert facts["evaluation"]["eval/sampled"] == 0.25


def test_a_run_that_has_not_ended_is_compared_by_its_metrics(two):
    made(two, "c")
    compared = json.loads(invoked("compare", "a", "c", "--output-dir", two, "--json").stdout)
    assert compared["scores"]["after RL, greedy"]["c"] is None
    assert compared["metrics"]["eval/greedy"] == {"a": 0.5, "c": 0.0}
    assert compared["cpu_s"] == {"a": 60.0, "c": None}


def test_a_run_without_evaluations_is_compared_by_its_metrics_and_time(two):
    summary = json.loads((two / "a" / "summary.json").read_text())
    (two / "a" / "summary.json").write_text(json.dumps({"stages": summary["stages"]}))
    compared = json.loads(invoked("compare", "a", "b", "--output-dir", two, "--json").stdout)
    assert compared["scores"]["after RL, greedy"]["a"] is None
    assert compared["cpu_s"] == {"a": 60.0, "b": 60.0}


def test_its_page_lays_the_curves_over_each_other(two):
    page = two / "pages.html"
    invoked("compare", "a", "b", "--output-dir", two, "--html", page)
    text = page.read_text()
    reward = text[text.index("Reward in training</b>") :].partition("</figure>")[0]
    assert re.findall(r'class="curve (s\d) d\d" d="M\d', reward) == ["s0", "s1", "s0", "s1"]
    assert "reward in training" not in reward
    assert "<script" not in text


def test_two_runs_of_one_name_are_compared_by_their_paths(two, tmp_path):
    other = made(tmp_path / "elsewhere", "a", score=0.1)
    compared = json.loads(invoked("compare", two / "a", other, "--json").stdout)
    assert compared["runs"] == [str(two / "a"), str(other)]


def test_what_cannot_be_compared_is_one_sentence(two, capsys):
    assert "a comparison needs two runs" in refused(capsys, "compare", "a", "a", "--output-dir", two)
    assert "holds no run `z`" in refused(capsys, "compare", "a", "z", "--output-dir", two)
    (two / "b" / "metrics.jsonl").write_text("{\n{}\n")
    assert "cannot be compared" in refused(capsys, "compare", "a", "b", "--output-dir", two)
    nowhere = two / "nowhere" / "page.html"
    (two / "b" / "metrics.jsonl").unlink()
    sentence = refused(capsys, "compare", "a", "b", "--output-dir", two, "--html", nowhere)
    assert "cannot be written (No such file or directory)" in sentence


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run with four checkpoints, of which the second is the best, and all that a killed one leaves."""
    folder = made(tmp_path, "a", score=0.5, metric_for_best_model="eval/greedy")
    checkpoints = folder / "checkpoints"
    writer = Checkpoints(checkpoints, keep=10)
    for step, score in enumerate([0.1, 0.9, 0.3, 0.4], start=1):
        await writer.save(Saver(), state(step, eval_greedy=score))
    await writer.written()
    (checkpoints / ".step_000005.coming" / "trainer").mkdir(parents=True)
    (checkpoints / ".step_000005.coming" / "trainer" / "state.pt").write_bytes(b"x" * 1000)
    for name in (
        "rolled_back/attempt_1/metrics.jsonl",
        "trajectories/step_000001.jsonl.gz",
        "checkpoint/model",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 10)
    end_attempt(folder, begin_attempt(folder, resumed_from=None, changes={}), "finished")
    return folder


def cleaned(folder: Path, *flags: object) -> dict[str, object]:
    return json.loads(invoked("clean", "--output-dir", folder.parent, "--json", *flags).stdout)


UNNEEDED = {
    "checkpoints/.step_000005.coming": "a checkpoint that was not completed",
    "checkpoints/step_000001": "an older checkpoint",
    "checkpoints/step_000003": "an older checkpoint",
}


def test_without_force_it_only_lists(run):
    before = sorted(run.rglob("*"))
    found = cleaned(run)
    assert {str(Path(item["path"]).relative_to(run)): item["reason"] for item in found["items"]} == UNNEEDED
    assert found["items"][0]["num_bytes"] == 1000
    assert found["bytes"] == sum(item["num_bytes"] for item in found["items"])
    assert found["removed"] is False
    assert {path for path in run.rglob("*") if path.name != "run.lock"} == set(before)
    text = invoked("clean", "--output-dir", run.parent).stdout
    assert "3 folders to remove; add --force to do it." in text


def test_the_newest_and_the_best_stay_and_so_do_journal_and_weights(run):
    assert cleaned(run, "--force")["removed"] is True
    assert names(run / "checkpoints") == ["step_000002", "step_000004"]
    for name in (
        "rolled_back/attempt_1/metrics.jsonl",
        "trajectories/step_000001.jsonl.gz",
        "checkpoint/model",
    ):
        assert (run / name).exists()
    assert cleaned(run, "--force")["items"] == []


async def test_a_damaged_newest_one_does_not_cost_the_one_before_it(run):
    (run / "checkpoints" / "step_000004" / "trainer" / "weights").write_bytes(b"torn")
    cleaned(run, "--force")
    assert names(run / "checkpoints") == ["step_000002", "step_000003"]


async def test_where_no_checkpoint_is_whole_none_is_removed(run):
    for path in (run / "checkpoints").glob("step_*"):
        (path / "checksums.json").unlink()
    cleaned(run, "--force")
    assert len(names(run / "checkpoints")) == 4


def test_what_restarts_undid_goes_on_request(run):
    cleaned(run, "a", "--force", "--rolled-back")
    assert not (run / "rolled_back").exists()
    assert (run / "trajectories").exists()


def test_a_run_in_progress_is_never_touched(run, capsys):
    with locked(run):
        assert "is in progress and stays" in invoked("clean", "--output-dir", run.parent).output
        for flags in (["a"], ["--all", "a"]):
            sentence = refused(capsys, "clean", *flags, "--force", "--output-dir", run.parent)
            assert "another process works on" in sentence
    assert len(names(run / "checkpoints")) == 5


def test_a_run_goes_completely_only_by_name(run):
    other = made(run.parent, "b")
    assert [item["path"] for item in cleaned(run, "--all", "a", "--force")["items"]] == [str(run)]
    assert not run.exists()
    assert other.exists()


def test_a_run_that_ended_before_it_measured_anything_goes(run):
    failed, fresh = made(run.parent, "failed"), made(run.parent, "fresh")
    for folder in (failed, fresh):
        (folder / "metrics.jsonl").unlink()
    end_attempt(failed, begin_attempt(failed, resumed_from=None, changes={}), "failed")
    cleaned(run, "--force")
    assert not failed.exists()
    # No attempt is recorded: it may be about to begin.
    assert fresh.exists()
    assert run.exists()


@pytest.mark.parametrize("command", ["gateway", "eval"])
def test_a_folder_of_another_command_or_of_another_version_hides_no_run(tmp_path, capsys, command):
    made(tmp_path, "a")
    made(tmp_path, "b")
    (tmp_path / "other").mkdir()
    text = f'[{command}]\noutput_dir = "x"\n\n[engine]\n'
    (tmp_path / "other" / "config.toml").write_text(text)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.toml").write_text('[run]\nname = "old"\nonce_was = 1\n')
    listed = invoked("list", "--output-dir", tmp_path, "--json")
    assert {row["name"] for row in json.loads(listed.stdout)} == {"a", "b"}
    (said,) = listed.stderr.splitlines()
    assert said.startswith(f"{tmp_path / 'old'} is left out: ")
    assert "once_was" in said
    line = refused(capsys, "show", "other", "--output-dir", tmp_path)
    assert f"agentrl {command}" in line
    assert "agentrl view" in line

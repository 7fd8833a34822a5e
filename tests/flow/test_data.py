"""Runs and evaluations on prompts from files."""

from __future__ import annotations

import json
from collections import Counter

import pytest

import agentrl
from agentrl.cli import main
from agentrl.data import Columns, FileSource, PromptStream
from agentrl.errors import UserError
from tests.data.files import write_arrow, write_lines, write_parquet
from tests.flow.runs import TINY, journal_of, metrics_of

ROWS = [{"question": f"say {n}", "answer": f"{n}"} for n in range(30)]
SMALL = {
    **TINY,
    "inline": True,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "num_rollout": 2,
    "rollout_max_context_len": 48,
    "eval_episodes": 6,
    "use_tensorboard": False,
    "quiet": True,
}
COLUMNS = {"input_key": "question", "label_key": "answer"}


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_lines(tmp_path / "my.jsonl", ROWS)


def played(folder, pattern="step_*"):
    """The ids of the prompts in the journal, in the order in which they were first played."""
    return list(dict.fromkeys(entry["episode"]["task"]["id"] for entry in journal_of(folder, pattern)))


def test_a_run_needs_a_file_and_nothing_written(lines, capfd):
    run = agentrl.train(
        **{**SMALL, "quiet": False, "name": "first", **COLUMNS},
        env="SingleTurn-v0",
        prompt_data="my.jsonl",
        reward="exact_match",
    )
    assert "Nothing is held out, so nothing is evaluated" in capfd.readouterr().out
    assert run.reports == {}
    stream = PromptStream(FileSource("my.jsonl", Columns("question", "answer"), seed=0))
    assert played(run.folder) == [stream.next().task.id for _ in range(8)]
    assert not [*(run.folder / "trajectories").glob("eval_*")]
    assert [row["rollout/skipped/prompt_too_long"] for row in metrics_of(run.folder)] == [0.0, 0.0]
    assert (run.folder / "report.html").exists()
    again = agentrl.train(run.folder / "config.toml", quiet=True, name="again")
    assert played(again.folder) == played(run.folder)


def test_epochs_play_each_row_so_often(lines):
    settings = {name: value for name, value in SMALL.items() if name != "num_rollout"}
    run = agentrl.train(
        **{**settings, "n_samples_per_prompt": 2, "rollout_batch_size": 5, "name": "epochs", **COLUMNS},
        env="SingleTurn-v0",
        prompt_data="my.jsonl@[:10]",
        num_epoch=2,
        reward="exact_match",
    )
    times = Counter(entry["episode"]["task"]["id"] for entry in journal_of(run.folder, "step_*"))
    assert len(times) == 10
    assert set(times.values()) == {2 * 2}, "each row in two groups of two"
    assert len([row for row in metrics_of(run.folder) if "rollout/raw_reward" in row]) == 4


@pytest.mark.parametrize("name", ["my.parquet", "my.arrow"])
def test_a_run_takes_the_files_of_datasets(lines, name):
    write = write_parquet if name == "my.parquet" else write_arrow
    write(lines.parent / name, ROWS)
    run = agentrl.train(**{**SMALL, **COLUMNS}, env="SingleTurn-v0", prompt_data=name, seed=2)
    stream = PromptStream(FileSource(name, Columns("question", "answer"), seed=2))
    assert played(run.folder) == [stream.next().task.id for _ in range(8)]
    assert journal_of(run.folder)[0]["episode"]["task"]["prompt"][0]["content"].startswith("say ")


def test_prompts_that_are_too_long_are_counted(lines):
    write_lines(lines, [{"question": "say " * (8 if n % 2 else 1), "answer": "x"} for n in range(30)])
    run = agentrl.train(
        **{**SMALL, **COLUMNS},
        env="SingleTurn-v0",
        prompt_data="my.jsonl",
        rollout_max_prompt_len=6,
        reward="tests.flow.worlds:shortness",
    )
    skipped = sum(row["rollout/skipped/prompt_too_long"] for row in metrics_of(run.folder))
    assert skipped > 0
    assert all(int(id.rpartition(":")[2]) % 2 == 0 for id in played(run.folder))
    assert metrics_of(run.folder)[0]["rollout/raw_reward"] > 0


def test_an_environment_with_tasks_plays_the_data_and_is_evaluated_on_its_own(lines):
    run = agentrl.train(
        **SMALL,
        env="tests.flow.worlds:Bandit",
        prompt_data={"my.jsonl": 1, "my.jsonl@[:3]": 3},
        input_key="question",
    )
    numbers = [int(id.rpartition(":")[2]) for id in played(run.folder)]
    assert len([number for number in numbers if number < 3]) >= 3
    assert played(run.folder, "eval_*")[:2] == ["test0", "test1"]


def test_held_out_prompts_come_from_a_file_in_their_order(lines):
    run = agentrl.train(
        **{**SMALL, **COLUMNS, "num_rollout": 1},
        env="SingleTurn-v0",
        prompt_data="my.jsonl@[:-10]",
        eval_prompt_data="my.jsonl@[-10:]",
    )
    assert played(run.folder, "eval_*") == [f"my.jsonl:{n}" for n in range(20, 26)]
    assert set(run.reports) == {"before", "after RL"}


def test_a_source_of_ones_own_gives_the_prompts(lines):
    run = agentrl.train(
        **SMALL, env="tests.flow.worlds:Bandit", data_source_path="tests.flow.worlds:Numbers", seed=3
    )
    assert played(run.folder) == [f"number{n}" for n in range(8)]
    assert journal_of(run.folder, "step_*")[0]["episode"]["task"]["answer"] == "3"


def test_an_evaluation_takes_prompts_too(lines, capfd):
    run = agentrl.train(**{**SMALL, **COLUMNS, "num_rollout": 1}, env="SingleTurn-v0", prompt_data="my.jsonl")
    capfd.readouterr()
    command = [
        "eval",
        "SingleTurn-v0",
        "--model",
        str(run.folder / "checkpoint"),
        "--prompt-data",
        "my.jsonl@[5:]",
    ]
    main([*command, "--input-key=question", "--label-key=answer", "--n=4", "--json", "--output-dir=scored"])
    assert json.loads(capfd.readouterr().out)["n"] == 4
    assert played(lines.parent / "scored", "eval_*") == [f"my.jsonl:{n}" for n in range(5, 9)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "SingleTurn-v0"}, "SingleTurn-v0 has no tasks of its own; give it some with prompt_data"),
        ({"prompt_data": "none.jsonl"}, "there is no file or folder none.jsonl"),
        ({"prompt_data": "my.jsonl"}, "my.jsonl, line 1: there is no `input`. It has `question`, `answer`"),
        ({"prompt_data": "my.jsonl@[90:]", **COLUMNS}, "my.jsonl@[90:] holds no prompts (of its 30 rows)"),
        ({"prompt_data": "[]"}, "prompt_data names no file"),
        ({"prompt_data": "my.jsonl", **COLUMNS, "eval_prompt_data": "none"}, "no file or folder none"),
        ({"prompt_data": "my.jsonl", **COLUMNS, "warm_start_steps": 3}, "nothing can be demonstrated"),
        ({"prompt_data": "my.jsonl", **COLUMNS, "reward": "f2"}, "no reward `f2`. Did you mean `f1`?"),
        ({"prompt_data": "my.jsonl", **COLUMNS, "reward": "nowhere:f"}, "name it `package.module:name`"),
        ({"prompt_data": "my.jsonl", **COLUMNS, "reward": "json:dumps"}, "called with a task and an answer"),
        (
            {"prompt_data": "my.jsonl", **COLUMNS, "reward": "json:JSONEncoder"},
            "json:JSONEncoder is a type; name a function",
        ),
        (
            {"env": "HopSearch-v0", "reward": "f1"},
            "rewards of its own; set env_reward_weight",
        ),
        ({"data_source_path": "nowhere:Source"}, "no source of prompts `nowhere:Source`"),
        ({"data_source_path": "json:dumps"}, "json:dumps: "),
        ({"data_source_path": "builtins:dict"}, "builtins:dict: it gives a dict; write a subclass of"),
        (
            {"prompt_data": "my.jsonl", **COLUMNS, "rollout_max_prompt_len": 1},
            "prompts in a row were skipped",
        ),
    ],
)
def test_a_mistake_is_one_sentence(lines, settings, message):
    with pytest.raises(UserError) as caught:
        agentrl.train(**{**SMALL, "env": "SingleTurn-v0", **settings})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

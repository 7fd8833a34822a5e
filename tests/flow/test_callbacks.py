"""A function of the user in a run: it gets what is logged, may end the run, and cannot break it."""

from __future__ import annotations

import json

import pytest

import agentrl
from agentrl.errors import ConfigError
from agentrl.records import reconcile
from tests.flow.runs import EPISODES_PER_STEP, metrics_of, options_of, train

QUICK = {"eval_episodes": 4, "eval_interval": 100, "rollout_max_response_len": 4, "use_tensorboard": False}


def graded(task, answer):
    """A reward of an answer."""
    return 1.0 if answer else 0.5


class Seen:
    """Keeps what it is called with; ends the run after a step."""

    def __init__(self, last=100):
        self.calls, self.last = [], last

    def __call__(self, step, metrics):
        self.calls.append((step, metrics))
        return step >= self.last


def test_a_callback_is_called_with_every_row_of_metrics(tmp_path):
    seen = Seen()
    result = train("Bandit", tmp_path, "seen", num_rollout=2, callback=seen, **QUICK)
    rows = [{k: v for k, v in row.items() if k != "time_s"} for row in metrics_of(result.folder)]
    assert [{"step": step, **metrics} for step, metrics in seen.calls] == rows
    assert {row["step"] for row in rows} == {0, 1, 2}


@pytest.mark.parametrize("settings", [{}, {"max_staleness": 1, "correction": "tis"}], ids=["sync", "async"])
def test_a_callback_ends_the_run_in_good_order_and_it_goes_on(tmp_path, capsys, settings):
    options = {**QUICK, **settings, "num_rollout": 6}
    result = train("Bandit", tmp_path, "early", callback=Seen(last=2), quiet=False, **options)
    assert "The callback ends the run after step 2." in capsys.readouterr().out
    assert max(row["step"] for row in metrics_of(result.folder)) == 2
    assert [*result.reports] == ["before", "after RL"]
    assert (result.folder / "checkpoints" / "step_000002").is_dir()
    seen = Seen(last=3)
    train("Bandit", tmp_path, "early", callback=seen, resume=True, **options)
    assert [step for step, _ in seen.calls if step] == [3, 3]
    assert reconcile(result.folder, played=None if settings else 3 * EPISODES_PER_STEP).problems == ()


def test_a_callback_that_ends_the_run_at_its_first_evaluation_lets_nothing_be_trained(tmp_path):
    result = train("Bandit", tmp_path, "none", num_rollout=6, callback=Seen(last=0), **QUICK)
    assert max(row["step"] for row in metrics_of(result.folder)) == 0


def test_a_callback_that_fails_is_left_out_with_a_warning(tmp_path, capsys):
    calls = []

    def fails(step, metrics):
        calls.append(step)
        metrics.clear()
        raise ConnectionError("no route")

    result = train("Bandit", tmp_path, "fails", num_rollout=2, callback=fails, quiet=False, **QUICK)
    assert "The tracker `callback` stopped (ConnectionError: no route)" in capsys.readouterr().out
    assert calls == [0]
    assert "rollout/raw_reward" in metrics_of(result.folder)[-2]


def test_a_callback_that_no_other_process_finds_is_refused_there_in_one_sentence(tmp_path, monkeypatch):
    def local(step, metrics):
        """Of this process."""

    result = train("Bandit", tmp_path, "local", num_rollout=1, callback=local, **QUICK)
    settings = (result.folder / "config.toml").read_text()
    assert "local" in settings
    monkeypatch.setattr("agentrl.tools.names.given", {})
    with pytest.raises(ConfigError, match=r"no callback `.+:.+local`"):
        agentrl.train(result.folder, resume=True)


def test_rows_and_a_function_train_and_are_evaluated_as_a_file_and_a_path_are(tmp_path):
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = options_of("Bandit", tmp_path, "given", num_rollout=1, **QUICK)
    given |= {"env": "SingleTurn-v0", "input_key": "question", "label_key": "answer", "quiet": True}
    first = agentrl.train(**{**given, "prompt_data": rows, "reward": graded})
    path = str(tmp_path / "rows.jsonl")
    named = {"prompt_data": path, "reward": "tests.flow.test_callbacks:graded", "name": "named"}
    second = agentrl.train(**{**given, **named})
    rewards = [metrics_of(result.folder)[-1]["rollout/raw_reward"] for result in (first, second)]
    assert rewards[0] == rewards[1] > 0
    sets = {"all": rows, "two": rows[:2]}
    columns = {"input_key": "question", "label_key": "answer"}
    report = agentrl.evaluate(
        "SingleTurn-v0",
        first.folder / "checkpoint",
        prompt_data=sets,
        reward=graded,
        n=8,
        quiet=True,
        **columns,
    )
    assert {name: each.n for name, each in report.sets.items()} == {"all": 8, "two": 2}

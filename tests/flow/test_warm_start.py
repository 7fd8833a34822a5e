"""A warm start that is done is not done again: a run that broke off before its first checkpoint takes it."""

from __future__ import annotations

import shutil

import pytest

from agentrl.run import warm_start
from agentrl.run.evaluations import Evaluations
from tests.flow.runs import WARM, metrics_of, train

SMALL = {
    **WARM,
    **{"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "use_tensorboard": False},
    **{"eval_interval": 2, "eval_episodes": 4},
}


def weights_of(folder):
    return (folder / "checkpoint" / "model.safetensors").read_bytes()


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """The folder of a run that broke off in the evaluation after its warm start."""

    async def evaluate(self, name, **options):
        if name == "after warm start":
            raise KeyboardInterrupt
        return await whole(self, name, **options)

    whole = Evaluations.evaluate
    with monkeypatch.context() as patched:
        patched.setattr(Evaluations, "evaluate", evaluate)
        with pytest.raises(KeyboardInterrupt):
            train("Bandit", tmp_path, "broken", **SMALL)
    folder = tmp_path / "broken"
    assert (folder / "checkpoint-warm-start" / "model.safetensors").exists()
    assert not [*(folder / "checkpoints").glob("step_*")]
    return folder


def test_a_resume_takes_it_and_ends_as_a_run_that_was_not_stopped(broken, tmp_path, monkeypatch, capsys):
    whole = train("Bandit", tmp_path, "whole", **SMALL)

    async def demonstrate(*arguments, **options):
        raise AssertionError("nothing is demonstrated twice")

    monkeypatch.setattr(warm_start, "demonstrate", demonstrate)
    resumed = train("Bandit", tmp_path, "broken", resume=True, **{**SMALL, "quiet": False})
    assert "The warm start is that of an earlier attempt" in capsys.readouterr().out
    assert weights_of(broken) == weights_of(whole.folder)
    assert resumed.reports.keys() == whole.reports.keys()
    scores = [
        {key: value for key, value in row.items() if key.startswith("eval/") and key.count("/") == 1}
        for row in metrics_of(whole.folder)
    ]
    assert scores == [
        {key: value for key, value in row.items() if key.startswith("eval/") and key.count("/") == 1}
        for row in metrics_of(broken)
    ]


def test_a_run_that_begins_anew_in_that_folder_does_not(broken, tmp_path):
    # As one that was killed, with nothing to evaluate.
    (broken / "metrics.jsonl").unlink()
    shutil.rmtree(broken / "checkpoint")
    other = {**SMALL, "warm_start_lr": 1e-3}
    alone = train("Bandit", tmp_path, "alone", **other)
    assert weights_of(train("Bandit", tmp_path, "broken", **other).folder) == weights_of(alone.folder)

"""Groups that are played in processes of their own: the same episodes, the same weights, nothing lost."""

from __future__ import annotations

import pytest

from tests.flow.runs import journal_of, train
from tests.flow.test_settings_act import without_times

SHORT = {
    "inline": False,
    "enable_deterministic_inference": True,
    "num_rollout": 2,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_episodes": 2,
    "num_threads": 1,
}


def played(tmp_path, number, world="Talkative", **settings):
    name = f"players-{number}"
    return train(world, tmp_path, name, **{**SHORT, "num_rollout_workers": number, **settings}).folder


@pytest.mark.full
def test_a_run_is_the_same_with_any_number_of_players(tmp_path):
    folders = [played(tmp_path, number) for number in (0, 1, 2)]
    journals = [without_times(journal_of(folder)) for folder in folders]
    weights = [(folder / "checkpoint" / "model.safetensors").read_bytes() for folder in folders]
    assert journals[0] == journals[1] == journals[2]
    assert weights[0] == weights[1] == weights[2]
    assert len(list((folders[2] / "players").glob("player-*.log"))) == 2

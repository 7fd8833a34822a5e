"""An agent behind the gateway learns as the environment that it could have been, bit for bit."""

from __future__ import annotations

import pytest

import agentrl
from tests.flow.runs import TINY, WARM, journal_of, metrics_of, tokens_of
from tests.flow.test_resume import weights_of

SETTINGS = {
    **TINY,
    **WARM,
    "warm_start_steps": 20,
    "num_demonstrations": 32,
    "num_rollout": 3,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_episodes": 8,
    "eval_interval": 1000,
    "enable_deterministic_inference": True,
    "inline": True,
    "quiet": True,
    "seed": 3,
}


def trained(world, folder, **settings):
    """The folder of a run."""
    env = f"tests.envs.gateway.learning:{world}"
    options = {**SETTINGS, "env": env, "output_dir": str(folder), "name": world, **settings}
    return agentrl.train(**options).folder


@pytest.mark.full
def test_it_makes_the_weights_of_the_native_environment_bit_for_bit(tmp_path):
    native, harness = (trained(world, tmp_path) for world in ("Native", "Harness"))
    own, others = (journal_of(folder, "step_*") for folder in (harness, native))
    assert [*map(tokens_of, own)] == [*map(tokens_of, others)]
    assert weights_of(harness) == weights_of(native)
    rewards = [
        [row["rollout/rewards"] for row in metrics_of(f) if "rollout/rewards" in row]
        for f in (harness, native)
    ]
    assert rewards[0] == rewards[1]
    assert any(len(entry["episode"]["trajectories"][0]["turns"]) > 1 for entry in own)

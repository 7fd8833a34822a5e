"""Whole runs with functions in slime's form: tokens and weights are those of the native runs."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

import agentrl
from agentrl.records import reconcile
from tests.flow.runs import TINY, WARM, journal_of, metrics_of, tokens_of

pytestmark = pytest.mark.full

RUN = {
    **TINY,
    **WARM,
    "inline": True,
    "num_rollout": 2,
    "eval_episodes": 8,
    "eval_interval": 2,
    "quiet": True,
}


def trained(folder, env, settings, path):
    """Two runs of one seed: the environment as it is, and a function for slime in it."""
    own = {name: value for name, value in RUN.items() if name != "vocab_size"} | settings
    for name, more in (("native", {}), ("slime", {"custom_generate_function_path": path})):
        agentrl.train(env=env, name=name, output_dir=str(folder), **own, **more)
        assert reconcile(folder / name).problems == ()
    return folder / "native", folder / "slime"


def check_equal(native, slime):
    """Every episode that was trained on has the same tokens and the same score."""
    pairs = [*zip(journal_of(native, "step_*"), journal_of(slime, "step_*"), strict=True)]
    for one, other in pairs:
        tokens = [tokens_of(one), tokens_of(other)]
        # A function writes what no turn reads at its own end, if at all.
        length = min(map(len, tokens))
        assert tokens[0][:length] == tokens[1][:length]
        assert not any(any(parts[length + 1 :: 2]) for parts in tokens)
        assert one["verdicts"][0]["total"] == other["verdicts"][0]["total"]
    assert len({entry["verdicts"][0]["total"] for entry, _ in pairs}) > 1
    norms = [
        [row["train/grad_norm"] for row in metrics_of(run) if "train/grad_norm" in row]
        for run in (native, slime)
    ]
    assert len(norms[0]) > 0
    np.testing.assert_allclose(*norms, rtol=1e-5)
    return tuple(load_file(run / "checkpoint" / "model.safetensors") for run in (native, slime))


def test_a_search_agent_for_slime_trains_to_the_weights_of_the_native_one(tmp_path):
    settings = {"warm_start_steps": 250, "num_demonstrations": 1024}
    runs = trained(tmp_path, "HopSearch-v0", settings, "tests.envs_contrib.slime.paths.search")
    native, slime = check_equal(*runs)
    assert all(np.array_equal(native[name], slime[name]) for name in native)


def test_a_code_agent_for_slime_trains_to_the_weights_of_the_native_one(tmp_path):
    settings = {
        "warm_start_steps": 500,
        "num_demonstrations": 1024,
        "rollout_batch_size": 4,
        "env_kwargs": {"level": "easy", "instructions": False},
    }
    runs = trained(tmp_path, "ReTool-v0", settings, "tests.envs_contrib.slime.paths.code")
    native, slime = check_equal(*runs)
    # Programs take their time, so the engine decodes other episodes at once, in other orders of addition.
    for name in native:
        np.testing.assert_allclose(native[name], slime[name], atol=2e-5)

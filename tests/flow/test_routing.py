"""Runs of a mixture of experts that replay the routing of the engine, or of the trainer's own first pass."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import agentrl
from agentrl.algorithms.samples import samples_of
from agentrl.errors import UserError
from agentrl.types import ROUTED_EXPERTS
from agentrl.weights.hf.export import save_model
from tests.engine.routes import routes_of
from tests.flow.runs import TINY, WARM, journal_of, metrics_of, train
from tests.flow.test_families import EXPERTS_ON_TWO, SIZES, tokens
from tests.flow.test_resume import newest, same, started

__all__ = ["tokens"]

SETTINGS = {
    "num_rollout": 2,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_episodes": 4,
    "use_tensorboard": False,
    "use_rollout_logprobs": False,
    "max_turns": 3,
    "rollout_max_context_len": 160,
    "rollout_max_response_len": 12,
}
DIFF, MISMATCH = "train/train_rollout_logprob_abs_diff", "train/moe_router_mismatch"
K3 = "train/train_rollout_kl_k3"


def mixture(*, sure: float = 1.0) -> PreTrainedModel:
    """sure: how far apart the scores of its routers are."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(sure if name.endswith("gate.weight") else 4.0)
    return model


@pytest.fixture(scope="module")
def checkpoint(tokens, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixture"
    save_model(mixture(), tokens, str(folder))
    return folder


def rows_of(folder):
    return [row for row in metrics_of(folder) if "train/loss" in row]


def test_the_experts_in_a_journal_are_those_of_every_prefix(checkpoint, tmp_path):
    """Over turns with tools in between, by brute force; the run trains on the logprobs of just these."""
    run = train(
        *("Talkative", tmp_path, "x"),
        **{**SETTINGS, "num_rollout": 1, "hf_checkpoint": str(checkpoint), "router_replay": "R3"},
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    samples = [sample for episode in episodes_in(run.folder) for sample in samples_of(episode)]
    # Also tokens of the world after the first sampled ones are known.
    assert sum(np.diff(np.flatnonzero(sample.loss_mask)).max(initial=0) > 1 for sample in samples) > 1
    for sample in samples[:8]:
        rows, end = sample.extras[ROUTED_EXPERTS].values, int(np.flatnonzero(sample.loss_mask)[-1])
        expected = routes_of(model, sample.token_ids[:end].tolist())
        np.testing.assert_array_equal(np.sort(rows[:end], -1), expected)
        # No pass had these as its input.
        assert (rows[end:] == -1).all()
    (row,) = rows_of(run.folder)
    assert row[DIFF] < 1e-5
    assert row[MISMATCH] == 0.0
    assert row["train/moe_load_imbalance"] > 1.0
    assert 0 < row["train/moe_router_entropy"] <= np.log(8) + 1e-6


def episodes_in(folder):
    from pydantic import TypeAdapter

    from agentrl.types import Episode

    adapter = TypeAdapter(Episode)
    return [adapter.validate_python(entry["episode"]) for entry in journal_of(folder, "step_*")]


NOISY = {"engine_dtype": "bfloat16", "rollout_temperature": 1.0}


def noisy(checkpoint, tmp_path, name, **settings):
    """A run whose engine computes in bfloat16, so that tokens near a tie go to other experts."""
    run = train(
        *("Talkative", tmp_path, name),
        **{**SETTINGS, **NOISY, "hf_checkpoint": str(checkpoint), "return_routed_experts": True, **settings},
    )
    return rows_of(run.folder)


@pytest.fixture(scope="module")
def unsure(tokens, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "unsure"
    save_model(mixture(sure=0.02), tokens, str(folder))
    return folder


def test_replay_takes_away_the_difference_that_other_experts_make(unsure, tmp_path):
    plain, replayed = (
        noisy(unsure, tmp_path, f"{replay}", router_replay=replay, num_rollout=1)[0]
        for replay in (None, "R3")
    )
    # The same tokens, by the same engine.
    assert plain["rollout/raw_reward"] == replayed["rollout/raw_reward"]
    assert plain[MISMATCH] > 0.01
    assert replayed[MISMATCH] > 0.0
    assert replayed[DIFF] < 0.75 * plain[DIFF]
    # Tokens behind other experts are those that are far off.
    assert replayed[K3] < 0.3 * plain[K3]


@pytest.mark.full
def test_two_ranks_that_share_experts_learn_with_and_without_replay(unsure, tmp_path, capsys):
    """Megatron against an engine in bfloat16: more reward than at first, and a smaller difference with R3."""
    settings = {
        **WARM,
        **EXPERTS_ON_TWO,
        "hf_checkpoint": str(unsure),
        "num_rollout": 8,
        "engine_dtype": "bfloat16",
        "return_routed_experts": True,
        "use_rollout_logprobs": False,
        "use_tis": True,
    }
    means = {}
    for replay in (None, "R3"):
        run = train("Bandit", tmp_path, f"{replay}", **settings, router_replay=replay)
        rows = rows_of(run.folder)
        assert rows[-1]["rollout/raw_reward"] > rows[0]["rollout/raw_reward"] + 0.1
        means[replay] = {key: np.mean([row[key] for row in rows]) for key in (MISMATCH, DIFF, K3)}
    with capsys.disabled():
        print("\nEP2, engine in bfloat16:", means)
    # The two runs part with their first update.
    assert means["R3"][K3] < 0.7 * means[None][K3]
    assert means["R3"][DIFF] < means[None][DIFF]


def test_a_run_with_the_trainers_own_routing_trains_another_way(unsure, tmp_path):
    settings = {**SETTINGS, "hf_checkpoint": str(unsure), "num_steps_per_rollout": 2, "lr": 0.02}
    plain, replayed = (
        train("Talkative", tmp_path, f"{replay}", **settings, router_replay=replay).folder
        for replay in (None, "R2")
    )
    assert [row["train/loss"] for row in rows_of(plain)] != [row["train/loss"] for row in rows_of(replayed)]
    # The first step of the first iteration is the same.
    assert weights_of(plain) != weights_of(replayed)


def test_groups_in_flight_go_on_with_the_experts_that_they_had(checkpoint, tmp_path):
    """Tokens of several versions in one turn: of all that were an input some experts are known."""
    late = {"max_staleness": 1, "partial_rollout": True, "correction": "tis", "num_rollout": 3}
    settings = {**SETTINGS, **late, "hf_checkpoint": str(checkpoint), "router_replay": "R3", "lr": 1e-4}
    del settings["use_rollout_logprobs"]
    run = train("Talkative", tmp_path, "x", **settings)
    samples = [sample for episode in episodes_in(run.folder) for sample in samples_of(episode)]
    assert len({int(version) for sample in samples for version in sample.versions if version >= 0}) > 1
    for sample in samples:
        rows, end = sample.extras[ROUTED_EXPERTS].values, int(np.flatnonzero(sample.loss_mask)[-1])
        assert (rows[:end] >= 0).all()
        assert (rows[end:] == -1).all()


@pytest.mark.full
def test_a_run_that_replays_and_is_killed_ends_as_if_it_had_not_been(unsure, tmp_path):
    """The engine computes in bfloat16, so that its experts are others than the trainer's own."""
    options = {**SETTINGS, **NOISY, "router_replay": "R3", "num_steps_per_rollout": 2, "num_rollout": 3}
    options |= {"hf_checkpoint": str(unsure), "eval_interval": 2, "save_interval": 1}
    options |= {"enable_deterministic_inference": True}
    whole = train("Talkative", tmp_path / "whole", "x", **options).folder
    assert all(row[MISMATCH] > 0 for row in rows_of(whole))
    folder = tmp_path / "killed" / "x"
    process = started(folder.parent, "--inline", world="Talkative", **options)
    deadline = time.monotonic() + 600
    while newest(folder) < 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert len(rows_of(folder)) < len(rows_of(whole))
    agentrl.train(folder, quiet=True)
    same(folder, whole)


def test_a_journal_with_experts_is_replayed_and_one_without_is_refused(checkpoint, tmp_path):
    own = {"hf_checkpoint": str(checkpoint), "router_replay": "R3"}
    run = train("Talkative", tmp_path, "played", **SETTINGS, **own)
    again = replay_of(run.folder, tmp_path, "again", **own)
    assert weights_of(again.folder) == weights_of(run.folder)
    plain = train("Talkative", tmp_path, "plain", **SETTINGS, hf_checkpoint=str(checkpoint))
    with pytest.raises(UserError, match="these episodes have none"):
        replay_of(plain.folder, tmp_path, "none", **own)


def replay_of(folder, output_dir, name, **settings):
    of_playing = {"rollout_batch_size", "n_samples_per_prompt", "eval_episodes", "max_turns"}
    of_playing |= {"rollout_response_len", "rollout_max_response_len"}
    kept = {key: value for key, value in SETTINGS.items() if key not in of_playing}
    acting = {"lr": TINY["lr"], "lr_warmup_iters": 0, **kept, **settings}
    return agentrl.train(
        quiet=True,
        inline=True,
        env="tests.flow.worlds:Talkative",
        output_dir=str(output_dir),
        name=name,
        replay=str(folder),
        **acting,
    )


def weights_of(folder):
    return (folder / "checkpoint" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"router_replay": "R3"},
        {"return_routed_experts": True},
        {"moe_aux_loss_coeff": 0.1},
        {"router_replay": "R3", "trainer": "megatron"},
    ],
)
def test_a_dense_model_is_refused(tmp_path, settings):
    with pytest.raises(UserError, match="are for a mixture of experts, and a model of type `qwen3` is none"):
        train("Talkative", tmp_path, "x", **SETTINGS, **settings)

"""A run whose engine and trainer take turns ends bit for bit as one whose do not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agentrl.trainer.ranks import RankTrainer
from tests.flow.runs import journal_of, metrics_of, train
from tests.flow.test_asynchronous import steps_of, versions_of
from tests.flow.test_resume import accounted
from tests.flow.test_settings_act import without_times
from tests.flow.worlds import Talkative

BATCH = {"num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 4}
SHORT = {**BATCH, "eval_episodes": 8, "eval_interval": 2, "use_tensorboard": False, "save_interval": 1}


def ended(folder):
    """All that a run leaves, without what it measured."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in metrics_of(folder)
    ]
    weights = (folder / "checkpoint" / "model.safetensors").read_bytes()
    return without_times(rows), without_times(journal_of(folder)), weights


@pytest.fixture
def turns(monkeypatch):
    """Who has the devices, in the order of the calls; and when the trainer's state is copied."""
    happened = []

    def noting(owner, name, what):
        call = getattr(owner, name)

        async def noted(self, *args, **kwargs):
            happened.append(what)
            return await call(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    noting(RankTrainer, "onload", "trainer")
    noting(RankTrainer, "offload", "engine")
    noting(RankTrainer, "save_state", "save")
    return happened


def test_a_checkpoint_is_copied_where_the_engine_has_no_memory(tmp_path, turns):
    """On one card the state of the optimizer does not fit beside the engine's cache."""
    train("Talkative", tmp_path, "x", colocate=True, **SHORT)
    assert turns.count("save") == 3
    assert all(turns[at - 1 : at + 2] == ["trainer", "save", "engine"] for at in saves_in(turns))


def saves_in(turns):
    return [at for at, what in enumerate(turns) if what == "save"]


def offloads_of(folder):
    rows = [row for row in metrics_of(folder) if "perf/step_time" in row]
    return [row.get("perf/offload_rollout_bytes") for row in rows]


def is_cut(episode):
    """Whether an episode was truncated before it had used its turns and its tokens."""
    completions = [turn.tokens.completion.token_ids for turn in episode.turns]
    num_tokens = sum(len(turn.tokens.world_ids) for turn in episode.turns) + sum(map(len, completions))
    return not len(completions[-1]) and num_tokens < Talkative.limits.max_tokens


# Bandit's siblings agree so early that no step updates anything: the engine gets its own weights back.
@pytest.mark.parametrize("world", ["Talkative", pytest.param("Bandit", marks=pytest.mark.full)])
def test_a_colocated_run_ends_bit_for_bit_as_one_that_is_not(tmp_path, world):
    plain, colocated = (
        train(world, tmp_path, f"colocated-{colocate}", colocate=colocate, **SHORT).folder
        for colocate in (False, True)
    )
    assert ended(colocated) == ended(plain)
    assert offloads_of(plain) == [None] * 3
    assert all(freed is not None for freed in offloads_of(colocated))
    steps = [row["train/optimizer_steps"] for row in metrics_of(plain) if "perf/step_time" in row]
    assert any(steps) is (world == "Talkative")


@pytest.mark.parametrize("partial_rollout", [pytest.param(False, marks=pytest.mark.full), True])
def test_episodes_in_flight_stop_in_the_trainers_turn_and_go_on_after_it(tmp_path, partial_rollout):
    settings = {"colocate": True, "max_staleness": 1, "correction": "tis", "partial_rollout": partial_rollout}
    # Requests wait for slots, so that some are in flight whenever a batch is complete.
    few = {"max_slots": 6, "num_rollout": 4}
    folder = train("Talkative", tmp_path, "x", **{**SHORT, **settings, **few}).folder
    found = accounted(folder)
    assert (found.ahead, found.saved) == (0, 0)
    episodes = [
        set(np.concatenate(versions_of(entry)).tolist()) for step in steps_of(folder) for entry in step
    ]
    assert len(episodes) > 4 * 4
    assert max(map(len, episodes)) == 1 + partial_rollout


@pytest.mark.full
def test_the_time_of_groups_does_not_go_on_in_the_trainers_turn(tmp_path, monkeypatch):
    update, limit_s = RankTrainer.update, 6.0

    async def slow(trainer, batch):
        await asyncio.sleep(limit_s)
        return await update(trainer, batch)

    monkeypatch.setattr(RankTrainer, "update", slow)
    settings = {"colocate": True, "max_staleness": 1, "correction": "tis", "group_timeout_s": limit_s}
    folder = train("Talkative", tmp_path, "x", **{**SHORT, **settings, "max_slots": 6}).folder
    entries = [entry for step in steps_of(folder) for entry in step]
    # Some were in play in a trainer's turn, which is as long as all of their group's time.
    assert any(len(set(np.concatenate(versions_of(entry)).tolist())) > 1 for entry in entries)
    assert not any(is_cut(entry.episode) for entry in entries)


@pytest.mark.full
def test_a_colocated_run_in_processes_gives_memory_back_and_resumes(tmp_path):
    # 1.7 million parameters in fp32; of the cache only what was used takes memory.
    large = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 4}
    settings = {**SHORT, **large, "inline": False, "colocate": True, "max_slots": 256}
    folder = train("Talkative", tmp_path, "x", **{**settings, "num_rollout": 2}).folder
    assert min(offloads_of(folder)) > 6e6
    resumed = train("Talkative", tmp_path, "x", resume=True, **settings).folder
    assert len(offloads_of(resumed)) == 3


@pytest.mark.full
def test_a_colocated_run_on_megatron_ends_bit_for_bit_as_one_that_is_not(tmp_path):
    ranks = {"trainer": "megatron", "actor_num_gpus_per_node": 2, "num_query_groups": 2, "inline": False}
    roles = {"advantage_estimator": "ppo", "use_kl_loss": True, "kl_loss_coef": 0.01}
    exact = {"enable_deterministic_inference": True}
    plain, colocated = (
        train("Talkative", tmp_path, f"x-{colocate}", colocate=colocate, **SHORT, **ranks, **roles, **exact)
        for colocate in (False, True)
    )
    assert ended(colocated.folder)[::2] == ended(plain.folder)[::2]
    assert all(freed is not None for freed in offloads_of(colocated.folder))

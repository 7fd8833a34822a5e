"""`actor_num_gpus_per_node = 2` is all that changes: an agent learns on two ranks of the torch trainer."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.errors import ConfigError
from agentrl.records import reconcile
from tests.flow.runs import WARM, metrics_of, train

ON_TWO = {"actor_num_gpus_per_node": 2}


@pytest.mark.full
def test_an_agent_learns_on_two_ranks_and_goes_on_on_one_and_on_three(tmp_path):
    """Warm start and RL are two plans of the same ranks, which share a critic and a reference, too."""
    algorithm = {"advantage_estimator": "ppo", "use_kl_loss": True, "kl_loss_coef": 0.01, "critic_lr": 3e-3}
    settings = {**WARM, **ON_TWO, **algorithm, "save_interval": 2}
    result = train("Bandit", tmp_path, "x", num_rollout=8, **settings)
    before, after = (result.reports[at]["sampled"].mean for at in ("after warm start", "after RL"))
    assert before < 0.5
    assert after > 0.75
    assert {path.name for path in (result.folder / "trainer").glob("*.log")} == {"rank-0.log", "rank-1.log"}
    for ranks, steps in ((1, 9), (3, 10)):
        changed = {"num_rollout": steps, "actor_num_gpus_per_node": ranks}
        agentrl.train(result.folder, resume=True, quiet=True, **changed)
    rows = [row for row in metrics_of(result.folder) if "train/loss" in row]
    assert len(rows) == 10
    # In fp32 the ranks see what the engine saw, before every update.
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < 1e-4
    assert reconcile(result.folder).problems == ()


@pytest.mark.full
def test_two_ranks_learn_what_one_process_learns_but_for_rounding(tmp_path):
    """The sums of a step are in another order, which a short run hardly shows."""
    settings = {"num_rollout": 1, "num_steps_per_rollout": 2, "lora_rank": 2}
    folders = [
        train("Talkative", tmp_path, name, **settings, **more).folder
        for name, more in (("one", {}), ("two", ON_TWO), ("replicated", {**ON_TWO, "fsdp_size": 1}))
    ]
    rows = [next(row for row in metrics_of(folder) if "train/loss" in row) for folder in folders]
    keys = [key for key in rows[0] if key.startswith("train/")]
    for row in rows[1:]:
        assert {key: row[key] for key in keys} == pytest.approx(
            {key: rows[0][key] for key in keys}, rel=1e-3, abs=1e-5
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"actor_num_gpus_per_node": 4, "fsdp_size": 3},
            "= 4 must be a multiple of fsdp_size = 3; change one",
        ),
        ({"actor_num_nodes": 2}, "actor_num_nodes = 2 needs cluster = ray"),
        ({"fsdp_size": 2}, "fsdp_size has no effect with one rank; take several"),
        ({"trainer": "megatron", "fsdp_size": 2}, "with trainer = megatron, which has a layout; drop that"),
        ({**ON_TWO, "tensor_model_parallel_size": 2}, "no effect without trainer = megatron"),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_a_sentence(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        train("Bandit", tmp_path, "x", **settings)
    assert not (tmp_path / "x").exists()

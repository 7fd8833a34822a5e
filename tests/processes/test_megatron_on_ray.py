"""Megatron's ranks on Ray: the layouts of child processes, and the same end when one of them dies."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from agentrl.errors import TrainerError
from agentrl.losses import PolicyLoss, ValueLoss
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.plan import WORKER, MegatronPlan
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.weights.hf.export import save_model
from tests.processes.ranks import ranks_on
from tests.processes.test_ray_ranks import await_end
from tests.trainer.test_processes import RecordingSink, learned
from tests.trainer.tiny import qwen3, settings, tokenizer

BUCKET_BYTES = 2048


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    model = tmp_path_factory.mktemp("model") / "model"
    save_model(qwen3(torch.float32), tokenizer(), str(model))
    return MegatronPlan(
        layout=MegatronConfig(actor_num_gpus_per_node=2, tensor_model_parallel_size=2),
        policy=Learning(PolicyLoss(), settings(lr=1e-2), 6),
        models={"old": str(model), "ref": str(model)},
        critic=Learning(ValueLoss(), settings(lr=3e-2), 6),
        critic_warmup=1,
    )


@pytest.fixture
def ranks(session, placement, tmp_path):
    ranks = ranks_on(session, placement, 2, tmp_path, preloaded=WORKER)
    yield ranks
    ranks.close()


@pytest.mark.full
async def test_two_ranks_learn_bit_for_bit_what_child_processes_learn(plan, ranks, tmp_path):
    local = Processes(2, tmp_path / "local", preloaded=WORKER)
    expected = await learned(await RankTrainer.started(local, plan))
    local.close()
    assert await learned(await RankTrainer.started(ranks, plan)) == expected


class Striking(RecordingSink):
    """Kills a process when the second bucket has come."""

    def __init__(self, pid):
        self.pid, self.received = pid, 0

    async def put(self, bucket):
        await super().put(bucket)
        self.received += 1
        if self.received == 2:
            os.kill(self.pid, signal.SIGKILL)


@pytest.mark.faults
@pytest.mark.parametrize("number", [0, 1])
async def test_a_rank_that_is_killed_in_mid_publish_is_named_and_ends_the_other(plan, ranks, number):
    trainer = RankTrainer(ranks, plan, bucket_bytes=BUCKET_BYTES)
    pids = ranks.pids
    sink = Striking(pids[number])
    with pytest.raises(TrainerError, match=rf"rank {number} .*process {pids[number]} on .*was killed, or"):
        await trainer.publish(sink, version=1)
    # It struck in flight.
    assert sink.received >= 2
    assert not hasattr(sink, "checksum")
    await_end(ranks)

"""What a run's servers are told of the way of its weights."""

from __future__ import annotations

import pytest

from agentrl.assembly.fleet import _transport
from agentrl.engine.config import EngineConfig, ServerGroup
from agentrl.engine.sglang.launch import LocalLauncher
from tests.engine.feeding import open_rig
from tests.engine.scheduling import Scheduler


@pytest.mark.parametrize("gpus", [(0,), (1,), (2, 1), (1, 0)])
async def test_a_group_is_of_gloo_where_servers_are_on_the_senders_gpu(tmp_path, gpus):
    groups = [ServerGroup(num_gpus_per_engine=number) for number in gpus]
    config = EngineConfig(engine="sglang", sglang_groups=groups, update_weights_transport="distributed")
    met = []
    scheduler = Scheduler(loader=False)
    scheduler.before = lambda path, body: met.append(body) if path.startswith("/init") else None
    transport = _transport(tmp_path, config, tmp_path, LocalLauncher())
    async with open_rig(tmp_path, scheduler, transport=transport) as rig:
        await rig.send(1)
        await rig.expect_version(1)
    # What makes gloo right: who can be met here is on this machine.
    assert [(request["backend"], request["master_address"]) for request in met] == [("gloo", "127.0.0.1")]

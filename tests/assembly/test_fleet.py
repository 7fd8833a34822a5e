"""The transport of new weights fits to where the servers are."""

from __future__ import annotations

import pytest

from agentrl.assembly import fleet
from agentrl.assembly.fleet import _Reach, _reach_of, _transport
from agentrl.engine.config import EngineConfig, ServerGroup
from agentrl.engine.sglang.launch.listener import HOST
from agentrl.engine.sglang.transports.cuda_ipc import CudaIpc
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.errors import ConfigError
from tests.engine.feeding import open_rig
from tests.engine.scheduling import Scheduler

NEAR, FAR = "near", "far"


@pytest.mark.parametrize("gpus", [(0,), (1,), (2, 1), (1, 0)])
async def test_a_group_is_of_gloo_where_servers_are_on_the_senders_gpu(tmp_path, gpus):
    groups = [ServerGroup(num_gpus_per_engine=number) for number in gpus]
    config = EngineConfig(engine="sglang", sglang_groups=groups, update_weights_transport="distributed")
    met = []
    scheduler = Scheduler(loader=False)
    scheduler.before = lambda path, body: met.append(body) if path.startswith("/init") else None
    transport = _transport(tmp_path, config, tmp_path, _Reach(HOST, True))
    async with open_rig(tmp_path, scheduler, transport=transport) as rig:
        await rig.send(1)
        await rig.expect_version(1)
    # What makes gloo right: who can be met here is on this machine.
    assert [(request["backend"], request["master_address"]) for request in met] == [("gloo", "127.0.0.1")]


def test_servers_that_run_elsewhere_already_get_their_weights_through_the_network(tmp_path, monkeypatch):
    here = _reach_of(["http://127.0.0.1:1", "http://localhost:2"])
    assert here == (HOST, True)
    config = EngineConfig(engine="sglang", sglang_url=f"http://{FAR}:2")
    assert isinstance(_transport(tmp_path, config, tmp_path, here), CudaIpc)

    monkeypatch.setattr(fleet, "address_to", {FAR: NEAR, HOST: None}.get)
    away = _reach_of(["http://127.0.0.1:1", f"http://{FAR}:2"])
    assert away == (NEAR, False)
    transport = _transport(tmp_path, config, tmp_path, away)
    assert isinstance(transport, Distributed)
    assert (transport._host, transport._check_loaded) == (NEAR, False)
    shared = config.model_copy(update={"update_weights_transport": "tensor"})
    with pytest.raises(ConfigError, match="leave it out, or choose distributed"):
        _transport(tmp_path, shared, tmp_path, away)

"""A rank's number and addresses are read from a launcher's environment, which must fit the layout."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.trainer.launch.launcher_env import LauncherEnv, is_loopback, launcher_env
from agentrl.trainer.megatron.config import MegatronConfig

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}


def test_the_environment_is_read():
    layout = MegatronConfig(actor_num_nodes=2, actor_num_gpus_per_node=2)
    assert layout.world_size == 4
    assert layout.data_parallel_size == 4
    expected = LauncherEnv(1, 4, 1, "10.0.0.7", 29500, has_agent_store=False, restart_count=0)
    assert launcher_env(layout, LAUNCHED) == expected
    # Without LOCAL_RANK, the ranks of a machine are consecutive.
    assert launcher_env(layout, {**LAUNCHED, "RANK": "3"}).local_rank == 1
    torchruns = {"LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    expected = LauncherEnv(1, 4, 0, "10.0.0.7", 29500, has_agent_store=True, restart_count=2)
    assert launcher_env(layout, {**LAUNCHED, **torchruns}) == expected
    one_machine = MegatronConfig(actor_num_gpus_per_node=2)
    assert launcher_env(one_machine, {}) is None
    assert launcher_env(one_machine, {"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "10.0.0.7", "node-1")] == [
        *(True, True, True),
        *(False, False),
    ]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {},
            "actor_num_nodes = 2 needs cluster = ray, or a launcher that starts this command for every",
        ),
        (
            {"WORLD_SIZE": "3"},
            "WORLD_SIZE = 3 is not actor_num_nodes x actor_num_gpus_per_node = 2 x 2; start",
        ),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is in the environment, but RANK is not; set both"),
        ({**LAUNCHED, "RANK": "4"}, "RANK = 4 must be less than WORLD_SIZE = 4; number the ranks from 0"),
        ({**LAUNCHED, "MASTER_ADDR": ""}, "but MASTER_ADDR is not; set both"),
        (
            {**LAUNCHED, "MASTER_PORT": "x"},
            "MASTER_PORT = 'x' in the environment must be a whole number; set",
        ),
        ({**LAUNCHED, "MASTER_PORT": "70000"}, "MASTER_PORT = 70000 is no port; choose one from 1 to 65535"),
        ({**LAUNCHED, "MASTER_PORT": "0"}, "MASTER_PORT = 0 is no port; choose"),
        (
            {**LAUNCHED, "WORLD_SIZE": "-4"},
            "WORLD_SIZE = '-4' in the environment must be a whole number; set",
        ),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        launcher_env(MegatronConfig(actor_num_nodes=2, actor_num_gpus_per_node=2), environment)

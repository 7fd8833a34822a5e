"""A rank's place is what a launcher's environment says, and it must fit the layout."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.trainer.launch.seats import Seat, is_loopback, taken_seat
from agentrl.trainer.megatron.config import MegatronConfig

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}


def test_a_place_is_what_a_launcher_says():
    layout = MegatronConfig(actor_num_nodes=2, actor_num_gpus_per_node=2)
    assert layout.world_size == 4
    assert layout.data_parallel_size == 4
    assert taken_seat(layout, LAUNCHED) == Seat(1, 4, 1, "10.0.0.7", 29500, kept=False, attempt=0)
    # Where nobody says otherwise, the ranks of a machine follow each other.
    assert taken_seat(layout, {**LAUNCHED, "RANK": "3"}).local == 1
    torchruns = {"LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert taken_seat(layout, {**LAUNCHED, **torchruns}) == Seat(1, 4, 0, "10.0.0.7", 29500, True, 2)
    here = MegatronConfig(actor_num_gpus_per_node=2)
    assert taken_seat(here, {}) is taken_seat(here, {"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "10.0.0.7", "node-1")] == [
        *(True, True, True),
        *(False, False),
    ]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            {},
            "actor_num_nodes = 2 needs a launcher that starts this command for every rank, such as torchrun",
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
def test_an_environment_that_does_not_fit_is_told(environment, says):
    with pytest.raises(ConfigError, match=says):
        taken_seat(MegatronConfig(actor_num_nodes=2, actor_num_gpus_per_node=2), environment)

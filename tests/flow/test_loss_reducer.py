"""Loss weights of a function train as those of that name do."""

from __future__ import annotations

from tests.flow.runs import train
from tests.flow.test_replay import SMALL as REPLAYED
from tests.flow.test_replay import weights_of

SMALL = {**REPLAYED, "num_rollout": 2}


def test_a_function_that_computes_what_a_name_does_trains_bit_for_bit_as_that_name(tmp_path):
    path = {"custom_pg_loss_reducer_function_path": "tests.flow.worlds:every_rollout"}
    own = train("Talkative", tmp_path, "own", **SMALL, **path).folder
    named = train("Talkative", tmp_path, "named", **SMALL, loss_weighting="rollout").folder
    plain = train("Talkative", tmp_path, "plain", **SMALL).folder
    assert weights_of(own) == weights_of(named) != weights_of(plain)

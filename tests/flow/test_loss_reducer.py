"""Loss weights of a function train as those of that name do."""

from __future__ import annotations

from tests.flow.runs import TINY, train
from tests.flow.test_replay import weights_of

SMALL = {
    **TINY,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_episodes": 4,
    "num_rollout": 2,
    "use_tensorboard": False,
}


def test_a_function_that_computes_what_a_name_does_trains_bit_for_bit_as_that_name(tmp_path):
    path = {"custom_pg_loss_reducer_function_path": "tests.flow.worlds:every_rollout"}
    own = train("Talkative", tmp_path, "own", **SMALL, **path).folder
    named = train("Talkative", tmp_path, "named", **SMALL, loss_weighting="rollout").folder
    plain = train("Talkative", tmp_path, "plain", **SMALL).folder
    assert weights_of(own) == weights_of(named) != weights_of(plain)

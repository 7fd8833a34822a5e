import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.weights import token_mean
from tests.algorithms.episodes import sample

masks = st.lists(st.lists(st.integers(0, 1), max_size=6).map(lambda rest: [0, *rest]), max_size=6)


@given(masks)
def test_every_loss_token_weighs_the_same_over_the_whole_step(told):
    weights = token_mean([sample("e", mask) for mask in told])
    number = sum(map(sum, told))
    expected = [[np.float32(1 / number) if bit else 0.0 for bit in mask] for mask in told]
    assert [w.tolist() for w in weights] == expected

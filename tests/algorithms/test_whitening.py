import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.estimators import whiten

values = st.lists(st.floats(-50, 50).map(lambda v: round(v, 2)), min_size=1, max_size=20)


@given(values)
def test_values_are_brought_to_mean_0_and_deviation_1(values_N):
    mean, spread = statistics.fmean(values_N), statistics.pstdev(values_N)
    expected = [(v - mean) / (spread + 1e-8) for v in values_N]
    assert whiten(np.array(values_N)).tolist() == pytest.approx(expected, abs=1e-6)
    if len(set(values_N)) > 1:
        assert whiten(np.array(values_N)).std() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("values_N", [[], [0.1], [0.1] * 3, [1e300] * 7])
def test_values_without_a_scale_give_exactly_nothing(values_N):
    assert whiten(np.array(values_N)).tolist() == [0.0] * len(values_N)


@pytest.mark.parametrize("values_N", [[1e76, -1e76], [0.1, 0.1 + 2e-17, 0.3 - 0.2], [5e-324, 0.0]])
def test_huge_and_nearly_equal_values_stay_finite(values_N):
    whitened = whiten(np.array(values_N))
    assert np.all(np.isfinite(whitened))
    assert np.all(np.abs(whitened) <= 2)


def test_what_is_whitened_is_not_changed():
    values_N = np.array([1.0, 2.0])
    assert not np.shares_memory(whiten(values_N), values_N)
    assert values_N.tolist() == [1.0, 2.0]

"""Shuffled orders that are computed for each position."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.order import PIECES_PER_WINDOW, Permutation, Shuffled, Windowed


@given(st.integers(1, 5000), st.text(max_size=8))
def test_every_position_has_a_number_of_its_own(n, key):
    permutation = Permutation(n, key)
    assert len(permutation) == n
    assert sorted(permutation[k] for k in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [10, 2000])
@pytest.mark.parametrize("position", [-1, "n"])
def test_a_position_beyond_the_end_is_an_index_error(n, position):
    with pytest.raises(IndexError):
        Permutation(n, "key")[n if position == "n" else position]


def test_permutations_have_the_statistics_of_random_ones():
    n = 2000
    orders = [Permutation(n, f"key {k}") for k in range(300)]
    fixed = sum(order[k] == k for order in orders for k in range(0, n, 10))
    assert fixed < 120  # 30 are expected of 60,000
    tenths = Counter(order[7] * 10 // n for order in orders)
    assert all(10 < tenths[tenth] < 60 for tenth in range(10))  # 30 each
    neighbours = sum(order[k + 1] == order[k] + 1 for order in orders for k in range(0, n - 1, 10))
    assert neighbours < 120
    earlier = sum(order[11] < order[12] for order in orders)
    assert 100 < earlier < 200


def test_a_billion_rows_need_no_list():
    order = Shuffled(10**9, seed=1)
    rows = [order.row(0, position) for position in range(1000)]
    assert len(set(rows)) == 1000
    assert min(rows) < 10**8 < 9 * 10**8 < max(rows)


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=14)


@given(SIZES, st.integers(0, 99), st.integers(0, 3))
def test_windows_go_through_every_row_once(sizes, seed, epoch):
    order = Windowed(sizes, seed)
    assert sorted(order.row(epoch, position) for position in range(sum(sizes))) == list(range(sum(sizes)))


@given(SIZES, st.integers(0, 99))
def test_a_window_has_few_full_pieces_and_upcoming_returns_them(sizes, seed):
    order = Windowed(sizes, seed)
    ends = [*accumulate(sizes)]
    piece_of = [k for k, size in enumerate(sizes) for _ in range(size)]
    windows: list[set[int]] = []
    for position in range(sum(sizes)):
        pieces = {piece_of[row] for row in order.upcoming(0, position)}
        assert piece_of[order.row(0, position)] in pieces
        assert len(pieces) <= PIECES_PER_WINDOW
        if not windows or windows[-1] != pieces:
            windows.append(pieces)
    assert sorted(piece for pieces in windows for piece in pieces) == list(range(len(ends)))


def test_pieces_and_rows_are_shuffled_anew_in_every_epoch():
    order = Windowed([50] * 40, seed=0)
    first, second = ([order.row(epoch, position) for position in range(2000)] for epoch in (0, 1))
    assert first != second
    assert sorted(first[:200]) != sorted(second[:200])
    assert first[:200] != sorted(first[:200])
    assert len({row // 50 for row in first[:20]}) == PIECES_PER_WINDOW

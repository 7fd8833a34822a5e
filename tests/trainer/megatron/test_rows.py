"""Rows are filled up and cut so that every token is somewhere once, and every replica has something to do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.batch import cost_of, micro_batches, shares_of
from agentrl.trainer.megatron.model.rows import Cut, padded, pieces_of, shard_of
from tests.algorithms.episodes import sample

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


def rows_of(drawn, max_tokens=20):
    samples = [sample(f"r{number}", [False, *mask]) for number, mask in enumerate(drawn)]
    return micro_batches(samples, [sample_.loss_mask for sample_ in samples], max_tokens)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_has_a_piece_from_each_end_of_a_sequence(ranks):
    pieces = [pieces_of(4 * ranks, ranks, rank) for rank in range(ranks)]
    assert sorted(np.concatenate(pieces)) == list(range(4 * ranks))
    # Equal work: each looks back at as many tokens in all.
    assert len({int(piece.sum()) for piece in pieces}) == 1
    assert pieces[0][0] == 0
    assert pieces[0][-1] == 4 * ranks - 1


@given(masks, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([0, 40]))
def test_every_predicted_token_is_predicted_by_one_rank_from_its_own_token(drawn, ranks, shares, least):
    multiple = 2 * ranks if ranks > 1 else 1
    for micro in rows_of(drawn):
        cuts = [Cut(multiple, multiple * shares, ranks, rank, least) for rank in range(ranks)]
        rows = [shard_of(micro, cut) for cut in cuts]
        chosen = np.concatenate([row.chosen_n for row in rows])
        assert sorted(chosen) == list(range(len(micro.targets_N)))
        for row in rows:
            assert len(row.input_ids_t) * ranks == row.bounds[-1] == cuts[0].padded_length(micro)
            assert row.bounds[-1] % (multiple * shares) == 0
            assert row.bounds[-1] >= least
            at = micro.predictor_N[row.chosen_n]
            assert (row.input_ids_t[row.predictor_n] == micro.input_ids_T[at]).all()
            assert (row.position_ids_t[row.predictor_n] == micro.position_ids_T[at]).all()
        lengths = np.diff(rows[0].bounds)[: len(micro.lengths)]
        assert all(filled >= length for filled, length in zip(lengths, micro.lengths, strict=True))
        assert rows[0].lengths == tuple(np.diff(rows[0].bounds))


@given(masks, st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_what_is_predicted_further_ahead_is_so_from_its_own_sequence(drawn, ranks, k):
    multiple = 2 * ranks if ranks > 1 else 1
    for micro in rows_of(drawn):
        cuts = [Cut(multiple, multiple, ranks, rank, ahead=2) for rank in range(ranks)]
        rows = [shard_of(micro, cut) for cut in cuts]
        numbers = np.repeat(np.arange(len(micro.lengths)), micro.lengths)
        far = [n for n, at in enumerate(micro.predictor_N) if micro.position_ids_T[at] >= k]
        assert sorted(np.concatenate([row.ahead[k - 1].chosen_n for row in rows])) == far
        for row in rows:
            ahead, own = row.ahead[k - 1], row.index_t
            assert (own[ahead.predictor_n] == micro.predictor_N[ahead.chosen_n] - k).all()
            # Behind the end of all, a number that no sequence has.
            after = np.minimum(own + k, len(numbers))
            is_same = (own >= 0) & (np.append(numbers, -1)[after] == numbers[own])
            assert (ahead.input_ids_t == np.where(is_same, np.append(micro.input_ids_T, 0)[after], 0)).all()


@given(masks, st.sampled_from([1, 2]))
def test_rows_are_filled_up_with_nothing(drawn, multiple):
    rows = rows_of(drawn, max_tokens=8)
    filled = padded(rows, multiple)
    assert filled[: len(rows)] == rows
    assert len(filled) >= 1
    assert len(filled) % multiple == 0
    for empty in filled[len(rows) :]:
        assert empty.gather([np.ones(3, np.float32)]).shape == (0,)


@given(masks, st.integers(1, 4))
def test_replicas_share_all_samples(drawn, replicas):
    sample_masks = [np.array([False, *mask]) for mask in drawn]
    shares = shares_of(sample_masks, replicas, 8)
    assert len(shares) == replicas
    for number, mask in enumerate(sample_masks):
        assert sum(share[number] for share in shares).tolist() == mask.tolist()
        assert sum(bool(share[number].any()) for share in shares) == mask.any()


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(1, 4))
def test_no_replica_has_much_more_to_do_than_the_others(lengths, replicas):
    masks = [np.arange(length + 1) == length for length in lengths]
    costs = [sum(cost_of(mask, 16) for mask in share) for share in shares_of(masks, replicas, 16)]
    # Who has most got its last sample when it had least.
    assert max(costs) <= min(costs) + max(cost_of(mask, 16) for mask in masks)
    assert max(costs) <= sum(costs) / replicas * 4 / 3 + max(cost_of(mask, 16) for mask in masks)


def test_a_long_sample_costs_more_than_its_tokens():
    def mask(tokens):
        return np.arange(tokens + 1) == tokens

    # At 12 widths, looking back costs as much as the matrices.
    assert cost_of(mask(12 * 64), 64) == 2 * 12 * 64
    assert cost_of(mask(1000), 10**9) == pytest.approx(1000)
    assert cost_of(np.zeros(5, bool), 64) == 0
    # By tokens alone, three of the short ones would go to where the long one is.
    shares = shares_of([mask(600), *[mask(100)] * 12], 2, 1)
    assert [sum(bool(mask_.any()) for mask_ in share) for share in shares] == [1, 12]

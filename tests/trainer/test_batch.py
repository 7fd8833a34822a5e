from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.batch import micro_batches
from agentrl.trainer.loss_inputs import loss_inputs
from tests.algorithms.batches import aged
from tests.trainer.tiny import MASKS, batch, sample

masks = st.lists(st.lists(st.integers(0, 1), max_size=9).map(lambda rest: [0, *rest]), min_size=1, max_size=9)


@given(masks, st.integers(1, 40))
def test_rows_predict_each_masked_token_once_from_the_tokens_before_it(sample_masks, max_tokens):
    samples = batch(3, sample_masks).samples
    predicted = set()
    for row in micro_batches(samples, [s.loss_mask for s in samples], max_tokens):
        starts = np.cumsum([0, *row.lengths[:-1]])
        column = 0
        for member, at, start in zip(row.members, row.positions, starts, strict=True):
            for position in at:
                state = row.predictor_N[column]
                prefix = row.input_ids_T[start : state + 1].tolist()
                assert prefix == samples[member].token_ids[:position].tolist()
                assert row.targets_N[column] == samples[member].token_ids[position]
                assert row.temperature_N[column] == samples[member].temperatures[position]
                predicted.add((member, int(position)))
                column += 1
        assert column == len(row.targets_N) == len(row.predictor_N)
        assert row.position_ids_T.tolist() == [p for n in row.lengths for p in range(n)]
        assert len(row.input_ids_T) == sum(row.lengths)
        assert len(row.input_ids_T) <= max_tokens or len(row.members) == 1
    assert predicted == {(i, p) for i, s in enumerate(samples) for p in np.flatnonzero(s.loss_mask)}


def test_nothing_after_the_last_predicted_token_is_computed():
    rng = np.random.default_rng(0)
    samples = [sample(rng, [0, 1, 0, 1, 0, 0, 0]), sample(rng, [0, 0, 0])]
    (row,) = micro_batches(samples, [s.loss_mask for s in samples], 100)
    assert row.members == (0,)
    assert row.lengths == (3,)


def test_gather_follows_the_rows_tokens():
    train_batch = batch(0, MASKS)
    arrays = [np.arange(len(s), dtype=np.float32) + 100 * i for i, s in enumerate(train_batch.samples)]
    for row in micro_batches(train_batch.samples, [s.loss_mask for s in train_batch.samples], 8):
        expected = [100.0 * m + p for m, at in zip(row.members, row.positions, strict=True) for p in at]
        assert row.gather(arrays).tolist() == expected


@pytest.mark.parametrize("version", [None, 9])
def test_a_loss_gets_the_staleness_of_each_of_its_tokens(version):
    train_batch = batch(0, MASKS)
    samples = aged(train_batch.samples, seed=4)
    train_batch = replace(train_batch, samples=tuple(samples), version=version)
    served = max(int(s.versions.max()) for s in samples) if version is None else version
    for row in micro_batches(samples, [s.loss_mask for s in samples], 8):
        places = [(m, p) for m, at in zip(row.members, row.positions, strict=True) for p in at]
        inputs = loss_inputs(row, train_batch, torch.device("cpu"))
        assert inputs.staleness_N.tolist() == [served - int(samples[m].versions[p]) for m, p in places]
        # The other two: the engine's own, and those before the update.
        for field, arrays in (
            (inputs.behaviour_logp_N, [s.logprobs for s in samples]),
            (inputs.proximal_logp_N, train_batch.scores.proximal),
        ):
            assert field.tolist() == [float(arrays[m][p]) for m, p in places]


def test_greedy_samples_are_refused():
    greedy = sample(np.random.default_rng(0), [0, 1], "g", temperature=0.0)
    with pytest.raises(ValueError, match=r"'g'.*temperature 0"):
        micro_batches([greedy], [greedy.loss_mask], 10)

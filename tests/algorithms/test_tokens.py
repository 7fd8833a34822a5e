import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.tokens import Tokens
from tests.algorithms.batches import EpisodeSpec, aged, batch, batches, flat, walk


@given(batches(), st.randoms())
def test_tokens_stand_episode_after_episode_in_the_order_they_were_sampled_in(drawn, random):
    random.shuffle(drawn.samples)
    tokens = Tokens.of(drawn.samples)
    by_episode = walk(drawn.samples)
    assert tokens.rollout_ids == tuple(by_episode)
    assert tokens.turn_N.tolist() == [
        token.turn for episode_tokens in by_episode.values() for token in episode_tokens
    ]
    assert [tokens.rollout_ids[e] for e in tokens.rollout_index_N] == [
        id for id, episode_tokens in by_episode.items() for _ in episode_tokens
    ]
    assert np.diff(tokens.bounds).tolist() == [len(episode_tokens) for episode_tokens in by_episode.values()]
    values = [np.arange(len(s), dtype=np.float32) + 100 * i for i, s in enumerate(drawn.samples)]
    assert tokens.gather(values, "values").tolist() == flat(drawn, values)
    expected = [np.where(s.loss_mask, v, 0).tolist() for s, v in zip(drawn.samples, values, strict=True)]
    assert [a.tolist() for a in tokens.scatter(tokens.gather(values, "values"))] == expected


@given(batches(), st.booleans())
def test_values_by_rollout_are_those_of_its_tokens_or_the_one_that_all_have(drawn, alike):
    tokens = Tokens.of(drawn.samples)
    values_N = tokens.rollout_index_N.astype(float) if alike else np.arange(len(tokens), dtype=float)
    by_rollout = tokens.by_rollout(values_N)
    assert tuple(by_rollout) == tokens.rollout_ids
    for index, values in enumerate(by_rollout.values()):
        own = values_N[tokens.rollout_index_N == index].tolist()
        assert values.dtype == np.float32
        assert values.tolist() == (own[:1] if alike else own)


@given(batches(), st.integers(0, 99), st.sampled_from([None, 9]))
def test_each_token_has_its_own_staleness_and_is_the_newest_of_its_rollout_or_not(drawn, seed, version):
    samples = aged(drawn.samples, seed)
    versions = [int(v) for s in samples for v in s.versions if v >= 0]
    served = max(versions, default=0) if version is None else version
    expected, newest = [], []
    for tokens in walk(samples).values():
        own = [int(samples[t.sample].versions[t.position]) for t in tokens]
        expected += [served - v for v in own]
        newest += [v == max(own) for v in own]
    tokens = Tokens.of(samples, version)
    assert tokens.staleness_N.tolist() == expected
    assert tokens.is_newest().tolist() == newest


def test_no_samples_are_no_tokens():
    tokens = Tokens.of([])
    assert len(tokens) == len(tokens.is_newest()) == 0
    assert tokens.scatter(np.zeros(0)) == ()
    assert tokens.mean(np.zeros(0)) == 0.0


def test_what_is_too_large_for_the_trainer_is_its_largest_number():
    drawn = batch([EpisodeSpec([2])])
    (array,) = Tokens.of(drawn.samples).scatter(np.array([1e300, -1e300]))
    assert array.dtype == np.float32
    assert array.tolist() == [0.0, np.finfo(np.float32).max, np.finfo(np.float32).min]


def test_values_that_are_no_numbers_or_not_of_these_samples_are_refused():
    drawn = batch([EpisodeSpec([2])])
    tokens = Tokens.of(drawn.samples)
    with pytest.raises(ValueError, match="values must be finite"):
        tokens.gather([np.array([0, 1, np.nan], dtype=np.float32)], "values")
    with pytest.raises(ValueError, match="one value for each token"):
        tokens.gather([np.zeros(2, dtype=np.float32)], "values")
    # Off the mask nobody looks.
    assert tokens.gather([np.array([np.nan, 1, 2], dtype=np.float32)], "values").tolist() == [1, 2]

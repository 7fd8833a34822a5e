import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.samples import demonstration, samples_of
from agentrl.types import Author, RolloutId
from tests.algorithms.episodes import episode, turn

ids = st.lists(st.integers(0, 99), max_size=5)
turns = st.lists(st.tuples(ids, ids, st.integers(0, 9)), min_size=1, max_size=5).map(
    lambda parts: [turn([7, *parts[0][0]], parts[0][1]), *(turn(*part) for part in parts[1:])]
)


def test_the_worked_example_of_the_docstring():
    played = episode("e", [turn([5, 6], [7, 8], temperature=0.5), turn([9], [4])])
    (sample,) = samples_of(played)
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert sample.author.tolist() == [0, 0, 1, 1, 0, 1]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.versions.tolist() == [-1, -1, 3, 3, -1, 3]
    assert sample.turns.tolist() == [0, 0, 0, 0, 1, 1]
    assert sample.logprobs.tolist() == pytest.approx([0, 0, -0.7, -0.8, 0, -0.4])
    assert sample.temperatures.tolist() == [1, 1, 0.5, 0.5, 1, 1]
    assert sample.rollout_id == RolloutId("e")


@given(st.lists(turns, min_size=1, max_size=3))
def test_every_token_is_there_once_with_its_author_logprob_and_version(trajectories):
    samples = samples_of(episode("e", *trajectories))

    assert len(samples) == len(trajectories)
    number = 0
    for played, sample in zip(trajectories, samples, strict=True):
        expected = []
        for played_turn in played:
            expected += [(int(i), Author.WORLD, False, 0.0, -1, number) for i in played_turn.tokens.world_ids]
            done = played_turn.tokens.completion
            expected += [
                (int(i), Author.POLICY, True, float(logp), int(version), number)
                for i, logp, version in zip(done.token_ids, done.logprobs, done.versions, strict=True)
            ]
            number += 1
        columns = (
            sample.token_ids,
            sample.author,
            sample.loss_mask,
            sample.logprobs,
            sample.versions,
            sample.turns,
        )
        assert list(zip(*(c.tolist() for c in columns), strict=True)) == expected


def test_an_agent_without_tokens_cannot_be_trained():
    mute = dataclasses.replace(turn([1], [2]), tokens=None)
    with pytest.raises(ValueError, match="without tokens"):
        samples_of(episode("e", [turn([1], [2]), mute]))


def test_an_episode_without_turns_cannot_be_trained():
    with pytest.raises(ValueError, match="no turns"):
        samples_of(episode("e"))


def test_a_policy_never_writes_the_first_token():
    with pytest.raises(ValueError, match="first token"):
        samples_of(episode("e", [turn([], [2])]))


def test_a_demonstration_is_trained_on_exactly_where_it_was_demonstrated():
    sample = demonstration(
        [(Author.WORLD, [1, 2]), (Author.DEMO, [3]), (Author.WORLD, []), (Author.DEMO, [4, 5])],
        RolloutId("d"),
    )
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.author.tolist() == [0, 0, 2, 2, 2]
    assert sample.loss_mask.tolist() == [False, False, True, True, True]
    assert np.all(sample.versions == -1)
    assert np.all(sample.logprobs == 0)
    assert sample.rollout_id == ("d", "agent")


@pytest.mark.parametrize(
    "parts",
    [[(Author.WORLD, [1]), (Author.POLICY, [2])], [(Author.DEMO, [1])]],
    ids=["policy tokens", "starts with a demo token"],
)
def test_what_is_no_demonstration_is_refused(parts):
    with pytest.raises(ValueError, match=r"policy tokens|first token"):
        demonstration(parts, RolloutId("d"))

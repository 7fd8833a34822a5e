import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import RecordError
from agentrl.records import Entry, Outcome, members, read_journal
from agentrl.records.journal import entry_of, to_line
from agentrl.types import Completion, Finish, Limits, Trajectory, Verdict
from tests.records.episodes import TEXT, episodes, journalled, simple_episode


def through_the_journal(episode, verdicts=()):
    """An entry as it is read back from the file that it was written into."""
    with tempfile.TemporaryDirectory() as folder:
        path = journalled(Path(folder), [Entry(episode, verdicts, Outcome.EVALUATED)])
        (entry,) = read_journal(path)
    return entry


def written(episode):
    """The JSON of an episode in the journal's line."""
    with tempfile.TemporaryDirectory() as folder:
        path = journalled(Path(folder), [Entry(episode, (), Outcome.EVALUATED)])
        (line,) = members.read(path)
    return line["episode"]


def assert_same(a, b):
    """Field by field, arrays bit by bit, and of the same types."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
        # NaN may change its payload; a sign of zero may not be lost.
        assert (np.signbit(a) == np.signbit(b))[~np.isnan(a)].all()
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert_same(value, b[key])
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b
        assert getattr(a, "parts", None) == getattr(b, "parts", None)


@given(episodes())
@settings(deadline=None)
def test_an_episode_survives_the_round_trip(episode):
    assert_same(episode, through_the_journal(episode).episode)


@given(
    st.builds(
        Verdict,
        TEXT,
        TEXT,
        st.floats(allow_nan=False, allow_infinity=False),
        st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=2),
        st.lists(st.none() | st.floats(allow_nan=False), max_size=3).map(tuple),
        TEXT,
    )
)
@settings(deadline=None)
def test_a_verdict_survives_the_round_trip(verdict):
    episode = simple_episode(verdict.episode_id)
    assert_same((verdict,), through_the_journal(episode, (verdict,)).verdicts)


def test_every_float32_comes_back_with_at_most_nine_digits():
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
    logprobs = bits.view(np.float32)
    logprobs = logprobs[np.isfinite(logprobs)].copy()
    zeros = np.zeros(len(logprobs), np.int32)
    turn = simple_episode().turns[0]
    tokens = dataclasses.replace(turn.tokens, completion=Completion(zeros, logprobs, zeros, Finish.STOP))
    trajectory = Trajectory((dataclasses.replace(turn, tokens=tokens),))
    episode = dataclasses.replace(simple_episode(), trajectories=(trajectory,))
    digits = written(episode)["trajectories"][0]["turns"][0]["tokens"]["completion"]["logprobs"]
    assert np.array_equal(np.array(digits, np.float32).view(np.uint32), logprobs.view(np.uint32))
    assert all(len(repr(x).split("e")[0].strip("-").replace(".", "").strip("0")) <= 9 for x in digits)


def test_text_and_tokens_are_readable_in_the_line():
    plain = written(simple_episode())
    turn = plain["trajectories"][0]["turns"][0]
    assert turn["observation"] == [{"role": "user", "content": "Where was Torba born?"}]
    assert turn["action"] == {"role": "assistant", "content": "Torek"}
    tokens = turn["tokens"]
    assert tokens["world_ids"] == [1, 2, 3]
    completion = tokens["completion"]
    assert list(completion) == ["token_ids", "logprobs", "versions", "finish", "matched"]
    assert completion["token_ids"] == [5, 6]
    assert completion["versions"] == [3, 3]
    assert (completion["finish"], completion["matched"]) == ("stop", 6)
    assert set(plain["limits"]) == {field.name for field in dataclasses.fields(Limits)}, (
        "all limits are recorded"
    )


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("world_ids",), [1.5], "no list of whole numbers"),
        (("world_ids",), ["1"], "no list of whole numbers"),
        (("world_ids",), [[1], [2]], "no list of whole numbers"),
        (("world_ids",), {"0": 1}, "no list of whole numbers"),
        (("world_ids",), [2**40], "no list of whole numbers"),
        (("completion", "logprobs"), [None, -1.0], "no list of numbers"),
        (("completion", "logprobs"), ["nan", "inf"], "no list of numbers"),
        (("completion", "logprobs"), [10**400, 1], "no list of numbers"),
    ],
)
def test_arrays_of_other_json_are_refused_by_their_field(path, value, sentence):
    row = json.loads(to_line(Entry(simple_episode(), (), Outcome.EVALUATED)))
    *outer, name = ("episode", "trajectories", 0, "turns", 0, "tokens", *path)
    place = row
    for key in outer:
        place = place[key]
    place[name] = value
    with pytest.raises(RecordError, match=f"x line 1 holds no entry of a journal: .*{name}: .*{sentence}"):
        entry_of(row, "x line 1")


@pytest.mark.parametrize(
    "rewards", [[{"parts": {"a": 1.0}}], [{"parts": {}, "total": []}], [{"a": {"parts": {}}}]]
)
def test_rewards_of_other_json_are_refused(rewards):
    row = json.loads(to_line(Entry(simple_episode(), (), Outcome.EVALUATED)))
    row["episode"]["step_rewards"] = rewards
    with pytest.raises(RecordError, match="x line 1 holds no entry of a journal"):
        entry_of(row, "x line 1")

"""Episodes as ATIF: valid by its RFC, and the same journal again, bit for bit."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import RecordError
from agentrl.records import Entry, Outcome, lines
from agentrl.records.journal import to_line
from agentrl.types import Trajectory, Turn, Verdict
from agentrl.view.formats.atif import document_of
from agentrl.view.formats.from_atif import imported_of
from agentrl.view.formats.provenance import Provenance
from tests.records.episodes import TEXT, episodes
from tests.records.test_episode_json import assert_same
from tests.view.formats.atif_schema import check

PLACE = Provenance("eval_x_000000", "run", "policy", 0.0)


def with_ids(episode):
    """The episode with ids of tokens, which are never negative; its arrays may hold any number."""

    def turned(turn: Turn):
        if turn.tokens is None:
            return turn
        tokens, sampled = turn.tokens, turn.tokens.completion
        low = np.int32(2**31 - 1)
        sampled = dataclasses.replace(sampled, token_ids=sampled.token_ids & low)
        tokens = dataclasses.replace(tokens, world_ids=tokens.world_ids & low, completion=sampled)
        return dataclasses.replace(turn, tokens=tokens)

    def of(trajectory: Trajectory):
        return dataclasses.replace(trajectory, turns=tuple(map(turned, trajectory.turns)))

    return dataclasses.replace(episode, trajectories=tuple(map(of, episode.trajectories)))


VERDICTS = st.builds(
    Verdict,
    st.just(""),
    TEXT,
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=2),
    agent=st.sampled_from(("solver", "critic")),
)
ENTRIES = st.builds(
    lambda episode, verdicts: Entry(
        with_ids(episode),
        tuple(dataclasses.replace(verdict, episode_id=episode.id) for verdict in verdicts),
        Outcome.EVALUATED,
        start_version=3,
        advantages={"solver": np.array([0.7, -1e-9], np.float32)},
    ),
    episodes(),
    st.lists(VERDICTS, max_size=2),
)


def written(entry):
    """The document of an entry as a reader gets it: as JSON."""
    return lines.from_line(lines.to_line(document_of(entry, PLACE)))


@given(ENTRIES)
@settings(deadline=None)
def test_every_episode_is_the_same_entry_again(entry):
    found = imported_of(written(entry), "g0-0", "x.jsonl line 1")
    assert found.file == PLACE.key
    assert found.num_bare == 0
    assert_same(entry.episode, found.entry.episode)
    assert to_line(found.entry) == to_line(entry)


@given(ENTRIES)
@settings(deadline=None)
def test_every_episode_is_valid_by_the_rfc(entry):
    check(json.loads(lines.to_line(document_of(entry, PLACE))))


WORDS = st.sampled_from(["", "x", "agentrl", "assistant", "nan", "AAAA", "<i4", "O"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def places_in(value, path=()):
    """The path to everything in some JSON."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from places_in(child, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@given(ENTRIES, st.data())
@settings(deadline=None)
def test_a_document_with_any_other_value_in_it_is_read_or_refused_in_a_sentence(entry, data):
    document = written(entry)
    path = data.draw(st.sampled_from([*places_in(document)]))
    changed = replaced(document, path, data.draw(JSON))
    said = ""
    try:
        assert to_line(imported_of(changed, "g0-0", "x.jsonl line 1").entry)
    except RecordError as error:
        said = str(error)
    assert not said or said.startswith("x.jsonl line 1")

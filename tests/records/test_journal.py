import pytest

from agentrl.records import Entry, Journal, Outcome, find_entries, read_journal, reconcile
from agentrl.types import Ending, Verdict
from tests.records.episodes import simple_episode


def verdict(id, total=1.0):
    return Verdict(id, "exact", total)


def trained(id):
    return Entry(simple_episode(id), (verdict(id),), Outcome.TRAINED)


def dropped(id, reason):
    return Entry(simple_episode(id), (verdict(id),), Outcome.DROPPED, reason)


def failed(id):
    return Entry(simple_episode(id, ending=Ending.FAILED), (), Outcome.DROPPED, "tool_timeout")


async def written(folder, *steps):
    """The files of steps with these entries, from 0 on; the journal is closed."""
    async with Journal(folder) as journal:
        return [await journal.write_step(step, entries) for step, entries in enumerate(steps)]


async def test_entries_are_read_back_in_order(tmp_path):
    async with Journal(tmp_path) as journal:
        path = await journal.write_step(12, [trained("a"), dropped("b", "no signal"), failed("c")])
    assert path == tmp_path / "trajectories" / "step_000012.jsonl.gz"
    entries = list(read_journal(path))
    assert [e.episode.id for e in entries] == ["a", "b", "c"]
    assert [(e.outcome, e.reason) for e in entries] == [
        (Outcome.TRAINED, ""),
        (Outcome.DROPPED, "no signal"),
        (Outcome.DROPPED, "tool_timeout"),
    ]
    assert entries[0].verdict == verdict("a")
    assert entries[2].verdict is None
    assert entries[2].episode.failure.name == "tool_timeout"


async def test_writing_a_step_twice_adds_to_it(tmp_path):
    async with Journal(tmp_path) as journal:
        await journal.write_step(0, [trained("a")])
        path = await journal.write_step(0, [trained("b")])
    assert [e.episode.id for e in read_journal(path)] == ["a", "b"]


async def test_another_journal_goes_on_where_one_ended(tmp_path):
    await written(tmp_path, [trained("a")])
    (path,) = await written(tmp_path, [trained("b")])
    assert [e.episode.id for e in read_journal(path)] == ["a", "b"]


async def test_an_evaluation_has_a_file_of_its_own_whatever_its_name(tmp_path):
    entry = Entry(simple_episode("e0"), (verdict("e0"),), Outcome.EVALUATED)
    async with Journal(tmp_path) as journal:
        path = await journal.write_eval("../held out", 3, [entry])
    assert path == tmp_path / "trajectories" / "eval_..-held-out_000003.jsonl.gz"


async def test_the_counts_add_up(tmp_path):
    async with Journal(tmp_path) as journal:
        await journal.write_step(0, [trained("a"), trained("b"), dropped("c", "no signal")])
        await journal.write_step(1, [trained("d"), dropped("e", "no signal"), failed("f")])
        # Evaluations number their episodes anew each time.
        for step in (0, 1):
            entry = Entry(simple_episode("e0"), (verdict("e0"),), Outcome.EVALUATED)
            await journal.write_eval("test", step, [entry])
    counts = reconcile(tmp_path, played=6)
    assert counts.problems == ()
    assert (counts.played, counts.trained, counts.evaluated) == (6, 3, 2)
    assert counts.dropped == {"no signal": 2, "tool_timeout": 1}
    assert counts.played == counts.trained + sum(counts.dropped.values())


async def test_an_episode_is_read_by_its_id(tmp_path):
    (path,) = await written(tmp_path, [trained("a"), dropped("b", "no signal"), trained("c")])
    (entry,) = find_entries(path, "b")
    assert (entry.episode.id, entry.reason) == ("b", "no signal")
    assert list(find_entries(path, "d")) == []


async def test_a_repeated_episode_is_reported(tmp_path):
    await written(tmp_path, [trained("a"), trained("a")], [trained("a")])
    problems = reconcile(tmp_path).problems
    assert problems[0] == "step_000000.jsonl.gz holds episode a 2 times."
    assert problems[1] == "episode a stands in step_000001.jsonl.gz and in an earlier file."


async def test_a_lost_episode_is_noticed(tmp_path):
    await written(tmp_path, [trained("a")])
    assert reconcile(tmp_path, played=2).problems == ("the run played 2 episodes, its journal holds 1.",)


async def test_an_outcome_in_the_wrong_file_is_reported(tmp_path):
    async with Journal(tmp_path) as journal:
        await journal.write_eval("test", 0, [trained("a")])
    assert "wrong outcome" in reconcile(tmp_path).problems[0]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Entry(simple_episode("a"), (verdict("b"),), Outcome.TRAINED), "do not belong"),
        (lambda: Entry(simple_episode("a"), (verdict("a"),), Outcome.DROPPED), "a reason belongs"),
        (lambda: Entry(simple_episode("a"), (verdict("a"),), Outcome.TRAINED, "x"), "a reason belongs"),
        (lambda: Entry(simple_episode("a"), (), Outcome.TRAINED), "cannot be trained on"),
        (
            lambda: Entry(simple_episode("a", ending=Ending.FAILED), (verdict("a"),), Outcome.TRAINED),
            "cannot be trained on",
        ),
        (lambda: Entry(simple_episode("a"), (), Outcome.RECORDED), "cannot be trained on"),
        (lambda: Entry(simple_episode("a"), (verdict("a"),), Outcome.TRAINED, in_batch=False), "in no batch"),
    ],
)
def test_an_inconsistent_entry_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()

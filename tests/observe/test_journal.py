import os
import signal
import subprocess
import sys

import pytest

from agentrl.observe import Entry, Journal, Outcome, read_journal, reconcile
from agentrl.types import Ending, Verdict
from tests.observe.episodes import simple_episode


def verdict(id, total=1.0):
    return Verdict(id, "exact", total)


def trained(id):
    return Entry(simple_episode(id), (verdict(id),), Outcome.TRAINED)


def dropped(id, reason):
    return Entry(simple_episode(id), (verdict(id),), Outcome.DROPPED, reason)


def failed(id):
    return Entry(simple_episode(id, ending=Ending.FAILED), (), Outcome.DROPPED, "tool_timeout")


def test_entries_are_read_back_in_order(tmp_path):
    journal = Journal(tmp_path)
    path = journal.write_step(12, [trained("a"), dropped("b", "no signal"), failed("c")])
    assert path == tmp_path / "trajectories" / "step_000012.jsonl"
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


def test_writing_a_step_twice_adds_to_it(tmp_path):
    journal = Journal(tmp_path)
    journal.write_step(0, [trained("a")])
    path = journal.write_step(0, [trained("b")])
    assert [e.episode.id for e in read_journal(path)] == ["a", "b"]


def test_an_evaluation_has_a_file_of_its_own_whatever_its_name(tmp_path):
    entry = Entry(simple_episode("e0"), (verdict("e0"),), Outcome.EVALUATED)
    path = Journal(tmp_path).write_eval("../held out", 3, [entry])
    assert path == tmp_path / "trajectories" / "eval_..-held-out_000003.jsonl"


def test_the_books_balance(tmp_path):
    journal = Journal(tmp_path)
    journal.write_step(0, [trained("a"), trained("b"), dropped("c", "no signal")])
    journal.write_step(1, [trained("d"), dropped("e", "no signal"), failed("f")])
    # Evaluations number their episodes anew each time.
    for step in (0, 1):
        journal.write_eval("test", step, [Entry(simple_episode("e0"), (verdict("e0"),), Outcome.EVALUATED)])
    books = reconcile(tmp_path, played=6)
    assert books.problems == ()
    assert (books.played, books.trained, books.evaluated) == (6, 3, 2)
    assert books.dropped == {"no signal": 2, "tool_timeout": 1}
    assert books.played == books.trained + sum(books.dropped.values())


def test_an_episode_that_stands_twice_is_named(tmp_path):
    journal = Journal(tmp_path)
    journal.write_step(0, [trained("a"), trained("a")])
    journal.write_step(1, [trained("a")])
    problems = reconcile(tmp_path).problems
    assert problems[0] == "step_000000.jsonl holds episode a 2 times."
    assert problems[1] == "episode a stands in step_000001.jsonl and in an earlier file."


def test_a_lost_episode_is_noticed(tmp_path):
    Journal(tmp_path).write_step(0, [trained("a")])
    assert reconcile(tmp_path, played=2).problems == ("the run played 2 episodes, its journal holds 1.",)


def test_an_outcome_in_the_wrong_file_is_named(tmp_path):
    Journal(tmp_path).write_eval("test", 0, [trained("a")])
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
    ],
)
def test_a_lie_is_refused_at_birth(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


WRITER = """
import sys, pathlib, signal
# A process started in the background inherits that SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from agentrl.observe import Entry, Journal, Outcome
from tests.observe.episodes import simple_episode
from agentrl.types import Verdict
journal = Journal(pathlib.Path(sys.argv[1]))
step = 0
while True:
    ids = [f"g{step}-{k}" for k in range(50)]
    entries = [Entry(simple_episode(i), (Verdict(i, "x", 1.0),), Outcome.TRAINED) for i in ids]
    journal.write_step(step % 3, entries)
    step += 1
    if step == 3: print("ready", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_whole_lines(tmp_path, how):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as writer:
        assert writer.stdout.readline() == b"ready\n"
        writer.send_signal(how)
    books = reconcile(tmp_path)
    assert books.problems == ()
    assert books.trained == books.played >= 150
    for path in (tmp_path / "trajectories").iterdir():
        assert all(entry.outcome is Outcome.TRAINED for entry in read_journal(path))
        assert how is signal.SIGKILL or path.read_bytes().endswith(b"\n")

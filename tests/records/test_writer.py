"""The journal's thread: what it is given is on disk, in order and once, whatever interrupts it."""

import asyncio
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from agentrl.errors import UserError
from agentrl.records import Entry, Journal, Outcome, members, read_journal, reconcile
from agentrl.run.stages import LagMeter
from agentrl.types import Completion, Finish, Trajectory, TurnTokens, Verdict
from tests.records.episodes import simple_episode


def trained(id, episode=None):
    return Entry(episode or simple_episode(id), (Verdict(id, "x", 1.0),), Outcome.TRAINED)


def large(id, tokens):
    """An episode of so many tokens that no compression helps with."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, tokens).astype(np.int32)
    completion = Completion(ids, rng.normal(-1, 1, tokens).astype(np.float32), ids * 0, Finish.STOP)
    (turn,) = simple_episode().turns
    turn = dataclasses.replace(turn, tokens=TurnTokens(np.zeros(2, np.int32), completion))
    return dataclasses.replace(simple_episode(id), trajectories=(Trajectory((turn,)),))


def ids_of(path):
    return [entry.episode.id for entry in read_journal(path)]


class SlowDisk:
    """An iterable of entries whose serialisation waits: the thread is kept while `open` is not set."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        append = members.append

        def waiting(path, lines, *, at):
            self.open.wait(10)
            return append(path, lines, at=at)

        monkeypatch.setattr("agentrl.records.writer.members.append", waiting)


async def test_writing_returns_at_once_and_flush_waits_until_all_is_on_disk(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    journal = Journal(tmp_path)
    async with asyncio.timeout(5):
        paths = [await journal.write_step(step, [trained(f"g{step}")]) for step in range(3)]
    assert not any(path.exists() for path in paths)
    flushing = asyncio.create_task(journal.flush())
    await asyncio.sleep(0.05)
    assert not flushing.done()
    disk.open.set()
    await flushing
    assert [ids_of(path) for path in paths] == [["g0"], ["g1"], ["g2"]]
    await journal.close()


async def test_a_slow_disk_holds_the_writer_back_and_not_the_loop(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    journal = Journal(tmp_path, max_pending_bytes=100)
    writing = asyncio.create_task(journal.write_step(0, [trained(f"g{n}") for n in range(50)]))
    async with LagMeter() as lag:
        await asyncio.sleep(0.1)
        assert not writing.done()
        assert lag.take() < 0.05
    disk.open.set()
    path = await writing
    await journal.close()
    assert len(ids_of(path)) == 50


async def test_who_is_cancelled_while_waiting_for_the_disk_has_lost_nothing(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    journal = Journal(tmp_path, max_pending_bytes=0)
    entries = [trained(f"g{n}", large(f"g{n}", 100_000)) for n in range(4)]
    writing = asyncio.create_task(journal.write_step(0, entries))
    await asyncio.sleep(0.05)
    writing.cancel()
    await asyncio.wait([writing])
    disk.open.set()
    await journal.close()
    (path,) = (tmp_path / "trajectories").iterdir()
    assert ids_of(path) == ["g0", "g1", "g2", "g3"]


async def test_several_tasks_may_write_at_a_time(tmp_path):
    async with Journal(tmp_path, max_pending_bytes=1000) as journal:
        await asyncio.gather(
            *(
                journal.write_step(step % 2, [trained(f"g{step}-{k}") for k in range(20)])
                for step in range(20)
            )
        )
    books = reconcile(tmp_path, played=400)
    assert books.problems == ()


async def test_the_loop_goes_on_while_a_large_episode_is_written(tmp_path):
    entry = trained("g0", large("g0", 1_000_000))
    visits = 0
    async with Journal(tmp_path) as journal:
        path = await journal.write_step(0, [entry])
        writing = asyncio.create_task(journal.flush())
        while not writing.done():
            visits += 1
            await asyncio.sleep(0.001)
    assert ids_of(path) == ["g0"]
    # Made in one piece, it would leave room for one or two.
    assert visits > 5


FULL = """
import asyncio, pathlib, resource, signal, sys
from agentrl.errors import UserError
from agentrl.records import Journal
from tests.records.test_writer import large, trained
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
async def main():
    journal = Journal(pathlib.Path(sys.argv[1]))
    for step in range(3):
        ids = [f"g{step}-{k}" for k in range(3)]
        await journal.write_step(0, [trained(id, large(id, 100_000)) for id in ids])
        try:
            await journal.flush()
            print(f"whole g{step}", flush=True)
        except UserError as error:
            print(error, flush=True)
            break
    try:
        await journal.write_step(9, [trained("later")])
    except UserError as error:
        print(error, flush=True)
    try:
        await journal.close()
    except UserError as error:
        print("close:", error, flush=True)
asyncio.run(main())
"""


@pytest.mark.full
def test_a_full_disk_is_one_sentence_and_what_was_whole_stays_whole(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), "4000000"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=True,
    )
    said = done.stdout.splitlines()
    path = tmp_path / "trajectories" / "step_000000.jsonl.gz"
    assert said[0] == "whole g0"
    kept = ids_of(path)
    lost = 6 - len(kept)
    assert said[1:] == [
        f"{path} cannot be written (File too large); make room, or choose another output_dir. "
        f"{lost} episodes are not in the journal.",
        f"{path} cannot be written (File too large); make room, or choose another output_dir. "
        f"{lost + 1} episodes are not in the journal.",
        f"close: {path} cannot be written (File too large); make room, or choose another output_dir. "
        f"{lost + 1} episodes are not in the journal.",
    ]
    assert kept == [f"g{n // 3}-{n % 3}" for n in range(len(kept))]
    assert path.stat().st_size == members.end_of_members(path)


async def test_an_incomplete_member_is_removed_before_the_next_is_written(tmp_path):
    async with Journal(tmp_path) as journal:
        path = await journal.write_step(0, [trained("a")])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])
    async with Journal(tmp_path) as journal:
        await journal.write_step(0, [trained("b")])
    assert ids_of(path) == ["a", "b"]


async def test_a_file_that_is_broken_in_the_middle_is_not_written_over(tmp_path):
    async with Journal(tmp_path) as journal:
        path = await journal.write_step(0, [trained("a")])
    broken = path.read_bytes() + b"no gzip, and none of ours"
    path.write_bytes(broken)
    with pytest.raises(UserError, match=r"is broken from byte .*1 episodes are not in the journal"):
        async with Journal(tmp_path) as journal:
            await journal.write_step(0, [trained("b")])
    assert path.read_bytes() == broken


ENDLESS = """
import asyncio, pathlib, signal, sys
# A process started in the background inherits that SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from agentrl.records import Journal
from tests.records.test_writer import large, trained
async def main():
    number = 0
    async with Journal(pathlib.Path(sys.argv[1]), max_pending_bytes=1 << 22) as journal:
        while True:
            entries = [trained(f"g{n}", large(f"g{n}", 1000)) for n in range(number, number + 40)]
            await journal.write_step(number // 400, entries)
            number += 40
            if number == 80:
                await journal.flush()
                print("ready", flush=True)
asyncio.run(main())
"""


def interrupted(folder, how, after_s):
    """The ids that are read back from a journal whose writer got a signal, in the order of the files."""
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as writer:
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(after_s)
        writer.send_signal(how)
    assert reconcile(folder).problems == ()
    return [id for path in sorted((folder / "trajectories").iterdir()) for id in ids_of(path)]


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGKILL])
def test_what_an_interrupted_writer_leaves_is_a_prefix_of_whole_entries(tmp_path, how):
    found = interrupted(tmp_path, how, 0.1)
    assert len(found) >= 80
    assert found == [f"g{n}" for n in range(len(found))]
    if how is signal.SIGINT:
        assert len(found) % 40 == 0, "what was handed over is written before the process ends"


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(30))
def test_killed_at_any_moment_it_leaves_a_prefix_and_goes_on_from_it(tmp_path, seed):
    found = interrupted(tmp_path, signal.SIGKILL, random.Random(seed).uniform(0, 0.6))
    assert len(found) >= 80
    assert found == [f"g{n}" for n in range(len(found))]
    last = max((tmp_path / "trajectories").iterdir())

    async def go_on():
        async with Journal(tmp_path) as journal:
            await journal.write_step(int(last.name[5:11]), [trained("next")])

    before = ids_of(last)
    asyncio.run(go_on())
    assert ids_of(last) == [*before, "next"]
    assert members.end_of_members(last) == last.stat().st_size

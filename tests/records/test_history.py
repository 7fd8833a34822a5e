"""One process at a time writes into a folder: a second is refused at once, a dead one blocks none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, RunBusyError
from agentrl.records.history import LOCK, check_unlocked, is_locked, locked

ROOT = Path(__file__).parents[2]
HOLDER = """
import pathlib, subprocess, sys
from agentrl.records.history import locked
with locked(pathlib.Path(sys.argv[1])):
    # It inherits what is not closed on exec.
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def contents(folder):
    """Every file with its bytes and its time."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_second_process_is_refused_and_has_written_nothing(tmp_path):
    with locked(tmp_path):
        before = contents(tmp_path)
        for refuse in (check_unlocked, lambda folder: locked(folder).__enter__()):
            with pytest.raises(RunBusyError, match=rf"works on {tmp_path} \(process {os.getpid()}\); wait"):
                refuse(tmp_path)
        assert contents(tmp_path) == before
    with locked(tmp_path):
        pass


def test_a_killed_process_blocks_nobody_also_where_its_child_lives_on(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        child = int(holder.stdout.readline())
        try:
            assert is_locked(tmp_path)
            with pytest.raises(RunBusyError, match=rf"\(process {holder.pid}\)"):
                check_unlocked(tmp_path)
            holder.kill()
            holder.wait()
            os.kill(child, 0)
            assert not is_locked(tmp_path)
            with locked(tmp_path):
                assert (tmp_path / LOCK).read_text() == str(os.getpid())
        finally:
            os.kill(child, signal.SIGKILL)


def test_who_only_reads_the_lock_never_makes_a_process_fail(tmp_path):
    """`agentrl runs list` looks at every folder."""
    done = threading.Event()

    def read():
        while not done.is_set():
            is_locked(tmp_path)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(200):
            with locked(tmp_path):
                assert is_locked(tmp_path)
    finally:
        done.set()
        reader.join()


def test_a_folder_that_was_removed_in_between_is_made_again(tmp_path):
    folder = tmp_path / "x"
    with locked(folder):
        (folder / LOCK).unlink()
        with locked(folder):
            assert is_locked(folder)
    assert not is_locked(folder)


def test_reading_the_lock_makes_no_file(tmp_path):
    assert not is_locked(tmp_path)
    assert not is_locked(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    sentence = r"file/below cannot be made or written \(Not a directory\); choose another output_dir\."
    with pytest.raises(ConfigError, match=sentence), locked(tmp_path / "file" / "below"):
        pass

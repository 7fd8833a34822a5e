"""Shared memory that gets a name for a while."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from agentrl.weights import shared
from agentrl.weights.shared import SHARED, SharedBuffer


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        yield Path(folder)


def test_memory_gets_the_name_of_a_file_and_is_the_same_memory(folder):
    buffer, path = SharedBuffer(10_000), folder / "bucket"
    path.write_bytes(b"before")
    assert buffer.link(path)
    buffer.bytes_B.numpy()[:] = 7
    assert path.read_bytes() == b"\7" * 10_000
    assert [file.name for file in folder.iterdir()] == ["bucket"]
    assert path.stat().st_mode & 0o077 == 0
    with path.open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Without the name it goes on as before, but gets no other one.
    path.unlink()
    assert buffer.bytes_B.tolist() == [7] * 10_000
    assert not buffer.link(folder / "again")
    assert buffer.was_linked
    assert [*folder.iterdir()] == []


def test_memory_without_a_place_in_that_folder_gets_no_name(tmp_path, folder, monkeypatch):
    path = tmp_path / "bucket"
    path.write_bytes(b"before")
    if os.stat(SHARED).st_dev != os.stat(tmp_path).st_dev:
        assert not SharedBuffer(10).link(path)
    monkeypatch.setattr(shared, "_ROOM_BYTES", 1 << 60)
    full = SharedBuffer(10)
    assert "memfd:" in os.readlink(f"/proc/self/fd/{full.descriptor}")
    assert not full.link(path)
    assert not full.link(folder / "bucket")
    assert path.read_bytes() == b"before"
    assert [*tmp_path.iterdir(), *folder.iterdir()] == [path]
    full.bytes_B.numpy()[:] = np.arange(10)
    assert full.bytes_B.tolist() == list(range(10))


def test_memory_and_its_descriptor_go_with_the_buffer():
    free = os.statvfs(SHARED).f_bfree
    buffer = SharedBuffer(64 << 20)
    assert os.statvfs(SHARED).f_bfree < free - (32 << 20) // os.statvfs(SHARED).f_frsize
    descriptor = buffer.descriptor
    del buffer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert os.statvfs(SHARED).f_bfree > free - (32 << 20) // os.statvfs(SHARED).f_frsize

"""A file is written whole or not at all; a disk that refuses is one error of its own, and no other is."""

from __future__ import annotations

import errno
import socket

import pytest

from agentrl.errors import DiskError
from agentrl.runtime.files import compiler_caches, disk_errors, private_cache, write_text
from tests.disks import file_size_limit


def test_a_file_that_does_not_fit_leaves_what_was_there(tmp_path):
    path = tmp_path / "config.toml"
    write_text(path, "old")
    with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
        write_text(path, "x" * 5000)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["config.toml"]
    write_text(path, "new")
    assert path.read_text() == "new"


def test_half_of_a_surrogate_pair_is_refused_or_replaced(tmp_path):
    path = tmp_path / "report.html"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "a\ud800b")
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("report.html", "old")]
    write_text(path, "a\ud800b", errors="replace")
    assert path.read_bytes() == b"a?b"


def test_a_full_disk_names_the_folder_and_the_remedy(tmp_path):
    sentence = rf"{tmp_path} cannot be written \(No space left on device\); make room there\."
    with (
        pytest.raises(DiskError, match=sentence),
        disk_errors(tmp_path, "make room there"),
        open("/dev/full", "w") as full,
    ):
        full.write("x" * 10_000)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_missing_permission_is_one_of_the_disk_only_below_the_folder(tmp_path, number):
    file = str(tmp_path / "runs" / "x")
    with pytest.raises(DiskError, match=f"{file} cannot be written"), disk_errors(tmp_path, "mend it"):
        raise OSError(number, "no", file)
    with pytest.raises(OSError, match="elsewhere"), disk_errors(tmp_path, "mend it"):
        raise OSError(number, "no", "elsewhere")


def test_an_error_of_a_connection_passes_through(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionRefusedError), disk_errors(tmp_path, "mend it"):
        socket.create_connection(("127.0.0.1", port))


def test_a_cache_is_this_users_alone_or_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = private_cache("triton")
    assert folder == tmp_path / "cache/agentrl/triton"
    folder.chmod(0o777)
    assert private_cache("triton") == folder
    assert folder.stat().st_mode & 0o077 == 0
    # A link leads to a folder that somebody else may write to.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache/agentrl/inductor").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "cache/agentrl/tvm-ffi").write_text("")
    assert private_cache("inductor") is None
    assert private_cache("tvm-ffi") is None
    assert compiler_caches({}) == {"TRITON_CACHE_DIR": str(folder)}
    assert compiler_caches({"TRITON_CACHE_DIR": "mine"}) == {}


def test_without_a_home_nothing_is_kept(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiler_caches({}) == {}

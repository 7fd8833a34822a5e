"""Files of others: links lead nowhere, pipes hold nobody up, no folder of another user is written into."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, RecordError
from agentrl.records import lines, members
from agentrl.records.history import LOCK, is_locked, locked
from agentrl.runtime import ownership
from agentrl.runtime.ownership import (
    check_own,
    is_signed,
    open_file,
    read_file,
    read_gzip,
    sign,
    write_signed,
)

ROOT = Path(__file__).parents[2]
NOBODY = 65534
# Only root can give a folder away, and act as another user.
as_root = pytest.mark.parametrize("user", [NOBODY] if os.geteuid() == 0 else [])


AS_OTHER = """
import fcntl, os, sys
from pathlib import Path
from agentrl.records.history import is_locked
folder, user = Path(sys.argv[1]), int(sys.argv[2])
os.setgroups([]); os.setgid(user); os.setuid(user)
try:
    held = fcntl.flock(open(folder / "run.lock"), fcntl.LOCK_SH | fcntl.LOCK_NB) is None
except PermissionError:
    held = False
print(held, is_locked(folder))
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with one file in a folder, beside a file of the user's."""
    place = tmp_path / "run"
    (place / "inner").mkdir(parents=True)
    (place / "inner/file").write_text("in it")
    (tmp_path / "mine").write_text("mine")
    return place


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_file_is_read_through_a_link_to_the_folder_and_through_none_below_it(folder, tmp_path):
    (tmp_path / "latest").symlink_to(folder)
    latest = tmp_path / "latest"
    assert read_file(latest / "inner/file", below=latest) == b"in it"
    (folder / "link").symlink_to(folder / "inner/file")
    (folder / "other").symlink_to(folder / "inner")
    (folder / "gone").symlink_to(folder / "nothing")
    for name in ("link", "other/file", "gone", "inner/../link"):
        with pytest.raises(RecordError, match="is a link, or in a folder that is one"):
            open_file(folder / name, below=folder)
    with pytest.raises(FileNotFoundError):
        open_file(folder / "nothing", below=folder)


def test_a_pipe_a_folder_and_a_device_are_no_files_and_hold_nobody_up(folder):
    os.mkfifo(folder / "pipe")
    for name in ("pipe", "inner"):
        with pytest.raises(RecordError, match=f"{folder / name} is no file"):
            open_file(folder / name)
    with pytest.raises(RecordError, match="is no file"):
        open_file(Path("/dev/null"))


def test_a_file_of_any_size_is_not_read_whole(folder):
    os.truncate(folder / "inner/file", 65 << 20)
    with pytest.raises(RecordError, match="has more than 67,108,864 bytes"):
        read_file(folder / "inner/file")


def test_a_packed_file_is_unpacked_as_far_as_it_may_be(folder):
    (folder / "x.gz").write_bytes(gzip.compress(b"x" * 1000))
    assert read_gzip(folder / "x.gz", most=1000) == b"x" * 1000
    with pytest.raises(RecordError, match="unpacks to more than 999 bytes"):
        read_gzip(folder / "x.gz", most=999)
    for broken in (b"x", gzip.compress(b"x" * 1000)[:-9], gzip.compress(b"x" * 100)[:12] + b"\xff" * 20):
        (folder / "x.gz").write_bytes(broken)
        with pytest.raises(RecordError, match="is damaged"):
            read_gzip(folder / "x.gz", most=1000)


def test_a_folder_of_this_user_is_accepted_with_links_within_it(folder):
    (folder / "best").symlink_to("inner")
    for name in ("wandb", "ray"):
        (folder / name).mkdir()
    # Written by others, with links of theirs.
    (folder / "wandb/debug.log").symlink_to("/tmp/debug.log")
    (folder / "ray/logs").symlink_to("/tmp/gone")
    check_own(folder)
    check_own(folder / "not made yet")


def test_what_leads_out_of_a_folder_is_refused(folder, tmp_path):
    for name, target in (("inner/x", "/etc/passwd"), ("up", "../mine"), ("wandb", "/tmp"), ("ray", "/tmp")):
        (folder / name).symlink_to(target)
        with pytest.raises(
            ConfigError, match=rf"{folder / name} is a link that leads out of {folder}, to {target};"
        ):
            check_own(folder)
        (folder / name).unlink()
    os.mkfifo(folder / "inner/pipe")
    with pytest.raises(ConfigError, match="inner/pipe is neither a file nor a folder; remove it"):
        check_own(folder)


def test_what_all_users_can_write_is_refused(folder):
    for name in ("inner", "inner/file"):
        mode = stat.S_IMODE((folder / name).stat().st_mode)
        (folder / name).chmod(mode | stat.S_IWOTH)
        with pytest.raises(ConfigError, match=rf"all users can write to {folder / name}; run `chmod -R o-w"):
            check_own(folder)
        (folder / name).chmod(mode)
    check_own(folder)


@as_root
def test_what_another_user_owns_is_refused(folder, user):
    for name in (".", "inner", "inner/file"):
        os.chown(folder / name, user, user)
        with pytest.raises(ConfigError, match="belongs to nobody, another user; name another one"):
            check_own(folder, remedy="name another one")
        os.chown(folder / name, 0, 0)
    check_own(folder)


@as_root
def test_where_a_server_gives_files_another_owner_that_one_counts(folder, user, monkeypatch):
    """As NFS does to files of root."""
    for name in (".", "inner", "inner/file"):
        os.chown(folder / name, user, user)
    made = os.stat_result((stat.S_IFREG | 0o600, 0, 0, 1, user, user, 0, 0, 0, 0))
    monkeypatch.setattr(ownership, "_made", lambda _: made)
    check_own(folder)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (LOCK, lambda path: locked(path.parent).__enter__()),
        ("attempts.jsonl", lambda path: lines.append(path, [b"{}\n"])),
        ("x.jsonl.gz", lambda path: members.append(path, [b"{}\n"], at=0)),
    ],
)
def test_no_file_is_written_through_a_link(folder, tmp_path, name, write):
    (folder / name).symlink_to(tmp_path / "mine")
    with pytest.raises((ConfigError, OSError)):
        write(folder / name)
    assert (tmp_path / "mine").read_text() == "mine"


@as_root
def test_another_user_cannot_hold_the_lock_of_a_run_and_sees_that_it_runs(user):
    # The folders of pytest are closed to others.
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        # One that an earlier version made.
        (folder / LOCK).write_text("")
        (folder / LOCK).chmod(0o644)
        command = [sys.executable, "-c", AS_OTHER, str(folder), str(user)]
        as_other = partial(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=True)
        with locked(folder):
            assert is_locked(folder)
            assert as_other().stdout == "False True\n"
        assert as_other().stdout == "False False\n"


def test_only_what_this_user_wrote_is_signed(state, tmp_path):
    path = tmp_path / "config.toml"
    write_signed(path, "[run]\nname = 'x'\n")
    data = path.read_bytes()
    assert data.endswith(b"[run]\nname = 'x'\n")
    assert is_signed(data)
    # Of another user, whose key is another one.
    shutil.rmtree(state)
    assert not is_signed(data)
    write_signed(path, "[run]\nname = 'x'\n")
    assert is_signed(path.read_bytes())
    assert path.read_bytes() != data
    key = state / "agentrl/keys/runs"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    for changed in (
        b"",
        b"\n",
        path.read_bytes() + b"\n",
        path.read_bytes().replace(b"'x'", b"'y'"),
        b"[run]\n",
    ):
        assert not is_signed(changed)
    path.write_bytes(path.read_bytes().replace(b"'x'", b"'y'"))
    sign(path)
    assert is_signed(path.read_bytes())
    assert path.read_text().count("#") == 1


def test_processes_that_begin_at_once_have_one_key(state):
    program = "from agentrl.runtime.ownership import _key; print(_key().hex())"
    start = [sys.executable, "-c", program]
    started = [subprocess.Popen(start, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    keys = {process.communicate()[0] for process in started}
    assert len(keys) == 1
    assert len(json.dumps([*keys])) > 64


def test_without_a_place_for_the_key_nothing_is_signed_and_that_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    write_signed(tmp_path / "config.toml", "x = 1\n")
    assert (tmp_path / "config.toml").read_text() == "x = 1\n"
    assert not is_signed(b"x = 1\n")
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME to one that is yours"):
        sign(tmp_path / "config.toml")

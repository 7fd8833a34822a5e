"""Temporary folders and files: none stays, however its process ended, and none of another is touched."""

from __future__ import annotations

import ast
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import agentrl
from agentrl.runtime.temporary import LOCK, PREFIX, sweep, temporary_file, temporary_folder

NOBODY = 65534
WAIT_S = 300.0
ROOT = Path(agentrl.__file__).parent
# The module alone: the package imports what takes seconds.
ALONE = f"""
import sys
from pathlib import Path
from types import ModuleType
sys.modules["agentrl"] = ModuleType("agentrl")
sys.modules["agentrl"].__path__ = [{str(ROOT)!r}]
"""
HOLDER = (
    ALONE
    + """
from agentrl.runtime.interrupts import exits_on_signals
from agentrl.runtime.temporary import temporary_file, temporary_folder
base = Path(sys.argv[1])
with (
    exits_on_signals(),
    temporary_folder("held", base=base, kept_with="episodes") as folder,
    temporary_file("agentrl-file-", base) as file,
):
    (folder / "inner").mkdir()
    (folder / "inner" / "x").write_text("x")
    for name in sys.argv[2:]:
        (folder / name).write_text("paid for")
    print(folder, file, flush=True)
    sys.stdin.read()
"""
)


@pytest.fixture
def base(tmp_path):
    """A folder that all users share, as /tmp is."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


def held(base, *names):
    """A process with a folder and a file; and both."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(base), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    folder, file = process.stdout.readline().split()
    return process, Path(folder), Path(file)


def ended(process, how):
    if how == "the end":
        process.stdin.close()
    else:
        process.send_signal(how)
    return process.wait(WAIT_S)


def another(base):
    """What another process does that makes a folder."""
    program = (
        "from agentrl.runtime.temporary import *\nwith temporary_folder('x', base=Path(sys.argv[1])): pass"
    )
    subprocess.run([sys.executable, "-c", ALONE + program, str(base)], check=True, timeout=WAIT_S)


@pytest.mark.parametrize("how", ["the end", signal.SIGINT, signal.SIGTERM])
def test_a_process_that_ends_in_order_leaves_nothing(base, how):
    process, folder, file = held(base)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ended(process, how)
    assert list(base.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_start_and_what_a_living_one_has_stays(base):
    killed, living = held(base), held(base)
    ended(killed[0], signal.SIGKILL)
    assert all(path.exists() for path in (*killed[1:], *living[1:]))
    another(base)
    assert sorted(base.iterdir()) == sorted(living[1:])
    ended(living[0], "the end")
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_folder_that_holds_what_keeps_it_stays_where_it_was_broken_off(base, how):
    process, folder, _ = held(base, "episodes")
    ended(process, how)
    another(base)
    assert (folder / "episodes").read_text() == "paid for"
    assert sweep(base, PREFIX) == ([folder] if how is signal.SIGKILL else [])
    (folder / "episodes").unlink()
    sweep(base, PREFIX)
    assert list(base.iterdir()) == ([] if how is signal.SIGKILL else [folder])


def test_a_folder_that_holds_what_keeps_it_goes_where_its_block_ends(base):
    process, _, _ = held(base, "episodes")
    ended(process, "the end")
    assert list(base.iterdir()) == []


def test_a_child_that_outlives_its_parent_keeps_the_folder(base):
    """It may use it: a fork has the lock of its parent."""
    program = (
        f"{ALONE}import os, time; from agentrl.runtime.temporary import *\n"
        "with temporary_folder('x', base=Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if not child: time.sleep(600)\n"
        "    print(child, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(base)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    ended(process, signal.SIGKILL)
    assert sweep(base, PREFIX) == []
    assert len(list(base.iterdir())) == 1
    descriptor = os.pidfd_open(child)
    os.kill(child, signal.SIGKILL)
    # Ready when the process has ended.
    assert select.select([descriptor], [], [], WAIT_S)[0]
    os.close(descriptor)
    sweep(base, PREFIX)
    assert list(base.iterdir()) == []


def test_folders_that_cannot_be_written_and_links_in_them_are_no_hindrance(base, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    with temporary_folder("x", base=base) as folder:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "link").symlink_to(victim)
        (folder / "link").symlink_to(victim)
        (folder / "a" / "b").chmod(0o500)
        (folder / "a").chmod(0)
    assert list(base.iterdir()) == []
    assert (victim / "kept").exists()
    with temporary_folder("x", base=base) as folder:
        shutil.rmtree(folder)
    assert list(base.iterdir()) == []


def planted(base, victim):
    """What another user might put there, and what is this user's own but of no process that was killed."""
    os.mkfifo(base / "agentrl-weights-pipe", 0o666)
    os.mkfifo(base / "agentrl-check-pipe", 0o666)
    (base / "agentrl-eval-link").symlink_to(victim)
    (base / "agentrl-weights-link").symlink_to(victim / "kept")
    (base / "agentrl-ray-loop").symlink_to(base / "agentrl-ray-loop")
    # An open folder that leads to the victim's lock, and one whose lock is a pipe.
    (base / "agentrl-check-open").mkdir()
    (base / "agentrl-check-open" / LOCK).write_text("")
    (base / "agentrl-check-open").chmod(0o777)
    for name in ("lock-is-a-pipe", "lock-is-a-link", "without-a-lock"):
        (base / f"agentrl-check-{name}").mkdir(mode=0o700)
    os.mkfifo(base / "agentrl-check-lock-is-a-pipe" / LOCK)
    (base / "agentrl-check-lock-is-a-link" / LOCK).symlink_to(victim / LOCK)
    (base / "agentrlish").mkdir(mode=0o700)
    (base / "agentrlish" / LOCK).write_text("")


SWEEP = f"{ALONE}from agentrl.runtime.temporary import *\nprint(sweep(Path(sys.argv[1]), 'agentrl-'))"


def swept(base):
    """By a process of its own, which a pipe would hold up for ever."""
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, str(base)], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert done.stdout == "[]\n"


def test_pipes_links_and_open_folders_neither_block_nor_are_followed(base, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    for name in ("kept", LOCK):
        (victim / name).write_text("")
    planted(base, victim)
    before = sorted(base.rglob("*"))
    swept(base)
    another(base)
    assert sorted(base.rglob("*")) == before
    assert sorted(path.name for path in victim.iterdir()) == sorted(["kept", LOCK])


@pytest.mark.parametrize("owner", [NOBODY] if os.geteuid() == 0 else [])
def test_what_another_user_has_there_stays_and_is_not_opened(base, owner):
    """Only root can give files away; root could remove them, too."""
    with temporary_folder("x", base=base) as folder, temporary_file(PREFIX, base) as file:
        pass
    for path in (folder, file):
        path.touch() if path is file else path.mkdir(mode=0o700)
    (folder / LOCK).touch()
    for path in (folder, folder / LOCK, file):
        path.chmod(0o600 if path.is_file() else 0o700)
        os.chown(path, owner, owner)
    opened = (file.stat().st_atime_ns, (folder / LOCK).stat().st_atime_ns)
    swept(base)
    assert sorted(base.iterdir()) == sorted([folder, file])
    assert (file.stat().st_atime_ns, (folder / LOCK).stat().st_atime_ns) == opened


def test_nothing_is_removed_where_others_can_rename_what_is_not_theirs(base):
    process, folder, file = held(base)
    ended(process, signal.SIGKILL)
    base.chmod(0o777)
    sweep(base, PREFIX)
    assert folder.exists()
    assert file.exists()
    base.chmod(0o1777)
    sweep(base, PREFIX)
    assert list(base.iterdir()) == []


def test_a_file_that_was_written_lately_can_be_left(base):
    path = base / "agentrl-log-x"
    path.touch(0o600)
    sweep(base, "agentrl-log-", unwritten_s=60.0)
    assert path.exists()
    os.utime(path, (0, 0))
    sweep(base, "agentrl-log-", unwritten_s=60.0)
    assert not path.exists()


def test_no_sweep_takes_a_folder_or_a_file_from_a_process_that_is_making_it(base):
    """Between its name and its lock: who makes it sees that it is gone, and makes another."""
    done = threading.Event()

    def sweeps():
        while not done.is_set():
            sweep(base, PREFIX)

    threads = [threading.Thread(target=sweeps) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            with temporary_folder("x", base=base) as folder, temporary_file(PREFIX, base) as file:
                (folder / "x").write_text("x")
                assert file.exists()
                assert (folder / "x").exists()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert list(base.iterdir()) == []


MADE_ELSEWHERE = {
    # In a folder that is made so.
    "tools/python/one_process.py": {"TemporaryDirectory"},
    # `sweep` removes it: it has to outlast its process.
    "processes/ray/host.py": {"mkstemp"},
    # Without a name.
    "processes/forking.py": {"TemporaryFile"},
    "runtime/ownership.py": {"TemporaryFile"},
    "tools/shell/inside.py": {"TemporaryFile"},
    "data/rows/packed.py": {"TemporaryFile"},
}


def test_all_temporary_files_of_the_package_are_made_in_one_way():
    makers = {"mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile", "TemporaryFile"}
    found = {}
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
        names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls} & makers
        if names and path.name != "temporary.py":
            found[path.relative_to(ROOT).as_posix()] = names
    assert found == MADE_ELSEWHERE


def test_without_locks_it_goes_on(base, monkeypatch):
    """As on some file systems of a network."""

    def refused(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("agentrl.runtime.temporary.fcntl.flock", refused)
    with suppress(ValueError), temporary_folder("x", base=base) as folder:
        sweep(base, PREFIX)
        assert folder.exists()
        raise ValueError
    assert list(base.iterdir()) == []

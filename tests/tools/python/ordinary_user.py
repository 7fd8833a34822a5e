"""Runs a command as a user without rights, although only root may read its files. Root only.

In a mount namespace of its own, every folder on the way that is closed to others is replaced by an open one
that holds nothing but what the command needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentrl.tools.python.inside import kernel
from agentrl.tools.python.sessions import NOBODY


def run(command: Sequence[str], needed: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    """Run it and return its output."""
    # The mounts below this home exist in the namespace only: outside there are empty folders.
    with tempfile.TemporaryDirectory(prefix="nobody-") as home:
        argv = [sys.executable, "-c", _PROGRAM, home, *map(str, needed), "--", *command]
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
        )


_PROGRAM = "from tests.tools.python.ordinary_user import main; main()"


def main() -> None:
    """Make the needed paths readable, become the user nobody, run the command."""
    split = sys.argv.index("--")
    home, needed = sys.argv[1], [Path(text).resolve() for text in sys.argv[2:split]]
    command = sys.argv[split + 1 :]
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    for path in needed:
        _open_the_way(path, Path(home))
    os.chown(home, NOBODY, NOBODY)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.environ |= {"HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, check=False).returncode
    sys.exit(done)


def _open_the_way(path: Path, home: Path) -> None:
    closed = [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 1]
    if not closed:
        return
    moved = home / path.name
    moved.mkdir(exist_ok=True)
    kernel.mount(str(path), str(moved), None, kernel.MS_BIND | kernel.MS_REC)
    kernel.mount("tmpfs", str(closed[0]), "tmpfs", 0, "mode=755")
    path.mkdir(parents=True)
    kernel.mount(str(moved), str(path), None, kernel.MS_BIND | kernel.MS_REC)

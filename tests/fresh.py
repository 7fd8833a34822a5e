"""Commands as a newcomer types them: in a shell that sees nothing of the environment of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The Makefile's PIP_ARGS may name another package index.
SHELL = """
python() {
    case "$*" in
        "-m pip install "*) command python "$@" --quiet ${PIP_ARGS:-} ;;
        *) command python "$@" ;;
    esac
}
"""
HIDDEN = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}


def run_fresh(script: str, folder: Path, timeout_s: float) -> str:
    """Run a script of bash in a folder, and return its output.

    `python3` is the interpreter that the environment of the tests was made from; the commands of that
    environment are not on the path.

    Raises:
        AssertionError: a command failed; the message holds the output.
        subprocess.TimeoutExpired: it took longer.
    """
    own = Path(sys.executable).parent
    inherited = [place for place in os.environ["PATH"].split(os.pathsep) if Path(place) != own]
    path = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), *inherited])
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", SHELL + script],
        cwd=folder,
        env={**environment, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout

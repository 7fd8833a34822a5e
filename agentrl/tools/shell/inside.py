"""Code of a shell that runs inside the sandbox, in the interpreter whose children the commands are.

It imports the standard library only. Nothing in it is secret, and what it prints is not trusted: commands can
print it, too.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from typing import IO

FOLDER = "/tmp/work"
_MOST_DEPTH = 10


def put(files: Mapping[str, str | bytes]) -> None:
    """Write files: path below the folder -> text, or bytes."""
    for name, contents in files.items():
        path = os.path.join(FOLDER, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(contents.encode() if isinstance(contents, str) else contents)


def prepare(program: str, command: str) -> None:
    """Run a command of the environment's own; where it fails, its last words are those of the exit."""
    os.makedirs(FOLDER, exist_ok=True)
    done = subprocess.run(
        [program, "-c", command], cwd=FOLDER, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    _kill_all_others()
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise SystemExit(f"exit code {done.returncode}: {' '.join(said)}")


def run(program: str, command: str, timeout_s: float) -> None:
    """Run a command to its end or its timeout, kill all that it started, and print how it ended."""
    os.makedirs(FOLDER, exist_ok=True)
    try:
        # A session of its own: signals to its process group must not reach this interpreter.
        child = subprocess.Popen(
            [program, "-c", command], cwd=FOLDER, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        print("the shell does not start:", error.strerror)
        return
    try:
        ending = f"exit code {child.wait(timeout_s)}"
    except subprocess.TimeoutExpired:
        ending = f"stopped after {timeout_s:g} s"
    _kill_all_others()
    child.wait()
    if ending != "exit code 0":
        print(f"\n[{ending}]")


def execute(program: str, command: str, timeout_s: float, variables: Mapping[str, str], most: int) -> None:
    """Run a command to its end or its timeout, kill all that it started, and print how it ended as JSON.

    variables: more of its environment. most: bytes of each of its streams, the last ones.
    """
    os.makedirs(FOLDER, exist_ok=True)
    failure, is_late = None, False
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                [program, "-c", command],
                cwd=FOLDER,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            code = child.wait(timeout_s)
            failure = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            failure, is_late = f"it ran longer than {timeout_s:g} s", True
        except OSError as error:
            failure = f"it does not start: {error.strerror}"
        _kill_all_others()
        print(json.dumps([_end_of(output, most), _end_of(errors, most), failure, is_late]))


def _end_of(file: IO[bytes], most: int) -> str:
    file.seek(max(file.seek(0, os.SEEK_END) - most, 0))
    return file.read().decode("utf-8", "replace")


def _kill_all_others() -> None:
    """Kill every process of the session but its pid 1 and this one, whatever their process groups are."""
    assert os.getppid() == 1, "outside of a pid namespace this would kill every process of the user"
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def show_files(most_files: int, most_bytes: int) -> None:
    """Print the regular files below the folder as a JSON object; see `Shell.files`."""
    files: dict[str, str] = {}
    for parent, folders, names in os.walk(FOLDER):
        is_deep = parent.count("/") - FOLDER.count("/") >= _MOST_DEPTH
        folders[:] = [] if is_deep else sorted(n for n in folders if n[0] != "." and n != "__pycache__")
        for path in (os.path.join(parent, name) for name in sorted(names)):
            data = _read(path, most_bytes + 1) if path.isprintable() else None
            if data is None:
                continue
            most_bytes -= len(data)
            if most_bytes < 0 or len(files) == most_files:
                print(json.dumps(files))
                return
            files[os.path.relpath(path, FOLDER)] = data.decode("utf-8", "replace")
    print(json.dumps(files))


def _read(path: str, most_bytes: int) -> bytes | None:
    """The bytes of a regular file, up to `most_bytes`; None where it is another kind, or cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        return file.read(most_bytes) if stat.S_ISREG(os.fstat(fd).st_mode) else None

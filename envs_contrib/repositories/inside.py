"""Code of the grader that runs inside a fresh sandbox, next to the files that an agent left.

It imports the standard library only. It gets the hidden calls, and never what they should print.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence

MOST_BYTES = 20_000
FOLDER = "repository"


def outcomes(
    files: Mapping[str, str],
    command: Sequence[str],
    calls: Sequence[tuple[Sequence[str], str]],
    timeout_s: float,
) -> None:
    """Write the files, run the program once for each call, and print exit codes and outputs as JSON.

    calls: (arguments, standard input). An output that is too long is None; after one that comes too late all
        are.
    """
    for path, text in files.items():
        place = os.path.join(FOLDER, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8") as file:
            file.write(text)
    os.makedirs(FOLDER, exist_ok=True)
    found: list[list[object]] = []
    for args, stdin in calls:
        # One that is late is wrong already: the others need not be waited for.
        is_late = bool(found) and found[-1][0] is None
        found.append([None, None] if is_late else _outcome([*command, *args], stdin, timeout_s))
    print(f"\n{json.dumps(found)}")


def _outcome(command: Sequence[str], stdin: str, timeout_s: float) -> list[object]:
    """The exit code, and what it printed."""
    with open("stdin", "w+b") as fed, open("stdout", "w+b") as printed:
        fed.write(stdin.encode())
        fed.seek(0)
        try:
            done = subprocess.run(
                command,
                cwd=FOLDER,
                env={**os.environ, "LC_ALL": "C"},
                stdin=fed,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return [None, None]
        printed.seek(0)
        data = printed.read(MOST_BYTES + 1)
    return [done.returncode, data.decode("latin-1") if len(data) <= MOST_BYTES else None]

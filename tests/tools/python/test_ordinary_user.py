"""The sandbox for a user without rights: to the kernel the code, its supervisor and the host are one user."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.tools.python import ordinary_user

FOLDER = Path(__file__).parent


def passed(*files: str) -> int:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"{FOLDER}/{file}" for file in files),
    ]
    if os.geteuid() != 0:
        return 1  # these very tests run as such a user
    needed = [FOLDER.parents[2], Path(sys.prefix), Path(sys.base_prefix)]
    done = ordinary_user.run(command, needed)
    match = re.search(r"^(\d+) passed in ", done.stdout, re.MULTILINE)
    assert match, done.stdout[-3000:] + done.stderr[-3000:]
    return int(match[1])


@pytest.mark.full
def test_every_attack_fails_for_an_ordinary_user_too():
    assert passed("test_attacks.py", "test_quotas.py") > 0


@pytest.mark.full
def test_everything_holds_for_an_ordinary_user_too():
    assert passed(
        "test_floods.py", "test_python_tool.py", "test_lifetime.py", "test_refusal.py", "test_tricks.py"
    )

"""Where the kernel refuses namespaces, the tool refuses to start and names what to change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.tools.python import SandboxRefusedError
from agentrl.tools.python.inside import syscalls
from agentrl.tools.python.one_process import bubblewrap
from tests.tools.python.sandboxed import gone, result

REFUSED = """
import asyncio, ctypes, errno, json, struct, sys
from agentrl.errors import UserError
from agentrl.tools.python import PythonTool
from agentrl.tools.python.inside import kernel

# A filter like those of many containers: this process, and all it starts, may make no namespaces.
unshare = {"x86_64": 272, "aarch64": 97}[kernel.MACHINE]
refused = 0x50000 | errno.EPERM
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, refused), (0x06, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("HBBI", *step) for step in steps)
kernel.forbid_new_privileges()
buffer = ctypes.create_string_buffer(program, len(program))
kernel.install_filter(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer)))

async def attempt(sandbox):
    try:
        return (await PythonTool(sandbox=sandbox).run("print(6 * 7)")).output
    except UserError as error:
        return str(error)

async def main():
    print(json.dumps({sandbox: await attempt(sandbox) for sandbox in sys.argv[1:]}))

asyncio.run(main())
"""


def outcomes(*sandboxes: str, path: str = "") -> dict[str, str]:
    command = [sys.executable, "-c", REFUSED, *sandboxes]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_without_namespaces_it_refuses_and_names_the_one_setting_that_runs_unprotected():
    by_sandbox = outcomes("auto", "namespaces", "none")
    for sandbox in ("auto", "namespaces"):
        assert "no sandbox here" in by_sandbox[sandbox]
        assert "Operation not permitted" in by_sandbox[sandbox]
        assert '`sandbox = "none"` runs code unprotected' in by_sandbox[sandbox]
    assert "bubblewrap is not installed" in by_sandbox["auto"]
    assert by_sandbox["none"] == "42\n"


@pytest.mark.parametrize(
    ("header", "column"),
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0), ("/usr/include/asm-generic/unistd.h", 1)],
)
def test_the_numbers_of_system_calls_are_the_kernels(header, column):
    # Machines without the kernel's headers: the test of real calls in test_attacks.py still runs.
    lines = Path(header).read_text(encoding="ascii").splitlines() if Path(header).exists() else []
    numbers = {}
    for line in lines:
        match line.split():
            case ["#define", name, number, *_] if number.isdigit():
                numbers[name.removeprefix("__NR_").removeprefix("__NR3264_")] = int(number)
    listed = {
        name: number
        for calls in (*syscalls.ALLOWED.values(), syscalls.SUCCEEDS, syscalls.ABSENT)
        for name, numbered in calls.items()
        if (number := numbered[column]) is not None
    }
    wrong = {name: n for name, n in listed.items() if numbers.get(name, n) != n}
    assert wrong == {}
    assert not numbers or sum(name in numbers for name in listed) > 100


BUBBLEWRAP = {
    "open('/etc/shadow')": "FileNotFoundError",
    "open('/proc/1/environ')": "FileNotFoundError",
    "open('/usr/x', 'w')": "OSError",
    "open('/dev/x', 'w')": "OSError",
    "(open('/dev/shm/x', 'w').write('x'), __import__('os').listdir('/tmp'))": "(1, ['x'])",
    "open('/agentrl/inside/enter.py')": "FileNotFoundError",
    "__import__('agentrl')": "ModuleNotFoundError",
    "__import__('socket').socket()": "PermissionError",
    "__import__('os').unshare(0x10000000)": "AttributeError",
    "__import__('ctypes').CDLL(None).unshare(0x10000000)": "-1",
    "sum(map(int, __import__('os').listdir('/tmp')))": "0",
    "(__import__('os').getpid(), open('note', 'w').write('x'))": "(2, 1)",
}


async def in_bubblewrap(code: str, **settings):
    """The result of code; None where bubblewrap is missing, after a check of the error text.

    As root it runs as a user without rights, who may not be allowed to read this installation.
    """
    refused: list[str] = []
    try:
        return await result(code, sandbox="bubblewrap", **settings)
    except SandboxRefusedError as error:
        refused.append(str(error))
    missing = "is not installed" if bubblewrap() is None else "does not run here"
    assert f"bubblewrap {missing}" in refused[0]
    assert bubblewrap() is None or os.geteuid() == 0
    return None


@pytest.mark.parametrize("expression", BUBBLEWRAP)
async def test_bubblewrap_confines_the_same_where_installed_and_its_absence_is_explained(expression):
    code = f"try:\n    print({expression})\nexcept Exception as error:\n    print(type(error).__name__)"
    result = await in_bubblewrap(code)
    assert result is None or result.output.strip() == BUBBLEWRAP[expression]


async def test_limits_hold_in_bubblewrap_too():
    bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(1)"
    ends = {
        bomb: lambda result: result.outcome in ("processes", "timeout", "cpu"),
        "while True: pass": lambda result: result.outcome in ("timeout", "cpu"),
        "x = bytes(10**9)": lambda result: "MemoryError" in result.output,
        "open('x', 'wb').write(bytes(2**25))": lambda result: "OSError" in result.output,
    }
    for code, is_right in ends.items():
        result = await in_bubblewrap(code, processes=8, wall_s=1)
        assert result is None or is_right(result), (code, result)
    assert await gone(set())

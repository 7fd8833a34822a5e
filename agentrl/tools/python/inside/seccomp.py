"""A filter on system calls, as a program for the kernel's BPF machine (seccomp(2), Linux >= 3.17).

The namespaces isolate; the filter is a list of what is allowed (`syscalls`). Any other system call fails with
EPERM, and those newer than the list with ENOSYS.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Sequence
from functools import lru_cache

from . import syscalls
from .kernel import MACHINE, forbid_new_privileges, install_filter
from .syscalls import Alternatives, ArgumentCheck

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
_LOAD, _JUMP, _EQUAL, _AT_LEAST, _RETURN, _AND = 0x20, 0x05, 0x15, 0x35, 0x06, 0x54
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALL_BITS = 0xFFFFFFFF

Steps = list[tuple[int, int, int, int]]
"""Instructions: code, jump if true, jump if false, operand."""


def program(machine: str = MACHINE, *, network: bool = False) -> bytes:
    """The filter's instructions. network: with the calls that connect to a server.

    Raises:
        KeyError: there is no table for this machine.
    """
    column, architecture = _ARCHITECTURES[machine]
    steps: Steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        *_returned(_KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_chosen(_ranges(_outcomes(column, network=network))),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _outcomes(column: int, *, network: bool) -> dict[int, Steps]:
    """The steps for every call that does not simply fail, by its number on a machine."""
    tables = [(syscalls.SUCCEEDS, _returned(_ERRNO)), (syscalls.ABSENT, _returned(_ERRNO | errno.ENOSYS))]
    groups = [*syscalls.ALLOWED.values(), *([syscalls.NETWORK] if network else [])]
    tables += [(group, _returned(_ALLOW)) for group in groups]
    outcomes: dict[int, Steps] = {}
    for calls, steps in tables:
        for name, numbers in calls.items():
            if (number := numbers[column]) is not None:
                alternatives = syscalls.CONDITIONS.get(name)
                outcomes[number] = steps if alternatives is None else _checked(alternatives)
    return outcomes


def _ranges(outcomes: dict[int, Steps]) -> list[tuple[int, Steps]]:
    """The first number of every range with the same steps, in order; the first one is 0."""
    refused, absent = _returned(_ERRNO | errno.EPERM), _returned(_ERRNO | errno.ENOSYS)
    ranges: list[tuple[int, Steps]] = []
    for number in range(syscalls.NEWEST_CALL + 1):
        steps = outcomes.get(number, refused)
        if not ranges or ranges[-1][1] != steps:
            ranges.append((number, steps))
    # The calls of x86_64's second, 32-bit interface have numbers of their own; aarch64 has none there.
    return [*ranges, (syscalls.NEWEST_CALL + 1, absent), (_X32, _returned(_KILL))]


def _chosen(ranges: Sequence[tuple[int, Steps]]) -> Steps:
    """A binary search for the range of the number that is loaded, and its steps."""
    if len(ranges) == 1:
        return ranges[0][1]
    half = len(ranges) // 2
    below, from_there = _chosen(ranges[:half]), _chosen(ranges[half:])
    first, distance = ranges[half][0], len(from_there)
    # A conditional jump reaches 255 steps; an unconditional one has no bound.
    if distance < 256:
        return [(_AT_LEAST, 0, distance, first), *from_there, *below]
    return [(_AT_LEAST, 1, 0, first), (_JUMP, 0, 0, distance), *from_there, *below]


def _checked(alternatives: Alternatives) -> Steps:
    """Steps that allow the call where all checks of one alternative hold, and refuse it elsewhere."""
    steps = [step for checks in alternatives for step in _allowed_if(checks)]
    return steps + _returned(_ERRNO | errno.EPERM)


def _allowed_if(checks: Sequence[ArgumentCheck]) -> Steps:
    """Steps that allow the call where all checks hold, and go on behind their end elsewhere."""
    steps = _returned(_ALLOW)
    for check in reversed(checks):
        last = len(check.values) - 1
        tests = [
            (_EQUAL, last - n, 0 if n < last else len(steps), value) for n, value in enumerate(check.values)
        ]
        masked = [] if check.mask == _ALL_BITS else [(_AND, 0, 0, check.mask)]
        steps = [(_LOAD, 0, 0, _ARGUMENTS + 8 * check.argument), *masked, *tests, *steps]
    return steps


def _returned(outcome: int) -> Steps:
    return [(_RETURN, 0, 0, outcome)]


def prepare() -> None:
    """Compile the filter now; forked children inherit it."""
    _compiled(network=False)


def install(*, network: bool) -> None:
    """Install the filter for this process and all of its children; it cannot be removed."""
    forbid_new_privileges()
    code = _compiled(network=network)
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(code))
    install_filter(header)


@lru_cache(maxsize=2)
def _compiled(*, network: bool) -> ctypes.Array[ctypes.c_char]:
    """Compiled once, in the warm parent; with the network, in the session."""
    code = program(network=network)
    return ctypes.create_string_buffer(code, len(code))

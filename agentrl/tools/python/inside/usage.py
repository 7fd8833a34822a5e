"""What a set of processes uses, read from a /proc that shows them alone."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

_PAGE_BYTES = resource.getpagesize()
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Memory in bytes and CPU seconds of all processes together, those that have ended included."""

    memory_bytes: int
    cpu_s: float


class Processes:
    """The processes of a /proc; None where there is none: then only those that ended are known.

    own_bytes: what every process has from the start, and is not counted: the interpreter itself.
    """

    def __init__(self, proc: int | None) -> None:
        self._proc = proc
        self.own_bytes = self._resident("self") or 0

    def mapped_bytes(self) -> int:
        """The address space of this process."""
        sizes = self._read("self/statm")
        return int(sizes[0]) * _PAGE_BYTES if sizes else 2**28

    def number(self) -> int:
        """How many there are, this one included."""
        return len(self._pids())

    def usage(self, besides: int) -> Usage:
        """What all of them use, without process `besides`."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        memory, cpu = 0, ended.ru_utime + ended.ru_stime
        for pid in self._pids():
            if int(pid) == besides:
                continue
            memory += max((self._resident(pid) or 0) - self.own_bytes, 0)
            # The name stands in brackets, may hold blanks and brackets, and comes before everything else.
            fields = " ".join(self._read(f"{pid}/stat")).rpartition(")")[2].split()
            if len(fields) > 14:
                cpu += sum(map(int, fields[11:15])) / _TICKS_PER_S
        return Usage(memory, cpu)

    def _pids(self) -> list[str]:
        return [] if self._proc is None else [name for name in os.listdir(self._proc) if name.isdigit()]

    def _resident(self, pid: str) -> int | None:
        sizes = self._read(f"{pid}/statm")
        # Pages of files are shared with everybody.
        return (int(sizes[1]) - int(sizes[2])) * _PAGE_BYTES if sizes else None

    def _read(self, path: str) -> list[str]:
        if self._proc is None:
            return []
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return []
        try:
            return os.read(fd, 4096).decode("utf-8", "replace").split()
        except ProcessLookupError:
            return []
        finally:
            os.close(fd)

"""What a set of processes uses, read from a /proc that shows them alone."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

_MOST_BYTES = 65_536
_OWN_MEMORY = ("RssAnon:", "VmSwap:")
_PAGE_BYTES = resource.getpagesize()
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ResourceUsage(NamedTuple):
    """Memory in bytes, swapped out or not, and CPU seconds of all processes together.

    CPU seconds of those that have ended are included where somebody waited for their end.
    """

    memory_bytes: int
    cpu_s: float


class ProcessTable:
    """The processes of a /proc; None where there is none: then only those that ended are known.

    own_bytes: what every process has from the start, and is not counted: the interpreter itself.
    """

    def __init__(self, proc: int | None) -> None:
        self._proc = proc
        self.own_bytes = self._memory("self")

    def mapped_bytes(self) -> int:
        """The address space of this process."""
        sizes = self._read("self/statm").split()
        return int(sizes[0]) * _PAGE_BYTES if sizes else 2**28

    def number(self) -> int:
        """How many there are, this one included."""
        return len(self._pids())

    def usage(self, besides: int) -> ResourceUsage:
        """What all of them use, without process `besides`."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        memory, cpu = 0, ended.ru_utime + ended.ru_stime
        for pid in self._pids():
            if int(pid) == besides:
                continue
            memory += max(self._memory(pid) - self.own_bytes, 0)
            # The name stands in brackets, may hold blanks and brackets, and comes before everything else.
            fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
            if len(fields) > 14:
                cpu += sum(map(int, fields[11:15])) / _TICKS_PER_S
        return ResourceUsage(memory, cpu)

    def _pids(self) -> list[str]:
        return [] if self._proc is None else [name for name in os.listdir(self._proc) if name.isdigit()]

    def _memory(self, pid: str) -> int:
        """Pages that no file holds. Those of files are bounded with them, and others cannot be shared."""
        # The first line holds a name that the process chose; no line break can stand in it.
        lines = [line.split() for line in self._read(f"{pid}/status").split("\n")[1:]]
        return sum(int(words[1]) * 1024 for words in lines if words and words[0] in _OWN_MEMORY)

    def _read(self, path: str) -> str:
        if self._proc is None:
            return ""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return ""
        try:
            return os.read(fd, _MOST_BYTES).decode("utf-8", "replace")
        except ProcessLookupError:
            return ""
        finally:
            os.close(fd)

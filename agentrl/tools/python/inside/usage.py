"""The resource usage of a set of processes, read from a /proc that lists only them."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

_MOST_BYTES = 65_536
_ANONYMOUS_MEMORY = ("RssAnon:", "VmSwap:")
_PAGE_BYTES = resource.getpagesize()
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ResourceUsage(NamedTuple):
    """Memory in bytes, swapped out or not, and CPU seconds of all processes together.

    CPU seconds of ended processes are included where a parent has waited for them.
    """

    memory_bytes: int
    cpu_s: float


class ProcessTable:
    """The processes of a /proc. Without one (None), usage() counts only ended child processes.

    own_bytes: memory of the interpreter itself, which every process has from its start; it is not counted.
    """

    def __init__(self, proc: int | None) -> None:
        self._proc = proc
        self.own_bytes = self._memory("self")

    def mapped_bytes(self) -> int:
        """The address space of this process."""
        sizes = self._read("self/statm").split()
        return int(sizes[0]) * _PAGE_BYTES if sizes else 2**28

    def number(self) -> int:
        """The number of processes, this one included."""
        return len(self._pids())

    def usage(self, excluded_pid: int) -> ResourceUsage:
        """The usage of all processes but `excluded_pid`."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        memory, cpu = 0, ended.ru_utime + ended.ru_stime
        for pid in self._pids():
            if int(pid) == excluded_pid:
                continue
            memory += max(self._memory(pid) - self.own_bytes, 0)
            # The name is in brackets, may hold blanks and brackets, and comes before all other fields.
            fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
            if len(fields) > 14:
                cpu += sum(map(int, fields[11:15])) / _TICKS_PER_S
        return ResourceUsage(memory, cpu)

    def _pids(self) -> list[str]:
        return [] if self._proc is None else [name for name in os.listdir(self._proc) if name.isdigit()]

    def _memory(self, pid: str) -> int:
        """Anonymous memory. Pages of files count towards the bound of files; others cannot be shared."""
        # The first line holds a name that the process chose; it cannot hold a line break.
        lines = [line.split() for line in self._read(f"{pid}/status").split("\n")[1:]]
        return sum(int(words[1]) * 1024 for words in lines if words and words[0] in _ANONYMOUS_MEMORY)

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

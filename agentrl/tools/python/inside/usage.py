"""The resource usage of a set of processes, read from a /proc that lists only them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_MOST_BYTES = 65_536
_MOST_OWN_MEMORY = ("RssAnon:", "VmSwap:", "VmPTE:")
_TABLES = ("VmPTE:",)
_SHARES = ("Pss_Anon:", "SwapPss:")
_ENDED = "Z"
_BUFFERS = ("pipe:", "socket:")
_PAGE_BYTES = resource.getpagesize()
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ResourceUsage(NamedTuple):
    """Memory in bytes and CPU seconds of all processes together.

    Memory, swapped out or not, includes the tables of its pages. CPU seconds of ended processes are included
    where a parent has waited for them.
    """

    memory_bytes: int
    cpu_s: float


class ProcessTable:
    """The processes of a /proc. Without one (None), usage() counts only ended child processes.

    own_bytes: memory of one interpreter, which a session has from its start; it is not counted.
    """

    def __init__(self, proc: int | None) -> None:
        self._proc = proc
        self.own_bytes = self._most_memory("self")

    def mapped_bytes(self) -> int:
        """The address space of this process."""
        sizes = self._read("self/statm").split()
        return int(sizes[0]) * _PAGE_BYTES if sizes else 2**28

    def number(self) -> int:
        """The number of processes, this one included."""
        return len(self._pids())

    def usage(self, excluded_pid: int, enough_bytes: int) -> ResourceUsage:
        """The usage of all processes but `excluded_pid`.

        Memory up to `enough_bytes` is an upper bound, in which a page that forked processes share counts for
        each of them. Where that is more, it is exact, which takes several times as long.
        """
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, living = ended.ru_utime + ended.ru_stime, []
        for pid in self._pids(excluded_pid):
            fields = self._fields(pid)
            if len(fields) > 14:
                cpu += sum(map(int, fields[11:15])) / _TICKS_PER_S
            living.append(self._living(pid, fields))
        memory = sum(map(self._most_memory, living)) - self.own_bytes
        if memory > enough_bytes:
            # A process that ends between two reads leaves its shares to others: they would count twice.
            memory = min(sum(map(self._memory, living)) for _ in range(2)) - self.own_bytes
        return ResourceUsage(max(memory, 0), cpu)

    def resident_bytes(self, excluded_pid: int) -> int:
        """Their anonymous memory that is not swapped out, at a glance: 0 where the first thread has ended."""
        sizes = [self._read(f"{pid}/statm").split() for pid in self._pids(excluded_pid)]
        pages = sum(int(words[1]) - int(words[2]) for words in sizes if len(words) > 2)
        return max(pages * _PAGE_BYTES - self.own_bytes, 0)

    def buffers(self, excluded_pid: int) -> int:
        """The number of pipes and sockets that all processes but `excluded_pid` have open together.

        Their buffers are memory of the kernel, which is counted in no process.
        """
        processes = [self._living(pid, self._fields(pid)) for pid in self._pids(excluded_pid)]
        links = (link for process in processes for link in self._links(f"{process}/fd"))
        return len({link for link in links if link.startswith(_BUFFERS)})

    def _pids(self, excluded_pid: int = 0) -> list[str]:
        return [name for name in self._names(".") if name.isdigit() and int(name) != excluded_pid]

    def _fields(self, pid: str) -> list[str]:
        # The name is in brackets, may hold blanks and brackets, and comes before all other fields.
        return self._read(f"{pid}/stat").rpartition(")")[2].split()

    def _living(self, pid: str, fields: list[str]) -> str:
        """The folder that shows memory and descriptors: another thread's where the first one has ended."""
        if fields[:1] != [_ENDED]:
            return pid
        threads = [f"{pid}/task/{name}" for name in self._names(f"{pid}/task")]
        return next(filter(self._most_memory, threads), pid)

    def _most_memory(self, process: str) -> int:
        """Anonymous memory. Pages of files count towards the bound of files; others cannot be shared."""
        return self._bytes_in(f"{process}/status", _MOST_OWN_MEMORY)

    def _memory(self, process: str) -> int:
        """The same with its share of each page that others have, too; all of it where that is hidden."""
        shares = self._bytes_in(f"{process}/smaps_rollup", _SHARES)
        if not shares:
            return self._most_memory(process)
        return shares + self._bytes_in(f"{process}/status", _TABLES)

    def _bytes_in(self, path: str, names: tuple[str, ...]) -> int:
        # The first line holds a name that the process chose; it cannot hold a line break.
        lines = [line.split() for line in self._read(path).split("\n")[1:]]
        return sum(int(words[1]) * 1024 for words in lines if words and words[0] in names)

    def _names(self, folder: str) -> list[str]:
        if self._proc is None:
            return []
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return []
        try:
            return os.listdir(fd)
        except OSError:
            return []
        finally:
            os.close(fd)

    def _links(self, folder: str) -> Iterator[str]:
        for name in self._names(folder):
            with suppress(OSError):
                yield os.readlink(f"{folder}/{name}", dir_fd=self._proc)

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

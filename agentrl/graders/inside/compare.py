"""Compares answers with labels by math-verify, in processes that the kernel ends at their limits.

    python -P compare.py MEMORY_MB FD [FD ...]

math-verify is imported once. Each descriptor is one end of a socket, and is served by a child: it forks a
worker for the requests and, whenever one dies, reports its signal and forks the next. So a new worker costs
milliseconds, not the seconds of an import. A request is a line of JSON, {"answer", "gold", "cpu_s"}, and so
is the reply, {"equal"} or {"died"}. All processes end when their sockets are closed; a worker that is busy
then ends at its limit.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

_WALL_FACTOR = 10
_WALL_GRACE_S = 60.0
_MAX_REQUESTS = 2000
_USED_UP = 3
# They are parsed and compared before any fork, so that no worker pays for sympy's lazy imports and for the
# tables that its parser builds.
_WARM_UP = (
    *((r"\frac{1}{2}", "0.5"), ("x^2-1", "(x-1)(x+1)"), (r"\sqrt{12}", r"2\sqrt{3}"), ("(1,2)", "(1, 3)")),
    *((r"\{1,2\}", r"\{2,1\}"), ("x=5", "5"), (r"\text{Monday}", "Monday"), (r"50\%", "0.5"), ("12", "13")),
    *((r"\frac{\pi}{2}", r"\pi/2"), ("1,234", "1234"), (r"3\cdot 10^2", "300"), ("[0, 1)", "[0,1]")),
)


def main(memory_mb: int, descriptors: Sequence[int]) -> None:
    """Serve the sockets until all of them are closed."""
    logging.disable(logging.CRITICAL)
    for answer, gold in _WARM_UP:
        is_equal(answer, gold)
    for fd in descriptors:
        if os.fork() == 0:
            _close(other for other in descriptors if other != fd)
            supervise(fd, memory_mb)
    _close(descriptors)
    for _ in descriptors:
        os.wait()


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def is_equal(answer: str, gold: str) -> bool:
    """Whether math-verify takes an expression for equal to a label."""
    from math_verify import verify

    return bool(verify(_parsed_gold(gold), _parsed(answer), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed_gold(gold: str) -> object:
    # Siblings of a group share their label.
    return _parsed(gold)


def _parsed(expression: str) -> object:
    from math_verify import parse

    return parse(f"\\boxed{{{expression}}}", parsing_timeout=None)


def supervise(fd: int, memory_mb: int) -> NoReturn:
    """Keep a worker alive until the socket is closed."""
    while True:
        worker = os.fork()
        if worker == 0:
            _bound_memory(memory_mb)
            work(fd)
        _, status = os.waitpid(worker, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _USED_UP:
            continue
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            os._exit(0)
        try:
            _send(fd, {"died": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0})
        except OSError:  # nobody is there to read it
            os._exit(0)


def work(fd: int) -> NoReturn:
    """Answer requests; the kernel ends the process at a limit, whatever it computes."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    served = 0
    with suppress(OSError), open(fd, "rb", closefd=False) as requests:
        for line in requests:
            request = json.loads(line)
            cpu_s: float = request["cpu_s"]
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            signal.setitimer(signal.ITIMER_REAL, cpu_s * _WALL_FACTOR + _WALL_GRACE_S)
            equal = is_equal(request["answer"], request["gold"])
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _send(fd, {"equal": equal})
            served += 1
            if served == _MAX_REQUESTS:  # the parser's tables only grow
                os._exit(_USED_UP)
    os._exit(0)


def _bound_memory(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere the kernel enforces no such limit
        mapped_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = mapped_bytes + memory_mb * 2**20
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _send(fd: int, message: dict[str, bool | int]) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(fd) for fd in sys.argv[2:]])

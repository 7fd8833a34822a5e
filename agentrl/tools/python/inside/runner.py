"""The interpreter that runs a model's code. It drops every privilege before the first line of the code.

Its reports are not trusted: they can only change the text that the model itself receives.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import io
import linecache
import os
import resource
import selectors
import signal
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from contextlib import suppress

from . import kernel, seccomp, wire
from .wire import SessionLimits

READY = b"r"
_FILE = "<python>"
_MOST_FILES = 128
_MOST_PENDING_SIGNALS = 256
_MOST_TRACEBACK_LINES = 40
_STACK_BYTES = 8 * 2**20


def confine(limits: SessionLimits, mapped_bytes: int, *, user: int | None) -> None:
    """Drop every privilege permanently.

    mapped_bytes: address space of the interpreter itself, in addition to that of the code.
    user: the user id to switch to; None where the session runs as its only user.
    """
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # A user namespace of its own: RLIMIT_NPROC then counts only processes of this session.
    kernel.unshare(kernel.CLONE_NEWUSER)
    bound(limits, mapped_bytes)
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    kernel.drop_capabilities()
    kernel.die_with_parent(signal.SIGKILL)
    # The change of the user hid it from its supervisor, too, which counts what it has open.
    kernel.hide_memory(False)
    seccomp.install(network=limits["network"])
    # The filter refuses epoll; asyncio takes what has this name.
    vars(selectors)["DefaultSelector"] = selectors.PollSelector


def bound(limits: SessionLimits, mapped_bytes: int) -> None:
    """Set the limits that the kernel enforces per process."""
    bounds = {
        resource.RLIMIT_AS: mapped_bytes + limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["files_bytes"],
        resource.RLIMIT_NOFILE: _MOST_FILES,
        # Where core files are piped to a program, a limit of 0 does not prevent it (core(5)); 1 does.
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_STACK: _STACK_BYTES,
    }
    if not limits["stateful"]:
        # More than the supervisor allows, which reports the reason; this is the fallback.
        bounds[resource.RLIMIT_CPU] = int(limits["cpu_s"]) + 2
    if sys.platform == "linux":
        bounds |= {resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0}
        bounds |= {resource.RLIMIT_SIGPENDING: _MOST_PENDING_SIGNALS}
    for which, target in bounds.items():
        hard = resource.getrlimit(which)[1]
        limit = target if hard == resource.RLIM_INFINITY else min(target, hard)
        resource.setrlimit(which, (limit, limit))


def serve(cells: int, status: int, environment: Mapping[str, str], *, stateful: bool) -> None:
    """Report READY, run each cell of code and report its outcome, until the pipe is closed.

    Without state there is one cell, which ends as a program does.
    """
    os.environ.clear()
    os.environ.update(environment)
    _reseed()
    module = _fresh_main()
    os.write(status, READY)
    while (cell := wire.read(cells)) is not None:
        report = _Report()
        with report:
            _run(str(cell), module)
        if not stateful:
            with report:
                _finish()
        _flush()
        os.write(status, report.outcome)


def _reseed() -> None:
    """Seed the random generators in every session: the same code gives the same output."""
    for name in ("random", "numpy.random"):
        if (module := sys.modules.get(name)) is not None:
            vars(module)["seed"](0)


def _fresh_main() -> types.ModuleType:
    for name in [name for name in sys.modules if name.partition(".")[0] == "inside"]:
        del sys.modules[name]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout, sys.stderr = _text(1), _text(2)
    sys.argv = [""]
    # `site` defines them, and this interpreter was started without it.
    vars(builtins)["exit"] = vars(builtins)["quit"] = sys.exit
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module


def _text(fd: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _run(code: str, module: types.ModuleType) -> None:
    """Run one cell; where its last statement is an expression, print its value as a console does."""
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    tree = ast.parse(code, _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _FILE, "exec"), module.__dict__)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _FILE, "eval"), module.__dict__)
        if value is not None:
            print(repr(value))


class _Report:
    """The outcome of a cell. As a context manager it catches and prints every exception of the code."""

    def __init__(self) -> None:
        self.outcome = b"d"

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: types.TracebackType | None
    ) -> bool:
        if isinstance(error, SystemExit) and not error.code:
            return True
        if error is not None:
            self.outcome = b"e"
            # Its __str__, and an object that replaces stderr, are code of the model, too.
            with suppress(BaseException):
                sys.stderr.write(_traceback_of(error))
        return True


def _traceback_of(error: BaseException) -> str:
    """A traceback that begins in the code of the model."""
    if isinstance(error, SystemExit):
        return f"exit: {error.code}\n"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines(keepends=True)
    if len(lines) > _MOST_TRACEBACK_LINES:
        half = _MOST_TRACEBACK_LINES // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half} lines are left out\n"]
    return "".join(lines)


def _finish() -> None:
    """Wait for threads and run the functions of atexit, as an interpreter does at its end."""
    while running := [thread for thread in threading.enumerate() if _is_awaited(thread)]:
        running[0].join()
    atexit._run_exitfuncs()


def _is_awaited(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.current_thread()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The code may have closed or replaced it.
        with suppress(BaseException):
            stream.flush()

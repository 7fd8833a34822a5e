"""A process for every session: in bubblewrap, where only that may create namespaces, or unprotected.

Slower than the sandbox with its warm parent: every session starts an interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from agentrl.errors import ToolError
from agentrl.runtime.temporary import temporary_folder
from agentrl.tools.python import installation
from agentrl.tools.python.inside.wire import DEVICES, SandboxPlan, SessionLimits, pack
from agentrl.tools.python.sessions import NOBODY, Backend, PythonSession
from agentrl.tools.running import run

_INSIDE = "/agentrl"
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[2]); from inside import one_process; one_process.main()"
_END_S = 2.0


def bubblewrap() -> str | None:
    """The path of bubblewrap; None where it is not installed."""
    return shutil.which("bwrap")


class OneProcess(Backend):
    """Starts a process for every session, in a folder of its own.

    folder: for the folders of sessions.
    command: the prefix of the interpreter's command line: that of a sandbox, or empty.
    module_path: the folder in which that interpreter finds the modules that run inside.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], module_path: str, environment: dict[str, str]
    ) -> None:
        self._folder = folder
        self._command = command
        self._module_path = module_path
        self._environment = environment

    async def session(self, limits: SessionLimits) -> PythonSession:
        """A new session, in a new process.

        Raises:
            ToolError: the process does not start.
        """
        with ExitStack() as undone:
            ours, theirs = socket.socketpair()
            undone.callback(ours.close)
            ours.setblocking(False)
            folder = tempfile.TemporaryDirectory(dir=self._folder)
            undone.callback(folder.cleanup)
            with theirs:
                try:
                    process = await self._start(theirs.fileno(), folder.name)
                except OSError as error:
                    raise ToolError("unavailable", f"the interpreter does not start: {error}") from None
            undone.pop_all()
        environment = self._environment if self._command else {**self._environment, "HOME": folder.name}
        return _Owned(ours, (environment, limits), process, folder)

    async def _start(self, fd: int, folder: str) -> Process:
        program = [
            installation.interpreter(),
            *installation.FLAGS,
            "-c",
            _PROGRAM,
            str(fd),
            self._module_path,
        ]
        # A model's code never runs as root: limits do not apply to root.
        user = NOBODY if self._command and os.geteuid() == 0 else None
        return await asyncio.create_subprocess_exec(
            *self._command, *program,
            env={"PYTHONHASHSEED": "0"}, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL,
            pass_fds=(fd,), start_new_session=True, cwd=folder,
            user=user, group=user, extra_groups=None if user is None else [],
        )  # fmt: skip


class _Owned(PythonSession):
    """A session with a process and a folder of its own, which end with it."""

    def __init__(
        self,
        host: socket.socket,
        greeting: tuple[dict[str, str], SessionLimits],
        process: Process,
        folder: tempfile.TemporaryDirectory[str],
    ) -> None:
        super().__init__(host, greeting[1], greeting=pack(greeting[0]))
        self._process = process
        self._folder = folder

    async def close(self) -> None:
        """End it, and wait until its process has ended and its folder is deleted."""
        try:
            await super().close()
        finally:
            try:
                await self._reap()
            finally:
                await run(self._folder.cleanup, thread="python folder")

    async def _reap(self) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def unprotected() -> AsyncIterator[OneProcess]:
    """No sandbox: code can read what this user can read. The packages are those of this installation."""
    paths = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    environment = installation.environment(paths)
    with temporary_folder("python") as folder:
        yield OneProcess(folder, (), str(Path(__file__).parent), environment)


@asynccontextmanager
async def in_bubblewrap(program: str, plan: SandboxPlan) -> AsyncIterator[OneProcess]:
    """Bubblewrap with the same mounts, and with namespaces of every kind, for every session."""
    command = [program, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    # The supervisor needs these capabilities in its namespaces; the interpreter drops them.
    command += ["--uid", "0", "--gid", "0", "--cap-add", "ALL", "--hostname", "sandbox"]
    for outside, inside in plan["mounts"]:
        command += ["--ro-bind", outside, inside]
    for folder in plan["hidden"]:
        if Path(folder).is_dir():
            command += ["--tmpfs", folder, "--remount-ro", folder]
    for inside, target in plan["links"]:
        command += ["--symlink", target, inside]
    command += ["--ro-bind", str(Path(__file__).parent / "inside"), f"{_INSIDE}/inside"]
    # Not bubblewrap's own /dev: that is writable, without a bound.
    for name in DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--symlink", "/tmp", "/dev/shm", "--proc", "/proc", "--tmpfs", "/tmp", "--remount-ro", "/"]
    command += ["--chdir", "/", "--setenv", "PYTHONHASHSEED", "0", "--"]
    with temporary_folder("python") as place:
        yield OneProcess(place, command, _INSIDE, {**plan["environment"], "PYTHONHASHSEED": "0"})

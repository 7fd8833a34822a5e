"""The sandbox of namespaces: started once; every call requests a session.

    host (agentrl)  --socket-->  warm parent, pid 1 of the sandbox
                                   |-- session: pid 1 of its own pid namespace
                                   |     `-- interpreter, no privileges, seccomp, limits
                                   `-- session ...

When the host ends, or its end of the socket closes, for whatever reason, all of these processes end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.errors import ToolError, UserError
from agentrl.tools.python import installation
from agentrl.tools.python.inside.wire import SandboxPlan, SessionLimits, pack
from agentrl.tools.python.sessions import NOBODY, Backend, PythonSession

_MODULE_PATH = str(Path(__file__).parent)
_START_S = 60.0
_END_S = 2.0
_MAX_STDERR_BYTES = 2000


class SandboxRefusedError(UserError):
    """The kernel does not allow what the sandbox needs."""


class Namespaces(Backend):
    """A running sandbox. Start one with `started`."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        self._process = process
        self._control = control

    async def session(self, limits: SessionLimits) -> PythonSession:
        """A new session, forked from the warm parent.

        Raises:
            ToolError: the sandbox is dead.
        """
        with contextlib.ExitStack() as undone:
            ours, theirs = socket.socketpair()
            undone.callback(ours.close)
            ours.setblocking(False)
            with theirs:
                try:
                    while not self._send_socket(theirs):
                        await asyncio.sleep(0.001)
                except OSError as error:
                    raise ToolError("crashed", f"the sandbox is dead: {error}") from None
            undone.pop_all()
        return PythonSession(ours, limits)

    def _send_socket(self, theirs: socket.socket) -> bool:
        try:
            return bool(socket.send_fds(self._control, [b"s"], [theirs.fileno()]))
        except BlockingIOError:
            return False


@asynccontextmanager
async def started(plan: SandboxPlan) -> AsyncIterator[Namespaces]:
    """Start a sandbox; leaving the context ends every process in it.

    Raises:
        SandboxRefusedError: the kernel refuses; the sentence names the step.
        UserError: a package of `preload` cannot be imported.
        ToolError: it does not start.
    """
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                installation.interpreter(), *installation.FLAGS, "-c", _PROGRAM,
                str(theirs.fileno()), _MODULE_PATH, str(os.getpid()),
                env={"PYTHONHASHSEED": "0"}, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        try:
            async with asyncio.timeout(_START_S):
                await _Handshake(process, ours).run(plan)
            loop.add_reader(ours, _ClosedWithLoop(ours))
            yield Namespaces(process, ours)
        except TimeoutError:
            raise ToolError("unavailable", f"the sandbox did not come up within {_START_S:g} s") from None
        finally:
            loop.remove_reader(ours)
            # Not only close(): children that the host forked hold this socket, too.
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            ours.close()
            await _ended(process)


class _ClosedWithLoop:
    """Shuts the socket down when the event loop is closed, though nobody ended its tasks before.

    The loop has the only reference to it, as the reader of that socket. Closing a loop drops its readers.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def __call__(self) -> None:
        """The sandbox has ended: there is nothing to read."""
        asyncio.get_running_loop().remove_reader(self._control)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)


async def _ended(process: Process) -> None:
    """Wait for the end of the sandbox, which the closed socket causes; kill it after a timeout."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        # The warm parent dies with this process, its parent, and all sessions die with the warm parent.
        process.kill()
        await process.wait()


class _Handshake:
    """The messages between the host and the sandbox while it starts."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        self._process, self._control = process, control
        control.setblocking(False)

    async def run(self, plan: SandboxPlan) -> None:
        await self._send(plan)
        await self._receive()
        await self._send({"user": _map_users(self._process.pid)})
        await self._receive()

    async def _send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # its last message holds the reason
            await asyncio.get_running_loop().sock_sendall(self._control, pack(message))

    async def _receive(self) -> None:
        """Wait for its next message; raise the failure that it reports."""
        length = int.from_bytes(await self._exactly(4), "big")
        message = json.loads(await self._exactly(length))
        if (step := message.get("refused")) == "packages":
            raise UserError(f"the Python tool cannot import early what it is to offer: {message['detail']}.")
        if step is not None:
            raise SandboxRefusedError(f"{step}: {message['detail']}")

    async def _exactly(self, number: int) -> bytes:
        data = b""
        while len(data) < number:
            part = await asyncio.get_running_loop().sock_recv(self._control, number - len(data))
            if not part:
                assert self._process.stderr is not None
                stderr = (
                    (await self._process.stderr.read(_MAX_STDERR_BYTES)).decode("utf-8", "replace").strip()
                )
                raise ToolError("unavailable", f"the sandbox did not come up: {stderr.splitlines()[-1:]}")
            data += part
        return data


def _map_users(pid: int) -> int | None:
    """Map the users of the new user namespace; return the id that runs code, None = the only one inside.

    For the kernel, every process inside has the rights of this user: it could read this user's files, if
    they were mounted. For root that is too much: there the code runs as nobody.

    Raises:
        SandboxRefusedError: the kernel refuses the map.
    """
    folder = Path(f"/proc/{pid}")
    ids = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
    try:
        if ids["uid_map"] == 0:
            for name in ids:
                (folder / name).write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return NOBODY
        (folder / "setgroups").write_text("deny")
        for name, number in ids.items():
            (folder / name).write_text(f"0 {number} 1\n")
    except OSError as error:
        raise SandboxRefusedError(f"users: {error}") from None
    return None


_PROGRAM = "import sys; sys.path.insert(0, sys.argv[2]); from inside import enter; enter.main()"

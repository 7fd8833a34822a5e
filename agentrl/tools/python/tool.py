"""The Python tool."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import get_args

from agentrl.errors import ToolError, ToolRejected, UserError
from agentrl.runtime.clocks import clocks_stopped
from agentrl.runtime.gate import Gate
from agentrl.tools.base import Tool
from agentrl.tools.python.choice import Contents, Sandboxing, backend
from agentrl.tools.python.inside.wire import SessionLimits
from agentrl.tools.python.sessions import Backend, PythonResult, PythonSession
from agentrl.tools.shared import Shared
from agentrl.tools.toolkit import Toolkit
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

MOST_CODE_BYTES = 60_000
MOST_OUTPUT_BYTES = 8 * 2**20  # at worst six times as much in JSON, which is below the bound of a message
_MB = 2**20
_FENCE = re.compile(r"\s*```[a-zA-Z0-9]*[ \t]*\n(.*?)(?:\n[ \t]*```\s*)?", re.DOTALL)


@dataclass(frozen=True)
class PythonTool(Toolkit):
    """Runs Python that a model wrote, in a sandbox that needs no rights and no installation (Linux).

        async with PythonTool().episode() as (python,):
            print(await python.invoke({"code": "print(6 * 7)"}))

    The result is what the code prints, and the value of its last line where that is an expression. Without
    state every call is a process of its own; with state, variables persist for the episode. Code can use the
    standard library and `packages`: no network, no file, variable or process of this machine. A failure is
    text for the model (a `ToolRejected` of kind error, timeout, cpu, memory, processes, signal or ended).

    name: the name that the model calls.
    stateful: whether variables, modules and files stay from call to call of an episode.
    packages: distributions that code may import, with their requirements; they must be installed.
    preload: modules that are imported once, before any call: imports of them then cost nothing.
    programs: names of programs in /usr/bin that code may start; without them there is none but Python.
    mounts: more files and folders that code may read: (path on this machine, path inside).
    links: links that code finds: (path inside, its target); none where something else is.
    wall_s, cpu_s: wall-clock and CPU seconds of one call, at most (all its processes together).
    memory_mb: memory of a call, in addition to the interpreter's own (2**20 bytes). It bounds each process at
        once, and all of them together within a hundredth of a second.
    files_mb: files that it may write, in memory, deleted with the call or the episode (2**20 bytes).
    processes: processes and threads at a time (count).
    output_bytes: output that is kept, at most 8 MiB; a note replaces the rest.
    max_concurrency: calls that run at a time, over all episodes; None = twice the cores.
    sandbox: `auto` takes namespaces, or bubblewrap where the kernel refuses them; `none` runs code
        unprotected, with this user's rights: only for code that you trust.

    Raises:
        UserError: a limit is not positive or too large, or the sandbox is unknown.
    """

    name: str = "python"
    stateful: bool = False
    packages: Sequence[str] = ()
    preload: Sequence[str] = ()
    programs: Sequence[str] = ()
    mounts: Sequence[tuple[str, str]] = ()
    links: Sequence[tuple[str, str]] = ()
    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    files_mb: int = 64
    processes: int = 32
    output_bytes: int = 20_000
    max_concurrency: int | None = None
    sandbox: Sandboxing = "auto"
    _shared: Shared[Backend] = field(init=False, repr=False, compare=False)
    _gate: Gate = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_mb", "files_mb", "processes", "output_bytes"):
            if not getattr(self, name) > 0:
                raise UserError(f"the Python tool needs {name} above 0, got {getattr(self, name)}.")
        if self.output_bytes > MOST_OUTPUT_BYTES:
            raise UserError(
                f"the Python tool keeps at most {MOST_OUTPUT_BYTES:,} bytes of output; "
                f"output_bytes is {self.output_bytes:,}."
            )
        if self.sandbox not in get_args(Sandboxing):
            raise UserError(
                f"the Python tool knows no sandbox `{self.sandbox}`; write `auto`, `namespaces`, "
                "`bubblewrap` or `none`."
            )
        limit = self.max_concurrency or 2 * (os.cpu_count() or 1)
        object.__setattr__(self, "_shared", Shared(self._backend, f"sandbox of {self.name}"))
        object.__setattr__(self, "_gate", Gate(limit))

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Sequence[Tool]]:
        """The tool for one episode; with state, its interpreter starts with the first call.

        Raises:
            UserError: the kernel refuses the sandbox; the sentence names what to change.
        """
        await self._shared.get()
        if not self.stateful:
            yield (Tool.described(self.schema, self._run_stateless, gate=self._gate),)
            return
        async with self.interpreter() as interpreter:

            async def call(code: str) -> str:
                return self.text_of(await interpreter.run(_program(code)))

            yield (Tool.described(self.schema, call, gate=self._gate),)

    async def run(self, code: str) -> PythonResult:
        """Run one piece of code, without state.

        Raises:
            ToolError: the sandbox died.
            UserError: the kernel refuses the sandbox.
        """
        async with self._gate.admitted("the sandbox"), await self.session(stateful=False) as session:
            return await session.run(_unfenced(code))

    async def _run_stateless(self, code: str) -> str:
        program = _program(code)
        async with await self.session(stateful=False) as session:
            return self.text_of(await session.run(program))

    def interpreter(self, setup: str = "") -> PythonInterpreter:
        """An interpreter that keeps its state, for code of an environment; see `PythonInterpreter`.

        setup: code that runs before the first call, and again where the interpreter is replaced.
        """
        return PythonInterpreter(self, setup)

    async def session(self, *, stateful: bool, network: bool = False) -> PythonSession:
        """A new session, to be entered with `async with`. A dead sandbox is started again, once.

        Raises:
            ToolError: no session can be started.
            UserError: the kernel refuses the sandbox.
        """
        limits = self._limits(stateful, network=network)
        with clocks_stopped():  # a sandbox that is started again is no part of a call
            backend = await self._shared.get()
        try:
            return await backend.session(limits)
        except ToolError:
            with clocks_stopped():
                await self._shared.drop(backend)
                backend = await self._shared.get()
            return await backend.session(limits)

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schema of its one tool."""
        return (self.schema,)

    @property
    def schema(self) -> ToolSchema:
        """The schema that the model reads."""
        state = "Variables stay for later calls." if self.stateful else "Every call starts afresh."
        offered = f" {', '.join(self.packages)} can be imported." if self.packages else ""
        description = f"Run Python code and return what it prints. {state}{offered}"
        code: dict[str, JSON] = {"type": "string", "description": "A program."}
        parameters: dict[str, JSON] = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        return ToolSchema(self.name, description, {**parameters, "additionalProperties": False})

    def _limits(self, stateful: bool, *, network: bool = False) -> SessionLimits:
        return SessionLimits(
            wall_s=self.wall_s,
            cpu_s=self.cpu_s,
            memory_bytes=self.memory_mb * _MB,
            files_bytes=self.files_mb * _MB,
            processes=self.processes,
            output_bytes=self.output_bytes,
            stateful=stateful,
            network=network,
        )

    def _backend(self) -> AbstractAsyncContextManager[Backend]:
        contents = Contents(self.packages, self.preload, self.programs, self.mounts, self.links)
        return backend(self.sandbox, contents, self._limits(stateful=False))

    def text_of(self, result: PythonResult) -> str:
        """The text for the model.

        Raises:
            ToolRejected: the code failed or exceeded a limit; its output comes before the sentence.
        """
        output = result.output.rstrip("\n")
        if result.dropped_bytes:
            output += f"\n... truncated: {result.dropped_bytes:,} more bytes were printed."
        if result.outcome == "done":
            return output or "(no output)"
        memory = result.detail or f"more than {self.memory_mb} MB of memory"
        sentences = {
            "error": "",
            "timeout": f"It was stopped: it ran longer than {self.wall_s:g} s.",
            "cpu": f"It was stopped: it computed longer than {self.cpu_s:g} s.",
            "memory": f"It was stopped: it used {memory}.",
            "processes": f"It was stopped: it ran more than {self.processes} processes.",
            "signal": f"The interpreter crashed ({result.detail}).",
            "ended": f"The interpreter was left (exit code {result.detail or 'unknown'}).",
        }
        lost = "Its variables are gone." if result.over and self.stateful else ""
        reason = " ".join(filter(None, (sentences[result.outcome], lost)))
        raise ToolRejected("\n".join(filter(None, (output, reason))), result.outcome)


class PythonInterpreter:
    """An interpreter in the sandbox: variables, modules and files stay from call to call.

        async with PythonTool().interpreter(setup="import math") as interpreter:
            print((await interpreter.run("math.factorial(20)")).output)

    It starts with the first call. A call that exceeds a limit ends it, and the next one starts another. Calls
    wait for each other, and not for the tool's `max_concurrency`.
    """

    def __init__(self, tool: PythonTool, setup: str = "") -> None:
        self._tool = tool
        self._setup = setup
        self._session: PythonSession | None = None
        self._call_lock = asyncio.Lock()

    async def __aenter__(self) -> PythonInterpreter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def has_state(self) -> bool:
        """Whether it runs: it has started, and no limit has ended it."""
        return self._session is not None

    async def listener(self) -> socket.socket:
        """Start, and return the socket to which the code may connect.

        It listens in a network of the session's own, which has nothing else.

        Raises:
            ToolError: the sandbox died, or has no network.
        """
        async with self._call_lock:
            self._session = await self._tool.session(stateful=True, network=True)
            listener = await self._session.listener()
            await self._prepare(self._session)
            return listener

    async def run(self, program: str) -> PythonResult:
        """Run a program of any length to its end, or to a limit.

        Raises:
            ToolError: the sandbox died, or `setup` fails.
        """
        async with self._call_lock:
            goes_on = False
            try:
                if self._session is None:
                    self._session = await self._tool.session(stateful=True)
                    await self._prepare(self._session)
                result = await self._session.run(program)
                goes_on = not result.over
            finally:
                # A session that was interrupted in the middle of a call cannot run another one.
                if not goes_on:
                    await self.close()
            return result

    async def close(self) -> None:
        """End the session and all of its processes. Closing twice is fine."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _prepare(self, session: PythonSession) -> None:
        if not self._setup:
            return
        result = await session.run(self._setup)
        if result.outcome != "done":
            detail = result.output.strip().splitlines()[-1:]
            raise ToolError("crashed", f"setup of the interpreter: {result.outcome} {' '.join(detail)}")


def _program(code: str) -> str:
    program = _unfenced(code).encode("utf-8", "replace").decode()
    if len(program.encode()) > MOST_CODE_BYTES:
        raise ToolRejected(f"The program is too long; write at most {MOST_CODE_BYTES:,} bytes.", "length")
    return program


def _unfenced(code: str) -> str:
    """The program in a Markdown fence, which models often write; other text unchanged."""
    match = _FENCE.fullmatch(code)
    return match[1] if match else code

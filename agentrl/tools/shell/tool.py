"""The shell tool, and the shell of one episode."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self, get_args

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import ToolRejected, UserError
from agentrl.runtime.gate import Gate
from agentrl.tools.base import Tool
from agentrl.tools.python import PythonResult, PythonTool
from agentrl.tools.python.choice import Sandboxing
from agentrl.tools.python.installation import program_path
from agentrl.tools.shell import inside
from agentrl.tools.toolkit import Toolkit
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

PROGRAMS = (
    *("bash", "sh", "awk", "basename", "cat", "chmod", "cmp", "comm", "cp", "cut"),
    *("date", "diff", "dirname", "env", "expr", "false", "find", "fold", "grep", "head"),
    *("join", "ln", "ls", "mkdir", "mktemp", "mv", "nl", "od", "paste", "printf", "pwd"),
    *("readlink", "realpath", "rm", "rmdir", "sed", "seq", "sleep", "sort", "stat", "tail"),
    *("tee", "test", "timeout", "touch", "tr", "true", "uniq", "wc", "xargs"),
)
"""The programs of a shell, where this machine has them: text and files. None of them needs a network, a
device or a right, and each is one file that is mounted by itself."""
MOST_COMMAND_BYTES = 20_000
MOST_ANSWER_BYTES = 64 * 1024
MOST_FILES = 200
MOST_FILE_BYTES = 128 * 1024
_SESSION_OUTPUT_BYTES = 2**20  # the files of a shell as JSON: at worst six times as many bytes
_GRACE_S = 5.0
_INSIDE = Path(inside.__file__).read_text(encoding="utf-8")
_FILES: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


class ProgramResult(NamedTuple):
    """How a program ended.

    output, errors: the ends of what it printed to either stream. failure: why it did not end by itself with
    the exit code 0, in a few words; None = it did. timed_out: its time was over.
    """

    output: str = ""
    errors: str = ""
    failure: str | None = None
    timed_out: bool = False


_RESULT: TypeAdapter[ProgramResult] = TypeAdapter(ProgramResult)


@dataclass(frozen=True)
class ShellTool(Toolkit):
    """Runs commands that a model wrote in a shell, in the sandbox of `PythonTool` (Linux).

        async with ShellTool().episode() as (shell,):
            print(await shell.invoke({"command": "echo 6 7 | tr ' ' '\\n' | wc -l"}))

    Every command is a shell of its own in one folder, whose files stay for the episode; variables and the
    working directory do not. When a command ends, all processes that it started are killed. The result is
    what it prints, both streams together, and its exit code where that is not 0. A command can use
    `programs`, Python and the standard library; it reaches no network, and no file or process of this
    machine. After `timeout_s` it is stopped. One that exceeds another limit ends the session, and the next
    command finds the first files (`ToolRejected` of the kinds of `PythonTool`).

    name: the name that the model calls.
    programs: names of programs in /usr/bin; None = those of `PROGRAMS` that this machine has.
    more_programs: names of others besides; each must be there.
    packages: distributions that Python may import.
    mounts: more files and folders that commands may read: (path on this machine, path inside).
    places: folders such as /app, which lead to those of the same name in the folder of the files, for
        programs that name files so. What stands at such a path already stays.
    timeout_s: wall-clock seconds of a command, at most; its processes have as many CPU seconds together.
    memory_mb, files_mb, processes: as for `PythonTool`, of all processes together.
    output_chars: characters of one result, at most; a longer one loses its middle.
    max_concurrency: commands that run at a time, over all episodes; None = twice the cores.
    sandbox: `auto`, `namespaces` or `bubblewrap`; a shell never runs unprotected.

    Raises:
        UserError: a limit is not positive, there is no shell among the programs, or the sandbox is `none`.
    """

    name: str = "shell"
    programs: Sequence[str] | None = None
    more_programs: Sequence[str] = ()
    packages: Sequence[str] = ()
    mounts: Sequence[tuple[str, str]] = ()
    places: Sequence[str] = ()
    timeout_s: float = 10.0
    memory_mb: int = 256
    files_mb: int = 32
    processes: int = 32
    output_chars: int = 10_000
    max_concurrency: int | None = None
    sandbox: Sandboxing = "auto"
    python: PythonTool = field(init=False, repr=False, compare=False)
    _gate: Gate = field(init=False, repr=False, compare=False)
    _program: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.sandbox == "none" or self.sandbox not in get_args(Sandboxing):
            raise UserError(
                f"the shell tool has no sandbox `{self.sandbox}`; write `auto`, `namespaces` or `bubblewrap`."
            )
        for name in ("timeout_s", "output_chars"):
            if not getattr(self, name) > 0:
                raise UserError(f"the shell tool needs {name} above 0, got {getattr(self, name)}.")
        programs = self.programs if self.programs is not None else tuple(filter(program_path, PROGRAMS))
        programs = tuple(dict.fromkeys((*programs, *self.more_programs)))
        shell = next((name for name in ("bash", "sh") if name in programs), None)
        if shell is None:
            raise UserError("the shell tool needs `bash` or `sh` among its programs; add one.")
        object.__setattr__(self, "_program", f"/usr/bin/{shell}")
        object.__setattr__(self, "_gate", Gate(self.max_concurrency or 2 * (os.cpu_count() or 1)))
        object.__setattr__(self, "python", self._sandboxed(programs))

    def _sandboxed(self, programs: Sequence[str]) -> PythonTool:
        return PythonTool(
            name=self.name,
            stateful=True,
            packages=self.packages,
            programs=programs,
            mounts=self.mounts,
            links=[(place, f"{inside.FOLDER}{place}") for place in self.places],
            preload=("subprocess",),
            wall_s=self.timeout_s + _GRACE_S,
            cpu_s=self.timeout_s,
            memory_mb=self.memory_mb,
            files_mb=self.files_mb,
            processes=self.processes,
            output_bytes=_SESSION_OUTPUT_BYTES,
            sandbox=self.sandbox,
        )

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Sequence[Tool]]:
        """The tool for one episode, whose folder is empty at first.

        Raises:
            UserError: the kernel refuses the sandbox; the sentence names what to change.
        """
        async with self.shell() as shell:
            yield (Tool.described(self.schema, shell.run, gate=self._gate),)

    def shell(self, files: Mapping[str, str | bytes] | None = None, prepare: str = "") -> Shell:
        """A shell for one episode, for environments that put files in and read them afterwards.

        files: the first files: path below the folder -> text, or bytes.
        prepare: a command that runs in the folder with these files before the first one of the model; where
            it fails, so does that one, as a `ToolError`.
        """
        return Shell(self, files or {}, prepare)

    @property
    def shell_path(self) -> str:
        """The file of the shell, in the sandbox."""
        return self._program

    @property
    def gate(self) -> Gate:
        """The slots of its commands."""
        return self._gate

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schema of its one tool."""
        return (self.schema,)

    @property
    def schema(self) -> ToolSchema:
        """The schema that the model reads."""
        description = "Run a command in a shell and return what it prints. Files stay for later commands."
        command: dict[str, JSON] = {"type": "string", "description": "A command, or several lines."}
        properties: JSON = {"command": command}
        parameters: dict[str, JSON] = {"type": "object", "properties": properties, "required": ["command"]}
        return ToolSchema(self.name, description, {**parameters, "additionalProperties": False})

    def text_of(self, result: PythonResult) -> str:
        """The text for the model.

        Raises:
            ToolRejected: a limit ended the session; the output comes before the sentence.
        """
        text = self._shortened(result.output.strip("\n"), result.dropped_bytes)
        if result.outcome == "done":
            return text or "(no output)"
        reasons = {
            "timeout": f"it ran longer than {self.python.wall_s:g} s",
            "cpu": f"its processes computed longer than {self.timeout_s:g} s",
            "memory": f"it used {result.detail or f'more than {self.memory_mb} MB of memory'}",
            "processes": f"it ran more than {self.processes} processes",
        }
        reason = reasons.get(result.outcome, "it ended the shell itself")
        sentence = f"The machine was stopped: {reason}. It starts again with its first files."
        raise ToolRejected("\n".join(filter(None, (text, sentence))), result.outcome)

    def _shortened(self, text: str, num_dropped: int) -> str:
        """The beginning and the end: errors and the results of tests come last."""
        if len(text) <= self.output_chars and not num_dropped:
            return text
        half = self.output_chars // 2
        lost = f"{max(len(text) - 2 * half, 0):,} characters"
        if num_dropped:
            lost += f" and the last {num_dropped:,} bytes"
        return f"{text[:half]}\n... {lost} are left out ...\n{text[-half:]}"


class Shell:
    """A shell with files of its own, for one episode. Create it with `ShellTool.shell`.

        async with ShellTool().shell({"notes/a.txt": "one"}) as shell:
            await shell.run("sed -i s/one/two/ notes/a.txt")
            assert await shell.files() == {"notes/a.txt": "two"}

    A process of the sandbox starts with the first command. Commands wait for each other.
    """

    def __init__(self, tool: ShellTool, files: Mapping[str, str | bytes], prepare: str = "") -> None:
        self._tool = tool
        self._first_files = dict(files)
        setup = f"{_INSIDE}\nput({self._first_files!r})"
        if prepare:
            setup += f"\nprepare({tool.shell_path!r}, {prepare!r})"
        self._interpreter = tool.python.interpreter(setup)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, command: str) -> str:
        """Run a command and return what it prints.

        Raises:
            ToolRejected: the command is too long, or exceeded a limit that ends the session.
            ToolError: the sandbox died.
        """
        text = command.encode("utf-8", "replace").decode()
        if len(text.encode()) > MOST_COMMAND_BYTES:
            raise ToolRejected(
                f"The command is too long; write at most {MOST_COMMAND_BYTES:,} bytes.", "length"
            )
        if "\0" in text:
            raise ToolRejected("The command has a null byte; leave it out.", "null")
        program = self._tool._program
        result = await self._interpreter.run(f"run({program!r}, {text!r}, {self._tool.timeout_s!r})")
        return self._tool.text_of(result)

    async def put(self, files: Mapping[str, str | bytes]) -> None:
        """Write more files: path below the folder -> text, or bytes.

        Raises:
            ToolError: the sandbox died.
        """
        await self._interpreter.run(f"put({dict(files)!r})")

    async def executed(
        self, command: str, variables: Mapping[str, str], timeout_s: float | None = None
    ) -> ProgramResult:
        """Run a command to its end, or to a limit; nobody is told what it prints.

        variables: of its environment, besides those of every command.
        timeout_s: where that is less than the tool's (seconds).

        Raises:
            ToolError: the sandbox died.
        """
        most_s = min(self._tool.timeout_s, timeout_s or self._tool.timeout_s)
        arguments = (self._tool.shell_path, command, most_s, dict(variables), MOST_ANSWER_BYTES)
        result = await self._interpreter.run(f"execute{arguments!r}")
        if result.outcome != "done":
            reason = result.detail or result.outcome
            return ProgramResult(failure=f"a limit: {reason}", timed_out=result.outcome == "timeout")
        try:
            return _RESULT.validate_json(result.output)
        except ValidationError:
            # Whoever can print in its place is the program itself.
            return ProgramResult(failure="it has printed in the place of its result")

    async def files(self) -> dict[str, str]:
        """The files: path below the folder -> text, bytes that are no UTF-8 replaced.

        Regular files only, in the order of their paths, up to `MOST_FILES` and `MOST_FILE_BYTES` together, at
        most ten folders deep; hidden folders, `__pycache__` and names that cannot be printed are left out.
        Where a limit ends the reading, there are none. They are what commands wrote: not trusted.

        Raises:
            ToolError: the sandbox died.
        """
        if not self._interpreter.has_state:
            return {
                path: contents if isinstance(contents, str) else contents.decode("utf-8", "replace")
                for path, contents in self._first_files.items()
            }
        result = await self._interpreter.run(f"show_files({MOST_FILES}, {MOST_FILE_BYTES})")
        try:
            return _FILES.validate_json(result.output)
        except ValidationError:
            return {}  # the model caused it, so it must not fail the episode

    async def close(self) -> None:
        """End all processes and delete the files. Closing twice is fine."""
        await self._interpreter.close()

"""A program in the sandbox of a shell, which may reach one server: a listening socket of the host.

The session has a network of its own with a loopback address and nothing else. The socket is made in there and
handed to the host, which accepts connections of the program and of nobody else; the program cannot listen
itself.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from agentrl.tools.shell.tool import Shell

MOST_ANSWER_BYTES = 64 * 1024


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


class SandboxedProgram(Shell):
    """A program with a folder of its own, for one episode. Call `listener`, then `executed`."""

    async def listener(self) -> socket.socket:
        """Start the sandbox; the socket that the program may connect to.

        Raises:
            ToolError: the sandbox died, or has no network.
            UserError: the kernel refuses the sandbox.
        """
        return await self._interpreter.listener()

    async def executed(self, command: str, variables: Mapping[str, str]) -> ProgramResult:
        """Run a command to its end, or to a limit.

        variables: of its environment, besides those of every command.

        Raises:
            ToolError: the sandbox died.
        """
        arguments = (self._tool.shell_path, command, self._tool.timeout_s, dict(variables), MOST_ANSWER_BYTES)
        result = await self._interpreter.run(f"execute{arguments!r}")
        if result.outcome != "done":
            reason = result.detail or result.outcome
            return ProgramResult(failure=f"a limit: {reason}", timed_out=result.outcome == "timeout")
        try:
            return _RESULT.validate_json(result.output)
        except ValidationError:
            # Whoever can print in its place is the program itself.
            return ProgramResult(failure="it has printed in the place of its result")

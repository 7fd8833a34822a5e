"""A program in the sandbox of a shell, which may reach one server: a listening socket of the host.

The session has a network of its own with a loopback address and nothing else. The socket is made in there and
handed to the host, which accepts connections of the program and of nobody else; the program cannot listen
itself.
"""

from __future__ import annotations

import socket

from agentrl.tools.shell.tool import Shell


class SandboxedProgram(Shell):
    """A program with a folder of its own, for one episode. Call `listener`, then `executed`."""

    async def listener(self) -> socket.socket:
        """Start the sandbox; the socket that the program may connect to.

        Raises:
            ToolError: the sandbox died, or has no network.
            UserError: the kernel refuses the sandbox.
        """
        return await self._interpreter.listener()

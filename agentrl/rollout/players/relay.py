"""A player in the process of an actor, on its machine. See `ray_players` for the driver's side.

The actor's process has a child, as a run on one machine has, and passes messages on as bytes: nothing is read
here. The child ends with its actor.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from agentrl.processes.child import Child

_SECRET = "RAY_AUTH_TOKEN"


class Relay:
    """Starts `python -m MODULE FD` as a child, whose output is the actor's."""

    def __init__(self, module: str) -> None:
        # Ray has read it, and no environment needs it.
        os.environ.pop(_SECRET, None)
        self._child = Child(module, (), None)
        self._socket = socket.socket(fileno=os.dup(self._child.pipe.fileno()))

    def pid(self) -> int:
        """The child's process on this machine."""
        return self._child.pid

    def send(self, data: bytes) -> None:
        """Send the next message to the child, unless it has ended."""
        with suppress(OSError):
            self._child.pipe.send_bytes(data)

    def receive(self) -> Sequence[bytes]:
        """What the child has sent since the last call, after a wait for something; () = it has ended."""
        received: list[bytes] = []
        with suppress(EOFError, OSError):
            received.append(self._child.pipe.recv_bytes())
            while self._child.pipe.poll():
                received.append(self._child.pipe.recv_bytes())
        return received

    def close(self) -> None:
        """Have the child read the end of its pipe."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Kill the child: one that stands still does not read that its pipe has ended."""
        self._child.end()

    def exit_description(self) -> str | None:
        """How the child ended; see `Child.exit_description`."""
        return self._child.exit_description()

"""The log of a process on another machine, copied into a file on this one.

consumes: the file on that machine. waits for: half a second. unblocked by: `close`. on shutdown: what is left
of the file is copied, where its machine still answers; then the file there is removed.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from agentrl.processes.ray.actor import Actor, on_node
from agentrl.processes.ray.host import Identity, LogReader
from agentrl.processes.ray.session import RaySession

_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
_PIECE_BYTES = 1 << 20


class LogMirror:
    """Copies the log of a process to `here`, from now on. name: of the actor that does, in Ray's lists."""

    def __init__(self, session: RaySession, name: str, of: Identity, here: Path) -> None:
        self._reader = Actor(LogReader, name=name, namespace=session.namespace, strategy=on_node(of.node))
        self._there, self._here, self._offset = of.log, here, 0
        self.is_lost = False
        self._copying = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="agentrl-log", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Copy all that the file has now; nothing where the machine does not answer, or the disk is full."""
        with suppress(OSError), self._copying, self._here.open("ab") as file:
            while piece := self._read():
                file.write(piece)
                self._offset += len(piece)

    def is_reachable(self) -> bool:
        """Whether the machine answers; nothing is read any more from one that does not."""
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            ray.get(self._reader.control("read", self._there, 0, 0), timeout=_TIMEOUT_S)
            return True
        self.is_lost = True
        return False

    def close(self) -> None:
        """Copy the rest, and remove the file there."""
        import ray
        from ray.exceptions import RayError

        self._closed.set()
        self._thread.join()
        # Each of its calls would wait for a machine that does not answer.
        if not self.is_lost and self.is_reachable():
            self.catch_up()
            with suppress(RayError):
                ray.get(self._reader.call("remove", self._there), timeout=_TIMEOUT_S)
        self._reader.kill()

    def _read(self) -> bytes:
        import ray
        from ray.exceptions import RayError

        if self.is_lost:
            return b""
        with suppress(RayError):
            piece = ray.get(
                self._reader.call("read", self._there, self._offset, _PIECE_BYTES), timeout=_TIMEOUT_S
            )
            assert isinstance(piece, bytes), piece
            return piece
        return b""

    def _follow(self) -> None:
        while not self._closed.wait(_INTERVAL_S):
            self.catch_up()

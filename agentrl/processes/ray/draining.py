"""The machines of a cluster that are going away, as Ray knows them: spot machines, machines that are drained.

consumes: Ray's list of draining machines, which a thread reads each second. waits for: the reply. unblocked
by: that, or the end of Ray. on shutdown: `followed` ends the thread.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

_POLL_S = 1.0
_JOIN_S = 5.0


class Draining:
    """The machines that are going away, by Ray's ids. Of a Ray of one machine there is never one."""

    def __init__(self) -> None:
        self._deadlines: Mapping[str, float] = {}

    def left_s(self, node: str) -> float | None:
        """How long a machine is still there (seconds; infinite where nobody knows); None = it stays."""
        deadline = self._deadlines.get(node)
        return None if deadline is None else max(0.0, deadline - time.time())

    async def of(self, node: str) -> float:
        """Wait until a machine is going away; how long it is still there (seconds)."""
        while (left_s := self.left_s(node)) is None:
            await asyncio.sleep(_POLL_S)
        return left_s

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what Ray knows, for the block; this process is connected to Ray in it."""
        is_over = threading.Event()
        self._read()
        thread = threading.Thread(target=self._follow, args=(is_over,), name="agentrl-draining", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(_JOIN_S)

    def _follow(self, is_over: threading.Event) -> None:
        while not is_over.wait(_POLL_S):
            self._read()

    def _read(self) -> None:
        from ray._private.state import state
        from ray.exceptions import RayError

        # Ray's head may be out of reach for a while: the next reply has it.
        with suppress(RayError):
            # Unix time in milliseconds; 0 = no deadline.
            deadlines = state.get_draining_nodes()
            self._deadlines = {node: at_ms / 1e3 if at_ms else math.inf for node, at_ms in deadlines.items()}


def in_words(left_s: float) -> str:
    """How long a machine is still there, for a sentence: ` in 58 s`, or nothing where nobody knows."""
    return "" if math.isinf(left_s) else f" in {left_s:.0f} s"

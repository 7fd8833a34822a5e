"""One rank's process: python -m agentrl.trainer.launch.rank FD LOCAL MODULE, with its end of a pipe."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType

from agentrl.trainer.launch.calls import Failed, serve

_END_S = 4.0
_WHY_CHARS = 300


def obey(pipe: Connection, local: int, preloaded: str) -> None:
    """Do what the driver calls for until it has gone; what goes wrong is told to it, and raised.

    local: this rank's number among those of its machine. preloaded: the module with its worker.
    """
    # Ctrl-C is for the driver, which ends its ranks in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("agentrl").setLevel(logging.INFO)
    threading.Thread(target=_end_with, args=(pipe.fileno(),), daemon=True).start()
    with suppress(EOFError, ConnectionError), _LastWord(pipe):
        serve(pipe, local, preloaded)


class _LastWord:
    """Tells the driver of what escapes, unless it is the driver that has gone."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, EOFError | ConnectionError):
            return
        first = next(iter(str(error).splitlines()), "")
        with suppress(OSError):
            self._pipe.send(Failed(f"{type(error).__name__}: {first}"[:_WHY_CHARS], time.time()))


def _end_with(pipe: int) -> None:
    """End this process soon after the driver, also where it is in the middle of something."""
    driver = select.poll()
    driver.register(pipe, select.POLLRDHUP)
    driver.poll()
    time.sleep(_END_S)
    os._exit(1)


if __name__ == "__main__":
    obey(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])

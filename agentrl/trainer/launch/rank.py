"""One rank's process: python -m agentrl.trainer.launch.rank FD LOCAL MODULE, with its end of a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from agentrl.processes import LastMessage, follow_driver
from agentrl.trainer.launch.calls import serve


def obey(pipe: Connection, local: int, preloaded: str) -> None:
    """Do what the driver calls for until it has gone; what goes wrong is sent to it, and raised.

    local: this rank's number among those of its machine. preloaded: the module with its worker.
    """
    follow_driver(pipe)
    with suppress(EOFError, ConnectionError), LastMessage(pipe):
        serve(pipe, local, preloaded)


if __name__ == "__main__":
    obey(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])

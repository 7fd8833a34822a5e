"""One rank's process: python -m agentrl.trainer.launch.rank FD LOCAL_RANK MODULE. FD: its end of the pipe."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from agentrl.processes import SendFailure, follow_driver
from agentrl.trainer.launch.calls import serve


def run_rank(pipe: Connection, local_rank: int, preloaded: str) -> None:
    """Serve the driver's calls until it closes the pipe; an error is sent to the driver, and raised.

    local_rank: this rank's number among those of its machine. preloaded: the module with its worker.
    """
    follow_driver(pipe)
    with suppress(EOFError, ConnectionError), SendFailure(pipe):
        serve(pipe, local_rank, preloaded)


if __name__ == "__main__":
    run_rank(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])

"""One rank's process: python -m agentrl.trainer.megatron.rank FD, with its end of a pipe."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from agentrl.trainer.megatron.calls import serve

if __name__ == "__main__":
    # Ctrl-C is for the driver, which ends its ranks in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, BrokenPipeError):
        serve(Connection(int(sys.argv[1])))

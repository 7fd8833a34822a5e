"""A rank's end of the pipe to its driver.

It is told the plan, its number and where all ranks meet; then it does what it is called for until the pipe is
closed.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import NamedTuple

from agentrl.trainer.megatron.launch.seats import is_loopback


class Failed(NamedTuple):
    """The last thing that a rank says."""

    why: str


def serve(pipe: Connection, local: int) -> None:
    """Be a rank until the driver has gone. local: its number among the ranks of its machine.

    Raises:
        EOFError: it has.
    """
    import torch

    from agentrl.trainer.megatron.launch.ranks import joined
    from agentrl.trainer.megatron.launch.rooms import sent
    from agentrl.trainer.megatron.worker import Worker

    plan, number, meeting = pipe.recv()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    if is_loopback(meeting.host):
        # Otherwise gloo listens where the machine's name leads.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with joined(plan.layout, number, store=meeting.store(), local=local):
        worker = Worker(plan)
        pipe.send(None)
        while True:
            method, args = pipe.recv()
            answer = getattr(worker, method)(*args)
            pipe.send(sent(pipe, answer) if isinstance(answer, Generator) else answer)

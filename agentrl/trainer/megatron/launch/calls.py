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
    """The last thing that a rank says. at_s: when it went wrong, in seconds since 1970."""

    why: str
    at_s: float


def serve(pipe: Connection, local: int) -> None:
    """Be a rank until the driver has gone. local: its number among the ranks of its machine.

    Raises:
        EOFError, ConnectionError: it went before this rank was up, or while it was told something.
    """
    import torch

    from agentrl.trainer.megatron.launch.ranks import joined
    from agentrl.trainer.megatron.launch.rooms import sent
    from agentrl.trainer.megatron.worker import Worker

    plan, number, meeting = pipe.recv()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    if is_loopback(meeting.host):
        # Otherwise gloo listens where the machine's name leads, and NCCL anywhere but here.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    with joined(plan.layout, number, store=meeting.store(), local=local):
        worker = Worker(plan)
        pipe.send(None)
        while (call := _heard(pipe)) is not None:
            method, args = call
            answer = getattr(worker, method)(*args)
            pipe.send(sent(pipe, answer) if isinstance(answer, Generator) else answer)


def _heard(pipe: Connection) -> tuple[str, tuple[object, ...]] | None:
    """What the driver calls for; None when it has gone."""
    try:
        call: tuple[str, tuple[object, ...]] = pipe.recv()
    except (EOFError, ConnectionError):
        return None
    return call

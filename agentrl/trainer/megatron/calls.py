"""A rank's end of the pipe to its driver.

It is told the plan, its number and where all ranks meet; then it does what it is called for until the pipe is
closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple


class Part(NamedTuple):
    """One of several things that a rank answers with."""

    value: object


def serve(pipe: Connection) -> None:
    """Be a rank until the driver has gone.

    Raises:
        EOFError: it has.
    """
    import torch

    from agentrl.trainer.megatron.ranks import joined
    from agentrl.trainer.megatron.worker import Worker

    plan, number, meeting = pipe.recv()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with joined(plan.layout, number, meeting=meeting):
        worker = Worker(plan)
        pipe.send(None)
        while True:
            method, args = pipe.recv()
            answer = getattr(worker, method)(*args)
            if isinstance(answer, Iterator):
                for part in answer:
                    pipe.send(Part(part))
                answer = None
            pipe.send(answer)

"""A rank's end of the pipe to its driver.

The first message holds the rank's number and the address of the rendezvous. Every later one is a call, until
the pipe is closed: the rank begins a plan, or calls a method of that plan's worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import cast

from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.shared_buffers import send_buckets

BEGIN = "begin"
"""The call that sends a rank a new plan, in place of a method of its worker."""


def serve(pipe: Connection, local_rank: int, preloaded: str) -> None:
    """Run as a rank until the driver closes the pipe. local_rank: its number among the ranks of its machine.

    preloaded: the module with the worker, imported while the driver does other work.

    Raises:
        EOFError, ConnectionError: the driver closed the pipe before this rank was up, or during a reply.
    """
    importlib.import_module(preloaded)
    rank, rendezvous = pipe.recv()
    place = RankPlace(rank, local_rank, rendezvous)
    with ExitStack() as stack:
        worker: object = None
        while (call := _next_call(pipe)) is not None:
            method, args = call
            if method == BEGIN:
                # The networks of the plan before are freed first.
                worker = None
                stack.close()
                (plan,) = cast(tuple[RankPlan], args)
                worker = stack.enter_context(plan.worker(place))
                pipe.send(None)
                continue
            reply = getattr(worker, method)(*args)
            pipe.send(send_buckets(pipe, reply) if isinstance(reply, Generator) else reply)


def _next_call(pipe: Connection) -> tuple[str, tuple[object, ...]] | None:
    """The method that the driver calls, with its arguments; None when the pipe is closed."""
    try:
        call: tuple[str, tuple[object, ...]] = pipe.recv()
    except (EOFError, ConnectionError):
        return None
    return call

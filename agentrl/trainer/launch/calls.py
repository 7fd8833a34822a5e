"""A rank's end of the pipe to its driver.

It is told its number and where all ranks meet; then it does what it is called for until the pipe is closed:
begins a plan, or calls a method of that plan's worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import cast

from agentrl.trainer.launch.shared_buffers import send_buckets
from agentrl.trainer.launch.work import RankPlace, Work

BEGIN = "begin"
"""Names the call that gives a rank a new plan, in place of a method of its worker."""


def serve(pipe: Connection, local: int, preloaded: str) -> None:
    """Be a rank until the driver has gone. local: its number among the ranks of its machine.

    preloaded: the module with the worker, imported while the driver does other things.

    Raises:
        EOFError, ConnectionError: it went before this rank was up, or while it was told something.
    """
    importlib.import_module(preloaded)
    number, meeting = pipe.recv()
    place = RankPlace(number, local, meeting)
    with ExitStack() as stack:
        worker: object = None
        while (call := _heard(pipe)) is not None:
            method, args = call
            if method == BEGIN:
                # The networks of the plan before are let go of first.
                worker = None
                stack.close()
                (plan,) = cast(tuple[Work], args)
                worker = stack.enter_context(plan.working(place))
                pipe.send(None)
                continue
            answer = getattr(worker, method)(*args)
            pipe.send(send_buckets(pipe, answer) if isinstance(answer, Generator) else answer)


def _heard(pipe: Connection) -> tuple[str, tuple[object, ...]] | None:
    """What the driver calls for; None when it has gone."""
    try:
        call: tuple[str, tuple[object, ...]] = pipe.recv()
    except (EOFError, ConnectionError):
        return None
    return call

"""The calls that a rank serves, and a rank's end of the pipe to its driver.

On a pipe, the first message holds the rank's number and where the rendezvous is. Every later one is a
call, until the pipe is closed: the rank begins a plan, or calls a method of that plan's worker. The first
message of a rank is the reply of a call that nobody makes: it has imported its worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import ExitStack
from itertools import count
from multiprocessing.connection import Connection
from time import perf_counter
from typing import NamedTuple, cast

from agentrl.records.clock import Moment, now
from agentrl.trainer.launch.phases import reporting
from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.shared_buffers import send_buckets

BEGIN = "begin"
"""The call that sends a rank a new plan, in place of a method of its worker."""
IMPORT = "import"
"""The first call of a rank, which it makes itself: it imports the module with its worker."""


class Reply(NamedTuple):
    """What a call of a rank returned. began_s, ended: its begin and its end, by the rank's clock."""

    value: object
    method: str
    began_s: float
    ended: Moment


class RankCalls:
    """The calls of one rank, wherever they come from: of its plan, and of the worker of that plan."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._plans = count()
        self._stack = ExitStack()
        self._worker: object = None

    def begin(self, plan: RankPlan) -> None:
        """Build the worker of a plan; the networks of the plan before are freed first."""
        self.close()
        place, number = self._place, next(self._plans)
        if place.rendezvous is not None:
            place = place._replace(rendezvous=place.rendezvous._replace(plan=number))
        self._worker = self._stack.enter_context(plan.worker(place))

    def call(self, method: str, *args: object) -> object:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*args)

    def close(self) -> None:
        """Close the worker."""
        self._worker = None
        self._stack.close()


def serve(pipe: Connection, local_rank: int, preloaded: str) -> None:
    """Run as a rank until the driver closes the pipe. local_rank: its number among the ranks of its machine.

    preloaded: the module with the worker, imported while the driver does other work.

    Raises:
        EOFError, ConnectionError: the driver closed the pipe before this rank was up, or during a reply.
    """
    started_s = perf_counter()
    importlib.import_module(preloaded)
    pipe.send(Reply(None, IMPORT, started_s, now()))
    rank, rendezvous = pipe.recv()
    with ExitStack() as stack, reporting(pipe.send):
        calls = RankCalls(RankPlace(rank, local_rank, rendezvous))
        stack.callback(calls.close)
        while (call := _next_call(pipe)) is not None:
            (method, args), began_s = call, perf_counter()
            if method == BEGIN:
                (plan,) = cast(tuple[RankPlan], args)
                calls.begin(plan)
                pipe.send(Reply(None, method, began_s, now()))
                continue
            value = calls.call(method, *args)
            if isinstance(value, Generator):
                value = send_buckets(pipe, value)
            pipe.send(Reply(value, method, began_s, now()))


def _next_call(pipe: Connection) -> tuple[str, tuple[object, ...]] | None:
    """The method that the driver calls, with its arguments; None when the pipe is closed."""
    try:
        call: tuple[str, tuple[object, ...]] = pipe.recv()
    except (EOFError, ConnectionError):
        return None
    return call

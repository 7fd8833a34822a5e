"""Where a machine that a run needs is going away, the run stops before that, as at a SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentrl.assembly.cluster import RunCluster
from agentrl.errors import RemoteError
from agentrl.processes.ray.draining import in_words


class MachineLeavingError(RemoteError):
    """A machine that the run needs is going away; the run has stopped in good order.

    may_move: it can go on at once, on the machines that are left; its own process cannot move.
    """

    def __init__(self, message: str, *, may_move: bool = False) -> None:
        super().__init__(message)
        self.may_move = may_move


@asynccontextmanager
async def stopped_in_time(cluster: RunCluster | None, on_event: Callable[[str], None]) -> AsyncIterator[None]:
    """Cancel the block where a machine of the trainer's ranks, or that of this process, is going away.

    Raises:
        MachineLeavingError: it is; the block has ended.
    """
    task = asyncio.current_task()
    assert task is not None, "a run is a task"
    leaving: list[MachineLeavingError] = []

    async def watch(cluster: RunCluster, node: str, what: str) -> None:
        left_s = await cluster.session.draining.of(node)
        if not leaving:
            on_event(f"{what} is going away{in_words(left_s)}: the run stops before that.")
            leaving.append(
                MachineLeavingError(f"{what} is going away.", may_move=node != cluster.session.node)
            )
            task.cancel()

    needed = {} if cluster is None else cluster.needed
    watches = [asyncio.create_task(watch(cluster, *each)) for each in needed.items() if cluster is not None]
    try:
        yield
    except asyncio.CancelledError:
        # Ctrl-C and SIGTERM cancel it, too.
        if not leaving or task.uncancel():
            raise
        raise leaving[0] from None
    finally:
        for each in watches:
            each.cancel()

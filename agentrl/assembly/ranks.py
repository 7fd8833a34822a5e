"""Who is who where a launcher such as torchrun starts this command for every rank; loads no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentrl.assembly.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.trainer.launch.seats import Seat, taken_seat

if TYPE_CHECKING:
    from agentrl.trainer.launch.launched import LaunchedRanks


def seat_of(config: RunConfig) -> Seat | None:
    """This process's place among the ranks; None where nobody launched any, or the trainer has none.

    Raises:
        ConfigError: the environment is incomplete, or says something else than the layout.
    """
    if config.trainer.trainer != "megatron":
        return None
    return taken_seat(config.megatron, os.environ)


def be_rank(seat: Seat) -> None:
    """Be a rank other than 0 until the run has ended.

    Raises:
        ConfigError: there is no rank 0.
    """
    from agentrl.trainer.launch.launched import serve_launched
    from agentrl.trainer.megatron.plan import WORKER

    serve_launched(seat, WORKER)


@contextmanager
def gathered_ranks(config: RunConfig) -> Iterator[LaunchedRanks | None]:
    """The ranks that were launched beside this process; None where it starts all of them itself.

    Raises:
        UserError: this process is a rank, not the run; or the others did not come.
        TrainerError: a rank has gone before all were there.
    """
    seat = seat_of(config)
    if seat is None:
        yield None
        return
    if seat.number:
        raise ConfigError(f"this process is rank {seat.number} of a run; start it as `agentrl train`.")
    from agentrl.trainer.launch.launched import gathered

    # What is started from here, an inference server say, has stores of its own.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with gathered(seat) as launched:
        yield launched

"""A player of the benchmark of players: python -m benchmarks.playing_process FD."""

from __future__ import annotations

import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from agentrl.clocks import Waits
from agentrl.protocols import Policy
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players.hosted import main
from benchmarks.instant import Player


class PlayingPlan(NamedTuple):
    """work: of a tool call. calls: of an episode. own_engine: whether the player has an instant engine."""

    work: int
    calls: int
    own_engine: bool


@asynccontextmanager
async def opened(plan: bytes, policy: Policy, absence: Waits) -> AsyncIterator[GroupPlayer]:
    """The player of a plan."""
    del absence
    work, calls, own_engine = PlayingPlan(*pickle.loads(plan))
    yield Player(work=work, calls=calls, policy=None if own_engine else policy).group_player


if __name__ == "__main__":
    main(int(sys.argv[1]), opened)

"""A player of the benchmark of players: python -m benchmarks.playing_process FD."""

from __future__ import annotations

import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from agentrl.engine.sglang import SGLangPolicy
from agentrl.rollout.players.hosted import HostedPlayer, main
from agentrl.runtime.clocks import Waits
from agentrl.types.seams import Policy
from benchmarks.instant import Player


class PlayingPlan(NamedTuple):
    """work: of a tool call. calls: of an episode. own_engine: whether the player has an instant engine.

    url: of a server that it sends its requests to; "" = none. slots: requests at once there (count).
    """

    work: int
    calls: int
    own_engine: bool
    url: str = ""
    slots: int = 1


@asynccontextmanager
async def opened(plan: bytes, policy: Policy, absence: Waits) -> AsyncIterator[HostedPlayer]:
    """The player of a plan."""
    del absence
    work, calls, own_engine, url, slots = PlayingPlan(*pickle.loads(plan))
    own = SGLangPolicy(url, max_concurrency=slots) if url else None
    used = None if own_engine else own or policy
    yield HostedPlayer(Player(work=work, calls=calls, policy=used).group_player, own)


if __name__ == "__main__":
    main(int(sys.argv[1]), opened)

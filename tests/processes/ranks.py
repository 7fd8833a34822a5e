"""Ranks on Ray."""

from __future__ import annotations

from agentrl.processes.ray.actors import Actors
from agentrl.trainer.launch.processes import Processes


def ranks_on(session, placement, world_size, folder, **settings):
    """Ranks in the allocations of a placement."""
    places = Actors(session, placement.group, placement.ranks[:world_size])
    return Processes(world_size, folder, places=places, **settings)

"""What the sections of the benchmark of Ray share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from agentrl.processes.config import ClusterConfig
from agentrl.processes.placement import RankNeeds, layout_of
from agentrl.processes.ray.actors import Actors
from agentrl.processes.ray.placement import RayPlacement, placed
from agentrl.processes.ray.session import RaySession, connected
from agentrl.types import JSON
from benchmarks.models import small_even

_PLACEMENT_S = 60.0


@dataclass(frozen=True, slots=True)
class RayBench:
    """episodes: of a step (count). tokens: of an episode; long_tokens: where the hand-off is measured.

    model: of the published weights. node_steps: steps of a run after it has lost a machine (count).
    """

    episodes: int = 256
    tokens: int = 1024
    long_tokens: int = 16_384
    model: Callable[[], PreTrainedModel] = small_even
    repeats: int = 7
    node_steps: int = 4
    node_repeats: int = 5


class Cluster:
    """What a section may use: a Ray of this machine, and a placement with one rank, from their first use on.

    folder: for logs. stack: ends both.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack

    @property
    def places(self) -> Actors:
        """Where the rank is started."""
        return Actors(self.session, self.placement.group, self.placement.ranks)

    @cached_property
    def session(self) -> RaySession:
        """The connection to that Ray."""
        return self._stack.enter_context(connected(ClusterConfig(cluster="ray"), self.folder, os.environ))

    @cached_property
    def placement(self) -> RayPlacement:
        """The place of the rank."""
        placement = placed(self.session, layout_of(RankNeeds(1, 1, 0.5, 0), (), colocate=False), _PLACEMENT_S)
        self._stack.callback(placement.remove)
        return placement


class Section(Protocol):
    """Measures one thing, and returns its summary and its rows."""

    async def __call__(self, cluster: Cluster, bench: RayBench) -> Mapping[str, JSON]:
        """The section: `summary`, and whatever shows every repeat."""

"""What the sections of the benchmark of Ray share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from transformers import PreTrainedModel

from agentrl.cluster.ray.placement import RayPlacement
from agentrl.cluster.ray.session import RaySession
from agentrl.types import JSON
from benchmarks.megatron.settings import small_even


@dataclass(frozen=True, slots=True)
class RayBench:
    """episodes: of a step (count). tokens: of an episode; long_tokens: where the hand-off is measured.

    model: of the published weights.
    """

    episodes: int = 256
    tokens: int = 1024
    long_tokens: int = 16_384
    model: Callable[[], PreTrainedModel] = small_even
    repeats: int = 7


class Cluster(NamedTuple):
    """What a section may use: a placement with one rank. folder: for logs."""

    session: RaySession
    placement: RayPlacement
    folder: Path


class Section(Protocol):
    """Measures one thing, and returns its summary and its rows."""

    async def __call__(self, cluster: Cluster, bench: RayBench) -> Mapping[str, JSON]:
        """The section: `summary`, and whatever shows every repeat."""

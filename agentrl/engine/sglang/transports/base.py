"""How weights get from the trainer's process into servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from agentrl.engine.sglang.control import Server
from agentrl.protocols import Bucket, TensorSpec


class Delivery(NamedTuple):
    """All weights of one version. checksum: the trainer's, as `agentrl.weights.checksum` computes it."""

    version: int
    manifest: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    checksum: int


class Loaded(NamedTuple):
    """What is known of the weights that a server holds after a delivery.

    checksum: of what was read back from the model in its memory; None = only that the server took everything.
    unread: how many tensors of the checksum were not read back, but taken as they arrived (count).
    """

    checksum: int | None
    unread: int = 0


class Transport(Protocol):
    """A way of weights into servers that are paused. It sets no versions and resumes nothing.

    Raises, from every call:
        EngineUnavailableError: a server is not there, broke off, or took too long.
        EngineError: a server refused, or this way does not lead to it.
    """

    async def open(self, servers: Sequence[Server]) -> None:
        """See that the way leads to these servers; while they still serve."""

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Bring all weights of a delivery into all of these servers."""

    async def close(self) -> None:
        """Leave nothing behind: no file, no group."""

"""Weights on their way from a trainer to engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

R = TypeVar("R")


class TensorSpec(NamedTuple):
    """A tensor by its Hugging Face name. dtype: as torch prints it, without `torch.`."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class MemoryFile(Protocol):
    """Memory that other processes of this user can open, at `path`, as long as this object exists."""

    path: str


class Bucket(NamedTuple):
    """Some complete tensors, one after another. data: uint8 [sum of their bytes].

    file: of shared memory that begins with these bytes; None = they are in memory of this process alone.
    """

    tensors: tuple[TensorSpec, ...]
    data: npt.NDArray[np.uint8]
    file: MemoryFile | None = None


class DeviceHandle(NamedTuple):
    """Memory of a device, for other processes of this machine that compute on one; plain values.

    num_bytes: its size. cuda: the handle of CUDA's IPC, in hexadecimal digits. device: the UUID of the card.
    path: of a file in shared memory instead, for a device that has no memory of its own.
    """

    num_bytes: int
    cuda: str = ""
    device: str = ""
    path: str = ""


class DevicePart(NamedTuple):
    """A bucket in the memory of a device. start: of its first byte there; its tensors follow end to end.

    content_hash: of its bytes, see `agentrl.weights.device`.
    """

    tensors: tuple[TensorSpec, ...]
    start: int
    content_hash: int


class DeviceWeights(NamedTuple):
    """All tensors of a version, in the memory of a device of the process that gathered them."""

    handle: DeviceHandle
    parts: tuple[DevicePart, ...]


class WeightTransaction(Protocol):
    """New weights that arrive. Leaving without commit keeps the old version serving."""

    async def put(self, bucket: Bucket) -> None:
        """Stage some tensors."""

    async def commit(self, checksum: int) -> None:
        """Pause, swap, compare the checksum of what was loaded, set the version, resume.

        Raises:
            EngineError: tensors are missing or the checksum differs; the old version serves on.
        """


class WeightSink(Protocol):
    """Takes new weights."""

    def begin(
        self, manifest: Sequence[TensorSpec], version: int
    ) -> AbstractAsyncContextManager[WeightTransaction]:
        """Begin `version`; `manifest` lists every tensor that will be put."""


Work: TypeAlias = Callable[[Sequence[Bucket]], R]
"""Work on the buckets of a snapshot."""


class Snapshot(Protocol):
    """All tensors of one version, in the memory of the process that gathered them.

    That may be a trainer's rank on another machine: transports send their work there, and the tensors do not
    pass through this process.
    """

    @property
    def parts(self) -> Sequence[Sequence[TensorSpec]]:
        """The tensors of each bucket."""

    @property
    def checksum(self) -> int:
        """Of all tensors, as `agentrl.weights.checksum` computes it; on a device, `device_checksum`."""

    @property
    def not_finite(self) -> str | None:
        """The first tensor that holds a NaN or an infinity; None = all numbers are finite."""

    @property
    def process(self) -> str:
        """The process that has it: the same text for two snapshots in one process."""

    @property
    def is_here(self) -> bool:
        """Whether that process is on this machine."""

    @property
    def device(self) -> DeviceWeights | None:
        """Where they are in the memory of a device; None = they are in that of the host.

        Of the former, `run` and `buckets` make copies in the host's memory when they are first called.
        """

    async def on_host(self) -> Snapshot:
        """The same tensors in the host's memory, with the checksum of those; itself, if they are there.

        Raises:
            TrainerError: that process has gone.
        """

    async def run(self, work: Work[R]) -> R:
        """Call `work` with the buckets, in a thread of that process; the work is pickled on the way.

        An `AgentRLError` that it raises is raised here.

        Raises:
            TrainerError: that process has gone.
        """

    async def buckets(self) -> Sequence[Bucket]:
        """The buckets, in this process; of another one they are copied.

        Raises:
            TrainerError: that process has gone.
        """

    def free(self) -> None:
        """Free the memory; nothing else may be called afterwards."""


@runtime_checkable
class SnapshotSink(WeightSink, Protocol):
    """A sink whose receivers get the tensors from the process that has them.

    takes_device_memory: whether they can, out of the memory of a device.
    """

    @property
    def takes_device_memory(self) -> bool:
        """See above."""

    async def load(self, snapshot: Snapshot, version: int) -> None:
        """Serve a snapshot as `version`.

        Raises:
            EngineError: the old version serves on.
            TrainerError: the process with the snapshot has gone.
        """

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether it serves this snapshot, and will free it after a later version; else its owner does."""


@runtime_checkable
class AdapterSink(Protocol):
    """A sink that may take the policy's adapters alone, by the names that files of them have."""

    @property
    def takes_adapters(self) -> bool:
        """Whether it does, in place of the weights."""

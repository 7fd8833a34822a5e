"""Weights through shared memory, for servers on this machine: one copy in, one copy out.

The process that has the weights writes them, if it is on this machine, too.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.base import Delivery, Loaded, on_this_machine, results_of
from agentrl.engine.sglang.transports.inside import (
    LOADER,
    LOADER_FOLDER,
    call_loader,
    ranks_with_loader,
    read_back,
    shared_file,
    sweep,
)
from agentrl.errors import EngineError
from agentrl.protocols import Bucket, Snapshot, TensorSpec
from agentrl.types import JSON
from agentrl.weights.checksum import BucketChecksums, bucket_checksums, digest, sum_digests
from agentrl.weights.codec import size_of, slices, torch_dtype
from agentrl.weights.shared import SHARED

_ALIGNMENT = 64


class _StagedFile(NamedTuple):
    """A bucket as a file that servers map. digests, crcs: of its tensors, read from the file."""

    path: Path
    tensors: JSON
    digests: list[int]
    crcs: dict[str, int]


class _StagedDelivery(NamedTuple):
    """A delivery, and all of its buckets as files."""

    delivery: Delivery
    files: list[_StagedFile]


class SharedMemory:
    """Writes each bucket once to a shared memory file, which the loader inside every server maps and loads.

    All files are written, and their checksum is compared, while the servers serve. A bucket that is in shared
    memory already gets a name there, and is not copied. Paused, each server maps
    them, copies them into its model and compares the two. Where they do not fit into the shared memory all at
    once, they are written one after the other while the servers are paused.

    The servers need `--custom-weight-loader agentrl_sglang.load`, and LOADER_FOLDER on their PYTHONPATH. With
    tp_size = 1 the model's tensors are compared; with more, those that each rank received.

    folder: of the shared memory files. The files of a killed trainer are removed at the next open.
    """

    def __init__(self, folder: Path = SHARED) -> None:
        self._folder = folder
        self._ranks: dict[Server, int] = {}
        self._staged: _StagedDelivery | None = None

    async def open(self, servers: Sequence[Server], snapshot: Snapshot) -> None:
        """Check that every server has the loader.

        Raises:
            EngineError: a server does not have it.
        """
        del snapshot
        sweep(self._folder)
        ranks = await asyncio.gather(*(ranks_with_loader(server) for server in servers))
        self._ranks = dict(zip(servers, ranks, strict=True))
        for server, count in self._ranks.items():
            if not count:
                raise EngineError(
                    f"{server.url} cannot load weights out of shared memory; start it with PYTHONPATH="
                    f"{LOADER_FOLDER} and `--custom-weight-loader {LOADER}`, or use another transport."
                )

    @asynccontextmanager
    async def staged(self, servers: Sequence[Server], delivery: Delivery) -> AsyncIterator[None]:
        """Write all files, if they fit.

        Raises:
            EngineError: the files hold other weights than the delivery's checksum is of.
        """
        with_crcs = any(self._ranks[server] > 1 for server in servers)
        snapshot = await on_this_machine(delivery.snapshot)
        with ExitStack() as stack:
            files = []
            # What does not fit is written by `send`.
            with suppress(EngineError):
                for number in range(len(snapshot.parts)):
                    path = stack.enter_context(shared_file(self._folder))
                    files.append(await snapshot.run(partial(_stage_bucket, path, number, with_crcs)))
            if len(files) == len(snapshot.parts):
                if sum_digests(digest for file in files for digest in file.digests) != delivery.checksum:
                    raise EngineError(
                        f"{self._folder} holds other weights than version {delivery.version} has; send them "
                        "again."
                    )
                self._staged = _StagedDelivery(delivery, files)
            else:
                stack.close()
            try:
                yield
            finally:
                self._staged = None

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Load all weights into all servers, and compare them there with those that were sent.

        Raises:
            EngineError: a server did not load them, or a bucket cannot be written.
        """
        staged = self._staged
        if staged is not None and staged.delivery is delivery:
            loading = [self._load_staged(server, delivery, staged.files) for server in servers]
            return dict(zip(servers, await results_of(loading), strict=True))
        expected = BucketChecksums({}, 0)
        snapshot = await on_this_machine(delivery.snapshot)
        for number in range(len(snapshot.parts)):
            with shared_file(self._folder) as path:
                tensors, checksums = await asyncio.gather(
                    snapshot.run(partial(_write_bucket, path, number)),
                    snapshot.run(partial(_checksums, number)),
                )
                calls = [self._load(server, checksums.crcs, path, tensors) for server in servers]
                # All calls must end before the file is removed: a server may be mapping it.
                await results_of(calls)
            expected = BucketChecksums(
                {**expected.crcs, **checksums.crcs}, sum_digests([expected.checksum, checksums.checksum])
            )
        loaded = [self._loaded(server, delivery, expected) for server in servers]
        return dict(zip(servers, await results_of(loaded), strict=True))

    async def close(self) -> None:
        """Forget the servers; every file is removed already."""
        self._ranks = {}

    async def _load_staged(self, server: Server, delivery: Delivery, files: Sequence[_StagedFile]) -> Loaded:
        """Have a server load all files; in one call, unless its ranks hold shards."""
        if self._ranks[server] > 1:
            for file in files:
                await self._load(server, file.crcs, file.path, file.tensors)
            return Loaded(delivery.checksum, len(delivery.manifest))
        paths: JSON = [[str(file.path), file.tensors] for file in files]
        (unread,) = await call_loader(server, 1, {"action": "load_all", "files": paths}, self._folder)
        return Loaded(delivery.checksum, len(unread))

    async def _load(self, server: Server, crcs: Mapping[str, int], path: Path, tensors: JSON) -> None:
        """Have a server load a file. Ranks with shards are not read back: they report what they received."""
        ranks = self._ranks[server]
        message: dict[str, JSON] = {
            "action": "load",
            "file": str(path),
            "tensors": tensors,
            "whole": ranks == 1,
        }
        reports = await call_loader(server, ranks, message, self._folder)
        if any(report != reports[0] for report in reports):
            raise EngineError(f"the ranks of {server.url} did not get the same weights; send them again.")
        received = {name: crc.crc for name, crc in reports[0].items() if crc is not None}
        if ranks > 1 and received != crcs:
            raise EngineError(f"weights arrived damaged in {server.url}; send them again.")

    async def _loaded(self, server: Server, delivery: Delivery, expected: BucketChecksums) -> Loaded:
        if self._ranks[server] == 1:
            return await read_back(server, delivery, expected, self._folder)
        return Loaded(expected.checksum, len(delivery.manifest))


def _stage_bucket(path: Path, number: int, with_crcs: bool, buckets: Sequence[Bucket]) -> _StagedFile:
    """Write a bucket's tensors, and compute checksums of what the file then holds.

    Raises:
        EngineError: the file system is full.
    """
    bucket = buckets[number]
    if _is_linked(bucket, path):
        tensors, written = _described(bucket.tensors, alignment=1), list(slices(bucket))
    else:
        tensors = _write_bucket(path, number, buckets)
        data, (starts, _) = np.memmap(path, np.uint8, mode="r"), _offsets(bucket.tensors, _ALIGNMENT)
        written = [
            (spec, data[start : start + size_of(spec)])
            for spec, start in zip(bucket.tensors, starts, strict=True)
        ]
    crcs = {spec.name: zlib.crc32(held.data) for spec, held in written} if with_crcs else {}
    return _StagedFile(path, tensors, [digest(spec, held) for spec, held in written], crcs)


def _is_linked(bucket: Bucket, path: Path) -> bool:
    """Give a bucket's own memory this name, if it has the layout that the loader needs, and can have one."""
    if bucket.file is None or not len(bucket.data):
        return False
    starts, _ = _offsets(bucket.tensors, 1)
    sizes = [torch_dtype(spec.dtype).itemsize for spec in bucket.tensors]
    if any(start % size for start, size in zip(starts, sizes, strict=True)):
        return False
    return bucket.file.link(path)


def _offsets(tensors: Sequence[TensorSpec], alignment: int) -> tuple[list[int], int]:
    """Where each tensor begins in a file, and the end of the file, aligned."""
    starts, end = [], 0
    for spec in tensors:
        starts.append(end)
        end = -(-(end + size_of(spec)) // alignment) * alignment
    return starts, end


def _described(tensors: Sequence[TensorSpec], alignment: int) -> JSON:
    """Name, shape, dtype and offset of each tensor, as the loader reads them."""
    starts, _ = _offsets(tensors, alignment)
    return [
        [spec.name, list(spec.shape), spec.dtype, start] for spec, start in zip(tensors, starts, strict=True)
    ]


def _checksums(number: int, buckets: Sequence[Bucket]) -> BucketChecksums:
    return bucket_checksums([buckets[number]])


def _write_bucket(path: Path, number: int, buckets: Sequence[Bucket]) -> JSON:
    """Write a bucket's tensors, aligned; returns name, shape, dtype and offset of each.

    Raises:
        EngineError: the file system is full.
    """
    starts, end = _offsets(buckets[number].tensors, _ALIGNMENT)
    try:
        with path.open("wb", buffering=0) as file:
            for (_, data), start in zip(slices(buckets[number]), starts, strict=True):
                file.seek(start)
                remaining = data.data
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            # The file has at least one block: an empty file cannot be mapped.
            file.truncate(max(end, _ALIGNMENT))
    except OSError as error:
        raise EngineError(
            f"{path.parent} is too full for a bucket ({error.strerror}); send smaller ones."
        ) from error
    return _described(buckets[number].tensors, _ALIGNMENT)

"""Weights through shared memory, for servers on the trainer's machine: one copy in, one copy out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.base import Delivery, Loaded, results_of
from agentrl.engine.sglang.transports.inside import (
    LOADER,
    LOADER_FOLDER,
    SHARED,
    call_loader,
    ranks_with_loader,
    read_back,
    shared_file,
    sweep,
)
from agentrl.errors import EngineError
from agentrl.protocols import Bucket
from agentrl.types import JSON
from agentrl.weights.checksum import BucketChecksums, bucket_checksums, sum_digests
from agentrl.weights.codec import slices

_ALIGNMENT = 64


class SharedMemory:
    """Writes each bucket once to a shared memory file, which the loader inside every server maps and loads.

    The servers need `--custom-weight-loader agentrl_sglang.load`, and LOADER_FOLDER on their PYTHONPATH. With
    tp_size = 1 the model's tensors are read back and compared; with more, those that each rank received.

    folder: of the shared memory files. The files of a killed trainer are removed at the next open.
    """

    def __init__(self, folder: Path = SHARED) -> None:
        self._folder = folder
        self._ranks: dict[Server, int] = {}

    async def open(self, servers: Sequence[Server]) -> None:
        """Check that every server has the loader.

        Raises:
            EngineError: a server does not have it.
        """
        sweep(self._folder)
        ranks = await asyncio.gather(*(ranks_with_loader(server) for server in servers))
        self._ranks = dict(zip(servers, ranks, strict=True))
        for server, count in self._ranks.items():
            if not count:
                raise EngineError(
                    f"{server.url} cannot load weights out of shared memory; start it with PYTHONPATH="
                    f"{LOADER_FOLDER} and `--custom-weight-loader {LOADER}`, or use another transport."
                )

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Load all weights into all servers, bucket by bucket, and read them back.

        Raises:
            EngineError: a server did not load them, or a bucket cannot be written.
        """
        expected = BucketChecksums({}, 0)
        for bucket in delivery.buckets:
            with shared_file(self._folder) as path:
                tensors, checksums = await asyncio.gather(
                    asyncio.to_thread(_write_bucket, path, bucket),
                    asyncio.to_thread(bucket_checksums, bucket),
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


def _write_bucket(path: Path, bucket: Bucket) -> JSON:
    """Write a bucket's tensors, aligned; returns name, shape, dtype and offset of each.

    Raises:
        EngineError: the file system is full.
    """
    tensors: list[JSON] = []
    offset = 0
    try:
        with path.open("wb", buffering=0) as file:
            for spec, data in slices(bucket):
                tensors.append([spec.name, list(spec.shape), spec.dtype, offset])
                file.seek(offset)
                remaining = data.data
                while remaining:
                    remaining = remaining[file.write(remaining) :]
                offset = -(-(offset + len(data)) // _ALIGNMENT) * _ALIGNMENT
            # The file has at least one block: an empty file cannot be mapped.
            file.truncate(max(offset, _ALIGNMENT))
    except OSError as error:
        raise EngineError(
            f"{path.parent} is too full for a bucket ({error.strerror}); send smaller ones."
        ) from error
    return tensors

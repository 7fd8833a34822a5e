"""Weights through files in memory, for servers on the trainer's machine: one copy in, one copy out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.base import Delivery, Loaded
from agentrl.engine.sglang.transports.inside import (
    LOADER,
    LOADER_FOLDER,
    SHARED,
    ask,
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
    """Writes each bucket once into a file, which the loader inside every server maps and loads.

    The servers need `--custom-weight-loader agentrl_sglang.load`, and LOADER_FOLDER on their PYTHONPATH. With
    tp_size = 1 what is compared is what the model holds afterwards; with more, what arrived in every rank.

    folder: where files are kept in memory. What a killed trainer left there is removed at the next open.
    """

    def __init__(self, folder: Path = SHARED) -> None:
        self._folder = folder
        self._ranks: dict[Server, int] = {}

    async def open(self, servers: Sequence[Server]) -> None:
        """See that every server has the loader.

        Raises:
            EngineError: one has not.
        """
        sweep(self._folder)
        ranks = await asyncio.gather(*(ranks_with_loader(server) for server in servers))
        self._ranks = dict(zip(servers, ranks, strict=True))
        for server, count in self._ranks.items():
            if not count:
                raise EngineError(
                    f"{server.url} cannot load weights out of shared memory; start it with PYTHONPATH="
                    f"{LOADER_FOLDER} and `--custom-weight-loader {LOADER}`, or send them another way."
                )

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Bring all weights into all servers, bucket after bucket, and read them back.

        Raises:
            EngineError: a server did not load them, or there is no room for a bucket.
        """
        every = BucketChecksums({}, 0)
        for bucket in delivery.buckets:
            with shared_file(self._folder) as path:
                tensors, sent = await asyncio.gather(
                    asyncio.to_thread(_written, path, bucket), asyncio.to_thread(bucket_checksums, bucket)
                )
                calls = [self._load(server, sent.crcs, path, tensors) for server in servers]
                # Every call has ended before the file goes: a server may be mapping it.
                answers = await asyncio.gather(*calls, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            every = BucketChecksums({**every.crcs, **sent.crcs}, sum_digests([every.checksum, sent.checksum]))
        loaded = [self._loaded(server, delivery, every) for server in servers]
        return dict(zip(servers, await asyncio.gather(*loaded), strict=True))

    async def close(self) -> None:
        """Nothing is left behind."""
        self._ranks = {}

    async def _load(self, server: Server, crcs: Mapping[str, int], path: Path, tensors: JSON) -> None:
        """Have it load a file. Ranks that hold parts, and are not read back, tell what arrived: all of it."""
        ranks = self._ranks[server]
        message: dict[str, JSON] = {
            "action": "load",
            "file": str(path),
            "tensors": tensors,
            "whole": ranks == 1,
        }
        told = await ask(server, ranks, message, self._folder)
        if any(one != told[0] for one in told):
            raise EngineError(f"the ranks of {server.url} did not get the same weights; send them again.")
        arrived = {name: crc.crc for name, crc in told[0].items() if crc is not None}
        if ranks > 1 and arrived != crcs:
            raise EngineError(f"weights arrived damaged in {server.url}; send them again.")

    async def _loaded(self, server: Server, delivery: Delivery, sent: BucketChecksums) -> Loaded:
        if self._ranks[server] == 1:
            return await read_back(server, delivery, sent, self._folder)
        return Loaded(sent.checksum, len(delivery.manifest))


def _written(path: Path, bucket: Bucket) -> JSON:
    """Write a bucket's tensors, each where its dtype may begin; gives name, shape, dtype and offset of each.

    Raises:
        EngineError: there is no room.
    """
    tensors: list[JSON] = []
    offset = 0
    try:
        with path.open("wb", buffering=0) as file:
            for spec, data in slices(bucket):
                tensors.append([spec.name, list(spec.shape), spec.dtype, offset])
                file.seek(offset)
                left = data.data
                while left:
                    left = left[file.write(left) :]
                offset = -(-(offset + len(data)) // _ALIGNMENT) * _ALIGNMENT
            # Whatever the last tensor's size, no mapping of the file is empty.
            file.truncate(max(offset, _ALIGNMENT))
    except OSError as error:
        raise EngineError(
            f"{path.parent} has no room for a bucket ({error.strerror}); send smaller ones."
        ) from error
    return tensors

"""Weights through shared memory, for servers on this machine: one copy out, and at most one in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports.base import Delivery, Loaded, on_this_machine, results_of
from agentrl.engine.sglang.transports.bucket_files import (
    BucketFile,
    bucket_digests,
    checksums_of,
    copy_of,
    in_memory,
    write_bucket,
)
from agentrl.engine.sglang.transports.inside import (
    LOADER,
    LOADER_FOLDER,
    SHARED,
    NoAccessError,
    ahead_of,
    call_loader,
    ranks_with_loader,
    read_back,
    shared_file,
)
from agentrl.errors import EngineError
from agentrl.runtime.temporary import sweep
from agentrl.types import JSON
from agentrl.types.seams import Snapshot
from agentrl.weights.checksum import BucketChecksums, sum_digests


class _StagedDelivery(NamedTuple):
    """A delivery, and all of its buckets as files."""

    delivery: Delivery
    files: list[BucketFile]


class SharedMemory:
    """Has the loader inside every server map the trainer's buckets, and load them.

    A bucket in memory of the trainer that other processes can open is mapped where it is. Any other is
    written to a shared memory file, once for all servers, and all of them if a server has no access to that
    memory. Checksums of these files are compared while the servers serve. Paused, each server maps the
    buckets, copies them into its model and compares the two. Files that do not fit into the shared memory all
    at once are written one after the other while the servers are paused.

    The servers need `--custom-weight-loader agentrl_sglang.load`, and LOADER_FOLDER on their PYTHONPATH. With
    tp_size = 1 the model's tensors are compared; with more, those that each rank received.

    folder: of the shared memory files. The files of a killed trainer are removed at the next open.
    """

    takes_device_memory = False

    def __init__(self, folder: Path = SHARED) -> None:
        self._folder = folder
        self._ranks: dict[Server, int] = {}
        self._staged: _StagedDelivery | None = None
        self._without_access: WeakSet[Server] = WeakSet()

    async def open(self, servers: Sequence[Server], snapshot: Snapshot) -> None:
        """Check that every server has the loader.

        Raises:
            EngineError: a server does not have it.
        """
        del snapshot
        sweep(self._folder, agentrl_sglang.PREFIX)
        ranks = await asyncio.gather(*(ranks_with_loader(server) for server in servers))
        self._ranks = dict(zip(servers, ranks, strict=True))
        for server, count in self._ranks.items():
            if not count:
                raise EngineError(
                    f"{server.url} cannot load weights out of shared memory; start it with PYTHONPATH="
                    f"{LOADER_FOLDER} and `--custom-weight-loader {LOADER}`, or use another transport."
                )

    def ranks_of(self, server: Server) -> int:
        """The tensor-parallel ranks of a server for which it was opened (count)."""
        return self._ranks[server]

    @asynccontextmanager
    async def staged(self, servers: Sequence[Server], delivery: Delivery) -> AsyncIterator[None]:
        """Write all files that are needed, if they fit.

        Raises:
            EngineError: the files hold other weights than the delivery's checksum is of.
        """
        snapshot = await on_this_machine(delivery.snapshot)
        with ExitStack() as stack:
            files: list[BucketFile] = []
            # What does not fit is written by `send`.
            with suppress(EngineError):
                files += await self._files(snapshot, servers, stack)
            if len(files) == len(snapshot.parts):
                await self._compare(snapshot, files)
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
        staged, loaded = self._staged, dict[Server, Loaded]()
        if staged is not None and staged.delivery is delivery:
            loading = [self._load_staged(server, delivery, staged.files) for server in servers]
            results = dict(zip(servers, await results_of(loading), strict=True))
            loaded = {server: result for server, result in results.items() if result is not None}
        copied = [server for server in servers if server not in loaded]
        return {**loaded, **(await self._send_copies(copied, delivery) if copied else {})}

    async def _files(
        self, snapshot: Snapshot, servers: Sequence[Server], stack: ExitStack
    ) -> list[BucketFile]:
        """Every bucket as a file for all servers; stack: removes those that are written."""
        with_crcs = any(self._ranks[server] > 1 for server in servers)
        files: list[BucketFile | None] = [None] * len(snapshot.parts)
        if self._without_access.isdisjoint(servers):
            files = await snapshot.run(partial(in_memory, with_crcs))
        for number, file in enumerate(files):
            if file is None:
                path = stack.enter_context(shared_file(self._folder))
                files[number] = await snapshot.run(partial(copy_of, path, number, with_crcs))
        return [file for file in files if file is not None]

    async def _compare(self, snapshot: Snapshot, files: Sequence[BucketFile]) -> None:
        """Compare the checksum of the files with the trainer's, unless all of them are its own memory.

        Raises:
            EngineError: they hold other weights.
        """
        if all(file.digests is None for file in files):
            return
        digests: list[int] = []
        for number, file in enumerate(files):
            read = file.digests
            digests += await snapshot.run(partial(bucket_digests, number)) if read is None else read
        if sum_digests(digests) != snapshot.checksum:
            raise EngineError(f"{self._folder} holds other weights than the trainer has; send them again.")

    async def _send_copies(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Write one bucket after the other to a file that these servers load."""
        expected = BucketChecksums({}, 0)
        snapshot = await on_this_machine(delivery.snapshot)
        for number in range(len(snapshot.parts)):
            with shared_file(self._folder) as path:
                tensors, checksums = await asyncio.gather(
                    snapshot.run(partial(write_bucket, path, number)),
                    snapshot.run(partial(checksums_of, number)),
                )
                ahead = ahead_of(delivery.manifest)
                calls = [self._load(server, checksums.crcs, str(path), tensors, ahead) for server in servers]
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

    async def _load_staged(
        self, server: Server, delivery: Delivery, files: Sequence[BucketFile]
    ) -> Loaded | None:
        """Have a server load all files; None = it cannot open them, and gets copies from now on."""
        try:
            return await self._load_files(server, delivery, files)
        except NoAccessError:
            if all(file.digests is not None for file in files):
                raise
            self._without_access.add(server)
            return None

    async def _load_files(self, server: Server, delivery: Delivery, files: Sequence[BucketFile]) -> Loaded:
        """Have a server load all files; in one call, unless its ranks hold shards."""
        if self._ranks[server] > 1:
            for file in files:
                await self._load(server, file.crcs, file.path, file.tensors, ahead_of(delivery.manifest))
            return Loaded(delivery.checksum, len(delivery.manifest))
        paths: JSON = [[file.path, file.tensors] for file in files]
        ahead = ahead_of(delivery.manifest)
        message: dict[str, JSON] = {"action": "load_all", "files": paths, "ahead": ahead}
        (unread,) = await call_loader(server, 1, message, self._folder)
        return Loaded(delivery.checksum, len(unread))

    async def _load(
        self, server: Server, crcs: Mapping[str, int], path: str, tensors: JSON, ahead: JSON
    ) -> None:
        """Have a server load a file. Ranks with shards are not read back: they report what they received."""
        ranks = self._ranks[server]
        message: dict[str, JSON] = {
            "action": "load",
            "file": path,
            "tensors": tensors,
            "whole": ranks == 1,
            "ahead": ahead,
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

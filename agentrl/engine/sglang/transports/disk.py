"""Weights through files: every version as a directory, or most of them as deltas to the previous one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.base import Delivery, Loaded, results_of
from agentrl.engine.sglang.transports.inside import SHARED, ranks_with_loader, read_back
from agentrl.errors import ConfigError, EngineError
from agentrl.runtime.files import SystemErrors
from agentrl.types.seams import Bucket, Snapshot
from agentrl.weights import delta
from agentrl.weights.checksum import BucketChecksums, bucket_checksums, checksum
from agentrl.weights.codec import unpack


class _StagedFolder(NamedTuple):
    """A delivery, the directory with it, and the checksums of its tensors, where they are read back."""

    delivery: Delivery
    path: Path
    expected: BucketChecksums


class _Version(NamedTuple):
    """A version in this process, which the next one is compared with."""

    number: int
    checksum: int
    buckets: Sequence[Bucket]


class Disk:
    """Writes a version to files, and has every server load it.

    With full_every = 1 servers load the directory that is written. With more, only every full_every-th
    version is written in full to `folder`; the others as deltas to the previous version. SGLang does not read
    deltas, so they are applied to a copy under `mirror`, which the servers load: `folder` may then be on a
    slow, shared disk. The process that has the weights writes a full version; deltas are made in this one.

    folder: the parent of the versions; old versions and their deltas are removed.
    model: a model directory whose config.json is copied to the weights, as `agentrl serve` requires.
    full_every: the interval between two full versions (count).
    mirror: where deltas are applied; servers read it under the same path.
    check_loaded: read back the loaded weights of a server, where it has our loader and tp_size = 1; it has to
    run on this machine then. Otherwise the server only confirms the update.
    shared: the directory of shared memory files, for reading back.

    Raises:
        ConfigError: full_every is above 1 without a mirror.
    """

    takes_device_memory = False

    def __init__(
        self,
        folder: Path,
        *,
        model: Path | None = None,
        full_every: int = 1,
        mirror: Path | None = None,
        check_loaded: bool = True,
        shared: Path = SHARED,
    ) -> None:
        if full_every < 1 or (full_every > 1 and mirror is None):
            raise ConfigError(
                "deltas of weights need full_every of at least 2, and a mirror to apply them to."
            )
        self._full = Folders(folder, model)
        self._mirror = Folders(mirror, model) if mirror is not None and full_every > 1 else None
        self._full_every = full_every
        self._check_loaded = check_loaded
        self._shared = shared
        self._last: _Version | None = None
        self._deltas: list[Path] = []
        self._readable: set[Server] = set()
        self._staged: _StagedFolder | None = None

    async def open(self, servers: Sequence[Server], snapshot: Snapshot) -> None:
        """Find out which servers can be read back.

        Raises:
            EngineError: a server did not reply.
        """
        del snapshot
        loaders = await asyncio.gather(*(ranks_with_loader(server) for server in servers))
        chosen = zip(servers, loaders, strict=True)
        self._readable = {server for server, ranks in chosen if ranks == 1 and self._check_loaded}

    @asynccontextmanager
    async def staged(self, servers: Sequence[Server], delivery: Delivery) -> AsyncIterator[None]:
        """Write a version.

        Raises:
            EngineError: it cannot be written.
        """
        del servers
        self._staged = await self._prepare(delivery)
        try:
            yield
        finally:
            self._staged = None

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Have all servers load a version.

        Raises:
            EngineError: the version cannot be written, or a server did not load it.
        """
        staged = self._staged
        if staged is None or staged.delivery is not delivery:
            staged = await self._prepare(delivery)
        loading = [self._load(server, staged.path, delivery, staged.expected) for server in servers]
        # All calls must end before the directory changes again.
        return dict(zip(servers, await results_of(loading), strict=True))

    async def close(self) -> None:
        """Keep the files, for servers that restart; the next version is written in full."""
        self._last = None

    async def _prepare(self, delivery: Delivery) -> _StagedFolder:
        path = await self._write(delivery)
        expected = BucketChecksums({}, 0)
        if self._readable:
            expected = await delivery.snapshot.run(bucket_checksums)
        return _StagedFolder(delivery, path, expected)

    async def _write(self, delivery: Delivery) -> Path:
        """Write a version; returns the directory that the servers load."""
        number, checksum_of_all = delivery.version, delivery.checksum
        if self._mirror is None:
            return await delivery.snapshot.run(partial(self._full.put, number, checksum_of_all))
        version = _Version(number, checksum_of_all, await delivery.snapshot.buckets())
        return await asyncio.to_thread(self._write_mirror, self._mirror, version)

    def _write_mirror(self, mirror: Folders, version: _Version) -> Path:
        """Write a version in full or as a delta, and in full to the mirror; its directory there."""
        last, self._last = self._last, None
        if last is None or len(self._deltas) + 1 >= self._full_every or version.number <= last.number:
            self._full.put(*version)
            self._remove_deltas()
            path = mirror.put(*version)
        else:
            path = mirror.put(version.number, version.checksum, self._apply_as_delta(last, version))
        self._last = version
        return path

    def _apply_as_delta(self, last: _Version, version: _Version) -> Sequence[Bucket]:
        """Write a version as a delta; the result of that file, applied to the previous version."""
        path = self._full.folder / f"delta-{version.number:09d}-{version.checksum:016x}.safetensors"
        try:
            delta.write(delta.delta_between(last.buckets, version.buckets), path)
            self._deltas.append(path)
            return delta.apply(delta.read(path), last.buckets)
        except (OSError, delta.DeltaError) as error:
            raise EngineError(f"version {version.number} cannot be sent as a delta: {error}.") from error

    def _remove_deltas(self) -> None:
        for path in self._deltas:
            path.unlink(missing_ok=True)
        self._deltas = []

    async def _load(
        self, server: Server, path: Path, delivery: Delivery, expected: BucketChecksums
    ) -> Loaded:
        reply = await server.update_from_disk(str(path))
        if server in self._readable:
            return await read_back(server, delivery, expected, self._shared)
        # `agentrl serve` reports the checksum of its tensors, which are float32.
        if reply.checksum is not None and {spec.dtype for spec in delivery.manifest} == {"float32"}:
            return Loaded(reply.checksum)
        return Loaded(None, len(delivery.manifest))


_WEIGHTS = "model.safetensors"
_CONFIG_FILES = ("config.json", "generation_config.json")


class Folders:
    """The latest versions in one directory.

    model: a model directory whose configuration is copied to the weights; None = only the weights.
    keep: versions that stay (count); older ones are removed.
    """

    def __init__(self, folder: Path, model: Path | None, keep: int = 2) -> None:
        # Servers may have another working directory.
        self.folder = folder.absolute()
        self._model = model
        self._keep = keep

    def put(self, version: int, checksum_of_all: int, buckets: Sequence[Bucket]) -> Path:
        """Write the directory of a version unless it exists, read it back, and return its path.

        Raises:
            EngineError: it cannot be written, or holds other weights afterwards.
        """
        path = self.folder / f"full-{version:09d}-{checksum_of_all:016x}"
        try:
            if not path.is_dir():
                self._write(path, buckets)
            # A damaged file may crash a server, so an existing directory is read back, too.
            written_checksum = checksum(load_file(path / _WEIGHTS).items())
        except (OSError, SafetensorError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise EngineError(f"{path} cannot be written or read ({error}); check the disk.") from error
        if written_checksum != checksum_of_all:
            shutil.rmtree(path)
            raise EngineError(f"{path} held other weights than were written; check the disk.")
        self._remove_old(path)
        return path

    def versions(self) -> Sequence[Path]:
        """The directories of all versions, oldest first."""
        return sorted(self.folder.glob("full-*"))

    def clear(self) -> None:
        """Remove all versions."""
        for path in self.versions():
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, path: Path, buckets: Sequence[Bucket]) -> None:
        unfinished = path.with_name(f".{path.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        # transformers requires the format.
        with SystemErrors(path):
            save_file(dict(_tensors(buckets)), unfinished / _WEIGHTS, {"format": "pt"})
        for name in _CONFIG_FILES:
            if self._model is not None and (self._model / name).is_file():
                shutil.copyfile(self._model / name, unfinished / name)
        unfinished.rename(path)

    def _remove_old(self, newest: Path) -> None:
        older = [path for path in self.versions() if path != newest]
        for path in older[: max(0, len(older) - self._keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)


def _tensors(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        yield from unpack(bucket)

"""Weights through files: every version a folder, or most of them as what changed since the one before."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.base import Delivery, Loaded
from agentrl.engine.sglang.transports.inside import SHARED, ranks_with_loader, read_back
from agentrl.errors import ConfigError, EngineError
from agentrl.weights import checksum, delta, unpack
from agentrl.weights.checksum import BucketChecksums, bucket_checksums


class Disk:
    """Writes a version, and has every server load it from there.

    With full_every = 1 servers load the folder that is written. With more, only every so many versions are
    written whole into `folder`; the others as deltas to the version before. No SGLang reads deltas, so they
    are applied to a copy under `mirror`, which the servers load: `folder` may then be a slow, shared disk.

    folder: where versions are written; older ones are removed, and so are deltas that lead to none.
    model: a model directory whose config.json lies beside the weights, which `agentrl serve` asks for.
    full_every: after how many versions one is written whole again (count).
    mirror: where deltas are applied; servers read it under the same path.
    check_loaded: read back what a server has loaded, where it has our loader and tp_size = 1; it has to
    run on this machine then. Otherwise what is known is that it took every tensor.
    shared: where files are kept in memory, for reading back.

    Raises:
        ConfigError: deltas are asked for without a mirror.
    """

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
        self._last: Delivery | None = None
        self._deltas: list[Path] = []
        self._readable: set[Server] = set()

    async def open(self, servers: Sequence[Server]) -> None:
        """See which servers can be read back.

        Raises:
            EngineError: one cannot be asked.
        """
        loaders = await asyncio.gather(*(ranks_with_loader(server) for server in servers))
        chosen = zip(servers, loaders, strict=True)
        self._readable = {server for server, ranks in chosen if ranks == 1 and self._check_loaded}

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Write a version, and have all servers load it.

        Raises:
            EngineError: it cannot be written, or a server did not load it.
        """
        path = await asyncio.to_thread(self._written, delivery)
        sent = (
            await asyncio.to_thread(bucket_checksums, *delivery.buckets)
            if self._readable
            else BucketChecksums({}, 0)
        )
        loading = [self._load(server, path, delivery, sent) for server in servers]
        # Every call has ended before anything else happens to the folder.
        answers = await asyncio.gather(*loading, return_exceptions=True)
        loaded: dict[Server, Loaded] = {}
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            loaded[server] = answer
        return loaded

    async def close(self) -> None:
        """What was written stays, for servers that start again."""
        self._last = None

    def _written(self, delivery: Delivery) -> Path:
        """The folder that servers are to load."""
        if self._mirror is None:
            return self._full.put(delivery)
        last, self._last = self._last, None
        if last is None or len(self._deltas) + 1 >= self._full_every or delivery.version <= last.version:
            self._full.put(delivery)
            self._forget_deltas()
            path = self._mirror.put(delivery)
        else:
            path = self._mirror.put(self._through_a_delta(last, delivery))
        self._last = delivery
        return path

    def _through_a_delta(self, last: Delivery, delivery: Delivery) -> Delivery:
        """The version, made of the one before and of what was written about the difference."""
        path = self._full.folder / f"delta-{delivery.version:09d}-{delivery.checksum:016x}.safetensors"
        try:
            delta.write(delta.delta_between(last.buckets, delivery.buckets), path)
            self._deltas.append(path)
            buckets = delta.apply(delta.read(path), last.buckets)
        except (OSError, delta.DeltaError) as error:
            raise EngineError(f"version {delivery.version} cannot be sent as a delta: {error}.") from error
        return Delivery(delivery.version, delivery.manifest, tuple(buckets), delivery.checksum)

    def _forget_deltas(self) -> None:
        for path in self._deltas:
            path.unlink(missing_ok=True)
        self._deltas = []

    async def _load(self, server: Server, path: Path, delivery: Delivery, sent: BucketChecksums) -> Loaded:
        done = await server.update_from_disk(str(path))
        if server in self._readable:
            return await read_back(server, delivery, sent, self._shared)
        # What `agentrl serve` tells is of the tensors as it holds them, in float32.
        if done.checksum is not None and {spec.dtype for spec in delivery.manifest} == {"float32"}:
            return Loaded(done.checksum)
        return Loaded(None, len(delivery.manifest))


_WEIGHTS = "model.safetensors"
_BESIDE = ("config.json", "generation_config.json")


class Folders:
    """The newest versions under one folder.

    model: a model directory whose configuration lies beside the weights; None = weights alone.
    keep: how many versions stay (count); older ones are removed.
    """

    def __init__(self, folder: Path, model: Path | None, keep: int = 2) -> None:
        # Servers work in folders of their own.
        self.folder = folder.absolute()
        self._model = model
        self._keep = keep

    def put(self, delivery: Delivery) -> Path:
        """The folder of a version; written where it is not there yet, and read back in any case.

        Raises:
            EngineError: it cannot be written, or holds other weights afterwards.
        """
        path = self.folder / f"full-{delivery.version:09d}-{delivery.checksum:016x}"
        try:
            if not path.is_dir():
                self._write(path, delivery)
            # A server that meets a broken file may end; that goes for one that broke since, too.
            found = checksum(load_file(path / _WEIGHTS).items())
        except (OSError, SafetensorError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise EngineError(f"{path} cannot be written or read ({error}); see to the disk.") from error
        if found != delivery.checksum:
            shutil.rmtree(path)
            raise EngineError(f"{path} held other weights than were written; see to the disk.")
        self._remove_old(path)
        return path

    def versions(self) -> Sequence[Path]:
        """The folders of all versions, oldest first."""
        return sorted(self.folder.glob("full-*"))

    def clear(self) -> None:
        """Remove all versions."""
        for path in self.versions():
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, path: Path, delivery: Delivery) -> None:
        unfinished = path.with_name(f".{path.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        # transformers asks for the format.
        save_file(dict(_tensors(delivery)), unfinished / _WEIGHTS, {"format": "pt"})
        for name in _BESIDE:
            if self._model is not None and (self._model / name).is_file():
                shutil.copyfile(self._model / name, unfinished / name)
        unfinished.rename(path)

    def _remove_old(self, newest: Path) -> None:
        others = [path for path in self.versions() if path != newest]
        for path in others[: max(0, len(others) - self._keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)


def _tensors(delivery: Delivery) -> Iterator[tuple[str, Tensor]]:
    for bucket in delivery.buckets:
        yield from unpack(bucket)

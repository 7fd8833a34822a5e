"""Low-rank adapters as a transport: each version is an adapter of SGLang's own, and requests name one.

    write    the adapters into a folder that the servers read, as peft does
    load     POST /load_lora_adapter on every server, which serves meanwhile; the base model stays as it is
    unload   the oldest one, once the new one serves

The last `keep` versions stay loaded, so that requests of episodes that began under them can still name them.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from safetensors import SafetensorError
from safetensors.torch import load_file

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.base import Delivery, Loaded, results_of
from agentrl.errors import EngineError, ModelLoadError
from agentrl.types.seams import Bucket, Snapshot
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import unpack
from agentrl.weights.hf.adapters import ADAPTER_TENSORS, low_rank_of
from agentrl.weights.hf.directory import atomic_directory
from agentrl.weights.hf.export import write_adapters


class LoraAdapters:
    """Sends adapters by a folder that the servers, and the process that has the weights, share.

    folder: for a folder of each version. model: the whole model that the servers have loaded. scale: of the
    adapters. keep: versions that stay loaded (count).
    """

    takes_device_memory = False

    def __init__(self, folder: Path, *, model: Path, scale: float, keep: int) -> None:
        self._folder, self._model = folder.absolute(), model.absolute()
        self._scale, self._keep = scale, keep
        self._served: list[str] = []
        self._loaded: WeakKeyDictionary[Server, set[str]] = WeakKeyDictionary()

    async def open(self, servers: Sequence[Server], snapshot: Snapshot) -> None:
        """Nothing is to be prepared."""

    @asynccontextmanager
    async def staged(self, servers: Sequence[Server], delivery: Delivery) -> AsyncIterator[None]:
        """Write a version and load it, next to those that serve; after the block unload what is older.

        Raises:
            EngineError: it cannot be written, or a server did not load it.
        """
        name = delivery.salt
        is_served = False
        try:
            await self.send(servers, delivery)
            yield
            is_served = True
        finally:
            if is_served:
                self._served = [*(other for other in self._served if other != name), name]
                dropped, self._served = self._served[: -self._keep], self._served[-self._keep :]
            else:
                dropped = [name] if name not in self._served else []
            await self._drop(servers, dropped)

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Have all servers load a version, and those that they lack of the ones that stay served.

        Raises:
            EngineError: it cannot be written, or a server did not load it.
        """
        name = delivery.salt
        if not (self._folder / name).is_dir():
            work = partial(_write, self._folder / name, self._model, self._scale, delivery.checksum)
            await delivery.snapshot.run(work)
        await results_of(self._load(server, [*self._served, name]) for server in servers)
        # SGLang does not give adapters back.
        return {server: Loaded(None, len(delivery.manifest)) for server in servers}

    async def close(self) -> None:
        """Remove the folders."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _load(self, server: Server, names: Sequence[str]) -> None:
        loaded = self._loaded.setdefault(server, set())
        for name in names:
            if name not in loaded:
                await server.load_adapter(name, str(self._folder / name))
                loaded.add(name)

    async def _drop(self, servers: Sequence[Server], names: Sequence[str]) -> None:
        for name in names:
            for server in servers:
                if name in self._loaded.get(server, ()):
                    # A server that does not answer is found out by its health check.
                    with suppress(EngineError):
                        await server.unload_adapter(name)
                    self._loaded[server].discard(name)
            shutil.rmtree(self._folder / name, ignore_errors=True)


def _write(path: Path, model: Path, scale: float, checksum_of_all: int, buckets: Sequence[Bucket]) -> None:
    """Write the folder of a version, and read it back.

    Raises:
        EngineError: it cannot be written, or holds other numbers afterwards.
    """
    tensors = [named for bucket in buckets for named in unpack(bucket)]
    try:
        with atomic_directory(path) as partial_folder:
            partial_folder.mkdir()
            write_adapters(partial_folder, low_rank_of(tensors, scale), like=model)
        written = checksum(load_file(path / ADAPTER_TENSORS).items())
    except (OSError, SafetensorError, ModelLoadError) as error:
        shutil.rmtree(path, ignore_errors=True)
        raise EngineError(f"{path} cannot be written or read ({error}); check the disk.") from error
    if written != checksum_of_all:
        shutil.rmtree(path)
        raise EngineError(f"{path} held other adapters than were written; check the disk.")

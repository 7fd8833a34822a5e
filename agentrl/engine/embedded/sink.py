"""The embedded engine's weight sink: a layer is loaded once its tensors are complete, and read back.

Loading and reading back run in two threads, while the engine decodes with the weights that serve. It stands
still only for the swap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.decoder import Weights
from agentrl.engine.embedded.layers import Linear, RmsNorm
from agentrl.engine.embedded.parameters import (
    EMBEDDING,
    HEAD,
    NORM,
    LayerParameters,
    OuterParameters,
    Parameters,
    layer_tensors,
    load_embedding,
    load_head,
    load_layer,
    load_norm,
    prefix_of,
)
from agentrl.errors import EngineError
from agentrl.types.seams import Bucket, TensorSpec, WeightSink
from agentrl.weights.checksum import checksum, sum_digests
from agentrl.weights.codec import manifest_of, named_weights, pack_buckets, views
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.staging import StagingArea, Transaction

_NamedTensors = Iterable[tuple[str, Tensor]]

Shapes = Mapping[str, tuple[int, ...]]
Install = Callable[[Weights, int], None]
"""Serve new parameters as a version, between two steps; every later token is sampled from them."""

Waited = Callable[[], float]
"""How long requests have waited for the engine to compute, between its steps, up to now (seconds)."""


class EmbeddedSink:
    """Loads tensors as they arrive, while the old ones serve, and swaps when the checksum matches.

    shapes: of the tensors that a version has; tied: of those that it may have as well. stage: makes what
    holds a version's tensors until they are complete.
    standstill_s: how long, in the last update, requests waited while the engine computed nothing (seconds).
    loop: the engine's event loop, where updates run in another one; None = in the same.
    """

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, shapes: Shapes, tied: Shapes, stage: Stage, install: Install, waited: Waited) -> None:
        self._shapes, self._tied, self._stage = shapes, tied, stage
        self._install = install
        self._waited = waited
        self.standstill_s = 0.0

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[Transaction]:
        """Start sending `version`.

        Raises:
            EngineError: the manifest leaves out a tensor, or has an unknown one or a wrong shape.
        """
        _check_manifest(manifest, self._shapes, self._tied)
        names = [spec.name for spec in manifest]
        waited_before = self._waited()

        def swap(parameters: Weights) -> None:
            self._install(parameters, version)
            self.standstill_s = self._waited() - waited_before

        async def install(parameters: Weights) -> None:
            if self.loop is None:
                swap(parameters)
            else:
                await _called_in(self.loop, partial(swap, parameters))

        with ThreadPoolExecutor(1) as loader, ThreadPoolExecutor(1) as reader:
            threads = Threads(loader, reader)
            yield Transaction(manifest, version, self._stage(names, threads, install))


async def update_from_disk(sink: EmbeddedSink, directory: str, version: int) -> int:
    """Serve the weights of a directory as `version`, for running requests, too. Returns their checksum.

    Raises:
        ModelLoadError: the directory is missing or broken.
        EngineError: it holds another model; the engine keeps serving the old weights.
    """
    tensors, loaded_checksum = await asyncio.to_thread(_load_tensors, directory)
    await deliver(tensors, sink, version)
    return loaded_checksum


def _load_tensors(directory: str) -> tuple[list[tuple[str, Tensor]], int]:
    loaded = list(named_weights(open_directory(directory, torch.float32)))
    return loaded, checksum(loaded)


class Threads(NamedTuple):
    """One thread that loads tensors, and one that reads back what is loaded, a load group later."""

    loader: Executor
    reader: Executor


Stage = Callable[[Sequence[str], Threads, Callable[[Weights], Awaitable[None]]], StagingArea]
"""Makes what holds the named tensors until they are complete, and then serves them."""


class StagedParameters:
    """Stages tensors until their load group (a layer, or one tensor outside of the layers) is complete.

    names: of all tensors of the version. install: serves the complete parameters.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        names: Iterable[str],
        threads: Threads,
        install: Callable[[Weights], Awaitable[None]],
    ) -> None:
        self._architecture, self._dtype, self._threads, self._install = architecture, dtype, threads, install
        self._sums: list[Future[int]] = []
        # The load group of each tensor: a layer, by its number, or a tensor outside of them, by its name.
        self._group_of: dict[str, int | str] = {name: name for name in names}
        if architecture.tied and HEAD in self._group_of:
            self._group_of[HEAD] = EMBEDDING
        for index in range(architecture.num_layers):
            prefix = prefix_of(index)
            self._group_of |= {name: index for name in self._group_of if name.startswith(prefix)}
        self._missing = dict.fromkeys(self._group_of.values(), 0)
        for group in self._group_of.values():
            self._missing[group] += 1
        self._pending: dict[int | str, dict[str, Tensor]] = {group: {} for group in self._missing}
        self._layers: dict[int, LayerParameters] = {}
        self._embedding: Tensor | None = None
        self._norm: RmsNorm | None = None
        self._head: Linear | None = None

    async def add(self, bucket: Bucket) -> None:
        """Stage tensors that have not been staged before.

        Tensors of incomplete groups are copied, so that the bucket's memory can be reused.

        Raises:
            ValueError: the bytes do not add up to the tensors.
        """
        # The thread takes the bucket out of the list: no reference to its memory outlives the call.
        await asyncio.wrap_future(self._threads.loader.submit(partial(self._add, [bucket])))

    async def checksum(self) -> int:
        """The checksum of the loaded tensors, read back.

        Tensors that were cast to `dtype` while loading are counted as they were sent.
        """
        return sum_digests(await asyncio.gather(*map(asyncio.wrap_future, self._sums)))

    async def install(self) -> None:
        """Swap the parameters, between two tokens of every request. All tensors have arrived."""
        await self._install(self._loaded())

    def _add(self, buckets: list[Bucket]) -> None:
        bucket = buckets.pop()
        added: dict[str, Tensor] = {}
        for name, tensor in views(bucket):
            group = self._group_of[name]
            added[name] = self._pending[group][name] = tensor
            self._missing[group] -= 1
            if not self._missing[group]:
                self._load(group, self._pending.pop(group))
        for pending in self._pending.values():
            pending |= {name: tensor.clone() for name, tensor in pending.items() if name in added}

    def _loaded(self) -> Parameters:
        assert self._embedding is not None, "all tensors have arrived"
        assert self._norm is not None, "all tensors have arrived"
        assert self._head is not None, "all tensors have arrived"
        outer = OuterParameters(self._embedding, self._norm, self._head)
        layers = tuple(self._layers[index] for index in range(self._architecture.num_layers))
        return Parameters(self._architecture, outer, layers)

    def _load(self, group: int | str, sent: Mapping[str, Tensor]) -> None:
        if isinstance(group, int):
            layer = self._layers[group] = load_layer(self._architecture, sent, self._dtype, group)
            self._read_back(sent, layer_tensors(self._architecture, layer, self._dtype, group))
        elif group == EMBEDDING:
            self._load_embedding(sent)
        elif group == NORM:
            norm = self._norm = load_norm(self._architecture, sent, self._dtype)
            self._read_back(sent, [(NORM, norm.weight.to(self._dtype))])
        else:
            head = self._head = load_head(sent, self._dtype)
            self._read_back(sent, ((HEAD, linear.dense()) for linear in [head]))

    def _load_embedding(self, sent: Mapping[str, Tensor]) -> None:
        embedding = self._embedding = load_embedding(sent, self._dtype)
        self._read_back(sent, [(EMBEDDING, embedding)])
        if self._architecture.tied:
            head = self._head = Linear(embedding)
            if HEAD in sent:
                self._read_back(sent, ((HEAD, linear.dense()) for linear in [head]))

    def _read_back(self, sent: Mapping[str, Tensor], loaded: _NamedTensors) -> None:
        originals = {name: None if tensor.dtype == self._dtype else tensor for name, tensor in sent.items()}
        self._sums.append(self._threads.reader.submit(lambda: checksum(_comparable(originals, loaded))))


async def _called_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in the event loop of another thread, in its next iteration, and wait for its end."""
    ended = Future[bool]()

    def call() -> None:
        succeeded = False
        try:
            function()
            succeeded = True
        finally:
            ended.set_result(succeeded)

    loop.call_soon_threadsafe(call)
    if not await asyncio.wrap_future(ended):
        raise EngineError("the engine could not swap its weights, and is of no use; see its log.")


def _check_manifest(manifest: Sequence[TensorSpec], expected: Shapes, tied: Shapes) -> None:
    sent = {spec.name: tuple(spec.shape) for spec in manifest}
    missing = expected.keys() - sent.keys()
    if missing:
        raise EngineError(
            f"the manifest lacks {len(missing)} tensors, {min(missing)} among them; send them all."
        )
    allowed = {**tied, **expected}
    for name, shape in sent.items():
        if allowed.get(name) != shape:
            raise EngineError(
                f"tensor {name} with shape {shape} does not belong to the served model, "
                f"which expects {allowed.get(name, 'no such tensor')}; send the model it was built from."
            )


def _comparable(
    originals: Mapping[str, Tensor | None], loaded: _NamedTensors
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as it was read back; one that was cast while loading, as it was sent."""
    for name, tensor in loaded:
        original = originals[name]
        yield name, tensor if original is None else original


_BUCKET_BYTES = 64 << 20


async def deliver(tensors: Sequence[tuple[str, Tensor]], sink: WeightSink, version: int) -> int:
    """Send all tensors as `version`, in buckets of 64 MiB; returns the number of bytes sent.

    Raises:
        EngineError: the sink rejected them; it keeps serving the old version.
    """
    num_bytes = 0
    async with sink.begin(manifest_of(tensors), version) as transaction:
        for bucket in pack_buckets(tensors, _BUCKET_BYTES):
            num_bytes += bucket.data.nbytes
            await transaction.put(bucket)
        await transaction.commit(checksum(tensors))
    return num_bytes

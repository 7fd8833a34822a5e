"""Delivery of a directory's weights to an engine, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from agentrl.types.seams import TensorSpec, WeightSink
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import pack_buckets, torch_dtype
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import TensorFiles, tensor_shapes

_BUCKET_BYTES = 64 << 20


async def deliver_directory(
    directory: Path, sink: WeightSink, version: int, *, dtype: str = "float32"
) -> None:
    """Send the weights of a model directory as `version`, cast to `dtype`; one bucket is in memory at a time.

    Raises:
        ModelLoadError: the directory lacks a tensor, or holds one whose shape contradicts its config.
        EngineError: the sink rejected them, and still serves its old version.
    """
    shapes = tensor_shapes(open_config(directory))
    with TensorFiles(directory) as files:
        manifest = tuple(files.spec(name, shape, dtype) for name, shape in shapes.items())
        digests: list[int] = []
        async with sink.begin(manifest, version) as transaction:
            for bucket in pack_buckets(_read(files, manifest), _BUCKET_BYTES):
                digests += digests_of(bucket)
                await transaction.put(bucket)
            await transaction.commit(sum_digests(digests))


def _read(files: TensorFiles, manifest: tuple[TensorSpec, ...]) -> Iterator[tuple[str, Tensor]]:
    for spec in manifest:
        yield spec.name, files.read(spec.name).to(torch_dtype(spec.dtype))

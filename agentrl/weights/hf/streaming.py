"""Delivery of a directory's weights to an engine, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from agentrl.types.seams import TensorSpec, WeightSink
from agentrl.weights.cast import Matrix, encoded
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import pack_buckets, torch_dtype
from agentrl.weights.hf.quantized import quantized_model
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import TensorFiles, tensor_shapes

_BUCKET_BYTES = 64 << 20


async def deliver_directory(
    directory: Path, sink: WeightSink, version: int, *, dtype: str = "float32"
) -> None:
    """Send the weights of a model directory as `version`, cast to `dtype`; one bucket is in memory at a time.

    Matrices of a quantized one are sent as it has them; see `quantized_model`.

    Raises:
        ModelLoadError: the directory lacks a tensor, or holds one whose shape contradicts its config.
        EngineError: the sink rejected them, and still serves its old version.
    """
    shapes = tensor_shapes(open_config(directory))
    with TensorFiles(directory) as files:
        specs = tuple(files.spec(name, shape, dtype) for name, shape in shapes.items())
        matrices = {} if quantized_model(str(directory)) is None else files.matrices
        manifest = tuple(
            part
            for spec in specs
            for part in (matrices[spec.name].parts if spec.name in matrices else [spec])
        )
        digests: list[int] = []
        async with sink.begin(manifest, version) as transaction:
            for bucket in pack_buckets(_read(files, specs, matrices), _BUCKET_BYTES):
                digests += digests_of(bucket)
                await transaction.put(bucket)
            await transaction.commit(sum_digests(digests))


def _read(
    files: TensorFiles, specs: tuple[TensorSpec, ...], matrices: Mapping[str, Matrix]
) -> Iterator[tuple[str, Tensor]]:
    for spec in specs:
        tensor, matrix = files.read(spec.name).to(torch_dtype(spec.dtype)), matrices.get(spec.name)
        if matrix is None:
            yield spec.name, tensor
        else:
            # As the trainer will send them, in place of the file's own numbers.
            parts = zip(matrix.parts, encoded(tensor, matrix), strict=True)
            yield from ((part.name, numbers) for part, numbers in parts)

"""A model directory in another precision: its matrices cast to fp8 or int4, or what such numbers stand for.

Cast are the matrices of linear layers and of experts, as published models have it: no embedding, no head and
no router, which decide most for the least memory. To int4, of a model with experts, these alone, as
Kimi-K2-Thinking has it: an engine that takes matrices of attention apart reads no int4 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from agentrl.errors import ModelLoadError
from agentrl.types import JSON
from agentrl.types.seams import TensorSpec
from agentrl.weights.cast import FP8, Grid, Matrix, encoded, rounded
from agentrl.weights.codec import bytes_of, in_parts, names_in_checkpoints
from agentrl.weights.hf.export import write_tensors
from agentrl.weights.hf.quantized import WEIGHT
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import TensorFiles, meta_model

Cast: TypeAlias = Literal["fp8", "fp8-tensor", "int4"]

GROUP_SIZE: Final = 32
_BLOCK: Final = 128
_PER_WORD: Final = 8


class _Form(NamedTuple):
    """grid: of the numbers. block: rows and columns of one scale; None = all. scales: their name."""

    grid: Grid
    block: tuple[int, int] | None
    scales: str


_FORMS: Mapping[Cast, _Form] = MappingProxyType(
    {
        "fp8": _Form("fp8", (_BLOCK, _BLOCK), "weight_scale_inv"),
        "fp8-tensor": _Form("fp8", None, "weight_scale"),
        "int4": _Form("int4", (1, GROUP_SIZE), "weight_scale"),
    }
)


def cast_directory(source: Path, target: Path, cast: Cast) -> int:
    """Write a model with its matrices cast, and compare what was written. Returns how many were cast.

    A tensor is in memory at a time.

    Raises:
        ModelLoadError: see `TensorFiles`; nothing of the model can be cast so; or what was written is not
            what was read.
        OSError: the disk does not take it.
    """
    with TensorFiles(source) as files:
        chosen = _chosen(open_config(source), cast)
        matrices = {
            spec.name: _matrix(spec, _FORMS[cast])
            for spec in files.all_specs
            if spec.name in chosen and _fits(spec, _FORMS[cast])
        }
        if not matrices:
            raise ModelLoadError(
                f"{source} has no matrix that can be cast to {cast}; its rows have to be whole groups of "
                f"{GROUP_SIZE} weights."
            )
        others = [
            spec.name.removesuffix(WEIGHT)
            for spec in files.all_specs
            if len(spec.shape) == 2 and spec.name.endswith(WEIGHT) and spec.name not in matrices
        ]
        manifest = [
            part
            for spec in files.all_specs
            for part in (matrices[spec.name].parts if spec.name in matrices else (spec,))
        ]
        pieces = _pieces(files, matrices)
        write_tensors(target, pieces, manifest=manifest, like=source, quantization=_config_of(cast, others))
        _compare(target, files, matrices)
    return len(matrices)


def dequantize_directory(source: Path, target: Path) -> int:
    """Write the model that quantized numbers stand for, in the dtype of its other weights, and compare what
    was written. Returns how many matrices were quantized.

    Raises:
        ModelLoadError, OSError: as for `cast_directory`.
    """
    with TensorFiles(source) as files:
        pieces = ((spec, bytes_of(files.read(spec.name))) for spec in files.all_specs)
        write_tensors(target, pieces, manifest=files.all_specs, like=source)
        _compare(target, files, {})
        return len(files.matrices)


def _chosen(config: PreTrainedConfig, cast: Cast) -> set[str]:
    """The matrices of linear layers and experts, by their names in a checkpoint."""
    model = meta_model(config)
    own = dict(model.named_parameters())
    head = model.get_output_embeddings()
    linear = {
        f"{name}{WEIGHT}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    # transformers keeps all experts of a layer in one tensor, which a checkpoint has in parts.
    stacked = {
        part
        for name, parts in names_in_checkpoints(model, own).items()
        if own[name].ndim == 3
        for part in parts
    }
    if cast == "int4" and stacked:
        return stacked
    renamed = {name: in_parts(model, name, own[name]) for name in linear if name in own}
    return stacked.union(*(parts.keys() for parts in renamed.values()))


def _fits(spec: TensorSpec, form: _Form) -> bool:
    is_matrix = len(spec.shape) == 2 and all(spec.shape)
    return is_matrix and (form.grid == "fp8" or spec.shape[1] % GROUP_SIZE == 0)


def _matrix(spec: TensorSpec, form: _Form) -> Matrix:
    """How a matrix is written: scales in fp32, as DeepSeek-V3 has them; of int4 in the weights' own dtype, as
    compressed-tensors has them."""
    rows, columns = spec.shape
    height, width = form.block or (rows, columns)
    scales = (1,) if form.block is None else (-(-rows // height), -(-columns // width))
    name = spec.name.removesuffix(WEIGHT)
    parts: tuple[TensorSpec, ...]
    if form.grid == "fp8":
        parts = (
            TensorSpec(spec.name, spec.shape, FP8),
            TensorSpec(f"{name}.{form.scales}", scales, "float32"),
        )
    else:
        parts = (
            TensorSpec(f"{name}.weight_packed", (rows, -(-columns // _PER_WORD)), "int32"),
            TensorSpec(f"{name}.{form.scales}", scales, spec.dtype),
            TensorSpec(f"{name}.weight_shape", (2,), "int64"),
        )
    return Matrix(spec.name, spec.shape, form.grid, (height, width), parts)


def _pieces(
    files: TensorFiles, matrices: Mapping[str, Matrix]
) -> Iterator[tuple[TensorSpec, npt.NDArray[np.uint8]]]:
    for spec in files.all_specs:
        tensor, matrix = files.read(spec.name), matrices.get(spec.name)
        if matrix is None:
            yield spec, bytes_of(tensor)
        else:
            written = encoded(tensor, matrix)
            yield from zip(matrix.parts, map(bytes_of, written), strict=True)


def _compare(target: Path, files: TensorFiles, matrices: Mapping[str, Matrix]) -> None:
    with TensorFiles(target) as written:
        for name in sorted(files.names):
            tensor, matrix = files.read(name), matrices.get(name)
            expected: Tensor = tensor if matrix is None else rounded(tensor, matrix)
            if not torch.equal(expected, written.read(name)):
                raise ModelLoadError(f"{target} holds another {name} than was written; check the disk.")


def _config_of(cast: Cast, others: Sequence[str]) -> dict[str, JSON]:
    """The `quantization_config`. others: the modules whose matrices stay as they are."""
    if cast == "int4":
        weights: dict[str, JSON] = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": GROUP_SIZE,
            "dynamic": False,
        }
        group: dict[str, JSON] = {"targets": ["Linear"], "weights": weights}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [*others],
        }
    config: dict[str, JSON] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if cast == "fp8":
        config["weight_block_size"] = [_BLOCK, _BLOCK]
    return {**config, "modules_to_not_convert": [*others]}

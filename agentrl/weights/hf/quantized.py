"""Quantized model directories: which matrices are stored in fewer bits, by config.json and the tensors.

    quant_method            what is read
    fp8                     blocks, as DeepSeek-V3 and Qwen3-FP8 have them: `.weight`, `.weight_scale_inv`; or
                            one scale for a matrix: `.weight`, `.weight_scale`
    compressed-tensors      fp8 likewise (`.weight_scale`: of a matrix, a row or a block); int4 as
                            Kimi-K2-Thinking has it: `.weight_packed`, `.weight_scale`, `.weight_shape`

Which matrices they are is told by the scales in the files, so the lists of modules that stay as they are need
no reading. Activations are quantized by whoever serves the model; they have no part in it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from transformers import PreTrainedConfig

from agentrl.errors import ModelLoadError
from agentrl.types.seams import TensorSpec
from agentrl.weights.cast import FP8, Grid, Matrix
from agentrl.weights.hf.folders import adapter_config

QUANTIZATION = "quantization_config"
"""The field of a config.json."""
WEIGHT = ".weight"
_PACKED, _SHAPE = ".weight_packed", ".weight_shape"
_SCALES = (".weight_scale_inv", ".weight_scale")
_REMEDY = "take the model's weights in bfloat16, or dequantize them with the tool that made them"

Specs: TypeAlias = Mapping[str, TensorSpec]


class _Fp8(BaseModel):
    """Of quant_method = fp8."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    weight_block_size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    scale_fmt: str | None = None


class _Weights(BaseModel):
    """How compressed-tensors stores the weights of a group of layers."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_bits: Literal[4, 8]
    type: Literal["int", "float"]
    strategy: Literal["tensor", "channel", "group", "block"]
    symmetric: Literal[True] = True
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    actorder: Literal[False] | None = None


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    weights: _Weights


class _CompressedTensors(BaseModel):
    """Of quant_method = compressed-tensors."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    quant_method: Literal["compressed-tensors"]
    format: Literal["pack-quantized", "float-quantized", "naive-quantized"]
    config_groups: Annotated[dict[str, _Group], Field(min_length=1)]


class Scheme(NamedTuple):
    """What a config.json says of quantized weights. grid, rounds_up: see `Matrix`.

    method: `quant_method`. block: rows and columns of one scale; None = one for a matrix, or for each row.
    """

    method: str
    grid: Grid
    block: tuple[int, int] | None
    rounds_up: bool = False

    @property
    def is_block_fp8(self) -> bool:
        """Whether it is as DeepSeek-V3 has it."""
        return self.method == "fp8" and self.block is not None

    @property
    def in_words(self) -> str:
        """For a sentence."""
        return "block fp8" if self.is_block_fp8 else f"{self.grid} by {self.method}"


def scheme_of(directory: Path) -> Scheme | None:
    """How a directory's weights are quantized, by its config.json; None = they are not.

    Raises:
        ModelLoadError: in a way that is not read here.
    """
    path = directory / "config.json"
    try:
        fields = TypeAdapter(dict[str, JsonValue]).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        # Whoever opens the config has a sentence for it.
        return None
    found = fields.get(QUANTIZATION)
    if not isinstance(found, dict):
        return None
    method = str(found.get("quant_method"))
    try:
        if method == "fp8":
            return _of_fp8(_Fp8.model_validate(found))
        if method == "compressed-tensors":
            return _of_compressed_tensors(_CompressedTensors.model_validate(found), path)
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([".".join(map(str, first["loc"])), first["msg"]])
        raise ModelLoadError(
            f"{path} quantizes weights by {method} in a way that is not read here ({reason}); {_REMEDY}."
        ) from None
    raise ModelLoadError(
        f"{path} holds weights quantized by {method}, and only fp8 and compressed-tensors (fp8, int4) are "
        f"read here; {_REMEDY}."
    )


def quantized_model(directory: str) -> str | None:
    """The directory, where engines serve its weights as they are stored, and these are quantized.

    Of adapters engines get the whole model, which is not. A model that was loaded from nowhere has no
    directory.

    Raises:
        ModelLoadError: see `scheme_of`.
    """
    path = Path(directory)
    if not directory or adapter_config(path) is not None or scheme_of(path) is None:
        return None
    return directory


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the model that quantized numbers stand for, in whatever way: a server may read them.

    transformers would otherwise build layers of its own for them, which need a GPU.
    """
    if getattr(config, QUANTIZATION, None) is not None:
        delattr(config, QUANTIZATION)
    return config


def matrices_of(directory: Path, stored: Specs) -> dict[str, Matrix]:
    """The quantized matrices among the tensors of a directory, by the names of their weights.

    Raises:
        ModelLoadError: see `scheme_of`; or the scales of a matrix are missing, or of another shape.
    """
    scheme = scheme_of(directory)
    if scheme is None:
        return {}
    if scheme.grid == "int4":
        names = [name.removesuffix(_PACKED) for name in stored if name.endswith(_PACKED)]
        found = [_int4(directory, name, stored, scheme) for name in names]
    else:
        names = [name.removesuffix(WEIGHT) for name, spec in stored.items() if spec.dtype == FP8]
        found = [_fp8(directory, name, stored, scheme) for name in names]
    return {matrix.name: matrix for matrix in found}


def names_beside(matrix: Matrix) -> tuple[str, ...]:
    """The tensors of a file that a matrix takes the place of: its parts, and a scale of activations."""
    return *(part.name for part in matrix.parts), f"{matrix.name.removesuffix(WEIGHT)}.input_scale"


def _of_fp8(config: _Fp8) -> Scheme:
    return Scheme("fp8", "fp8", config.weight_block_size, config.scale_fmt == "ue8m0")


def _of_compressed_tensors(config: _CompressedTensors, path: Path) -> Scheme:
    kinds = {group.weights for group in config.config_groups.values()}
    weights = next(iter(kinds))
    is_int4 = config.format == "pack-quantized"
    if len(kinds) > 1 or (weights.num_bits, weights.type) != ((4, "int") if is_int4 else (8, "float")):
        raise ModelLoadError(
            f"{path} quantizes weights by compressed-tensors, not all to int4 or all to fp8, and only these "
            f"are read here; {_REMEDY}."
        )
    if weights.strategy == "group":
        return Scheme(config.quant_method, "int4" if is_int4 else "fp8", (1, weights.group_size or 0))
    block = weights.block_structure if weights.strategy == "block" else None
    return Scheme(config.quant_method, "int4" if is_int4 else "fp8", block)


def _fp8(directory: Path, name: str, stored: Specs, scheme: Scheme) -> Matrix:
    weight = stored[f"{name}{WEIGHT}"]
    scales = next((stored[name + end] for end in _SCALES if name + end in stored), None)
    return _matrix(directory, weight, weight.shape, scheme, [weight, scales])


def _int4(directory: Path, name: str, stored: Specs, scheme: Scheme) -> Matrix:
    packed, scales = stored[name + _PACKED], stored.get(f"{name}.weight_scale")
    columns = 0 if scales is None else scales.shape[-1] * (scheme.block or (0, 0))[1]
    # Where each row has one scale, words say the columns: no published matrix has part of one.
    shape = (packed.shape[0], columns or packed.shape[-1] * 8)
    weight = TensorSpec(f"{name}{WEIGHT}", shape, packed.dtype)
    return _matrix(directory, weight, shape, scheme, [packed, scales, stored.get(name + _SHAPE)])


def _matrix(
    directory: Path,
    weight: TensorSpec,
    shape: tuple[int, ...],
    scheme: Scheme,
    parts: list[TensorSpec | None],
) -> Matrix:
    whole = tuple(part for part in parts if part is not None)
    if len(whole) < len(parts) or len(shape) != 2 or not all(shape):
        raise ModelLoadError(
            f"{directory} quantizes {weight.name}, and lacks its scales; copy all of its files again."
        )
    rows, columns = shape
    expected = whole[1].shape
    block = scheme.block
    if block is None:
        # One scale for all rows, or one for each.
        block = (1, columns) if expected == (rows, 1) else (rows, columns)
    counts = tuple(-(-size // max(each, 1)) for size, each in zip(shape, block, strict=True))
    is_single = counts == (1, 1) and expected in ((), (1,))
    if expected != counts and not is_single:
        raise ModelLoadError(
            f"{directory} holds scales {list(expected)} for {weight.name}, and its config.json says blocks "
            f"of {list(block)}; copy both from one place again."
        )
    return Matrix(weight.name, shape, scheme.grid, block, whole, scheme.rounds_up)

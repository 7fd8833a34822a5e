"""The low-rank adapters of a folder, as peft saves them: W + scale B A for a matrix W of a base model.

    adapter_config.json         the folder of the base model, r, lora_alpha
    adapter_model.safetensors   base_model.model.MATRIX.lora_A.weight [r, in], and .lora_B.weight [out, r]

They are read without peft, and nothing that was pickled is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from agentrl.errors import ModelLoadError
from agentrl.weights.hf.folders import ADAPTER_CONFIG, AdapterConfig, adapter_config
from agentrl.weights.hf.opening import check_finite, open_tensors

ADAPTER_TENSORS: Final = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = (".lora_A.weight", ".lora_B.weight")


class LowRank(NamedTuple):
    """What one matrix learns, scale b a. a: [r, in]. b: [out, r]."""

    a: Tensor
    b: Tensor
    scale: float


def adapter_names(matrix: str) -> tuple[str, str]:
    """The names of a and b in a file. matrix: without `.weight` at its end."""
    return f"{_PREFIX}{matrix}{_PARTS[0]}", f"{_PREFIX}{matrix}{_PARTS[1]}"


class Adapters:
    """Those of a folder, in memory. low_rank: by the names of the matrices, without `.weight` at their ends.

    is_transposed: whether the matrices are [in, out].
    """

    def __init__(self, directory: Path, low_rank: Mapping[str, LowRank], *, is_transposed: bool) -> None:
        self.directory, self.low_rank, self.is_transposed = directory, low_rank, is_transposed

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the base model has all the matrices. shapes: of its weights, by name.

        Raises:
            ModelLoadError: it has not.
        """
        for matrix, (a, b, _) in self.low_rank.items():
            shape = (a.shape[1], b.shape[0]) if self.is_transposed else (b.shape[0], a.shape[1])
            has = shapes.get(f"{matrix}.weight")
            if has != shape:
                found = "has no such matrix of its own" if has is None else f"has {list(has)} there"
                raise ModelLoadError(
                    f"{self.directory} adapts {matrix}, {list(shape)}, and its base model {found}; write the "
                    "folder of the model that they were learned on to base_model_name_or_path in "
                    f"{self.directory / ADAPTER_CONFIG}."
                )

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """A weight of the base model with what it has learned, in its dtype. name: with `.weight`."""
        low_rank = self.low_rank.get(name.removesuffix(".weight"))
        if low_rank is None or not name.endswith(".weight"):
            return tensor
        delta = low_rank.b.float() @ low_rank.a.float()
        delta = (delta.T if self.is_transposed else delta) * low_rank.scale
        return (tensor.float() + delta.to(tensor.device)).to(tensor.dtype)


def opened_adapters(directory: Path) -> Adapters | None:
    """The adapters of a folder; None = it has none.

    Raises:
        ModelLoadError: they are damaged, or no plain LoRA.
    """
    config = adapter_config(directory)
    if config is None:
        return None
    path = directory / ADAPTER_TENSORS
    if not path.is_file():
        raise ModelLoadError(
            f"{directory} holds no {ADAPTER_TENSORS}; copy it, or save the adapters with safetensors: "
            "nothing that was pickled is read."
        )
    with open_tensors(path) as opened:
        names: list[str] = opened.keys()
        tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in names}
    if not tensors:
        raise ModelLoadError(f"{path} holds no tensors; copy it again.")
    check_finite(path, tensors.items())
    low_rank = {}
    for matrix in sorted({_matrix_of(name, path) for name in tensors}):
        pair = [tensors.get(name) for name in adapter_names(matrix)]
        low_rank[matrix] = _checked(path, matrix, pair, config)
    return Adapters(directory, low_rank, is_transposed=config.fan_in_fan_out)


def _matrix_of(name: str, path: Path) -> str:
    for part in _PARTS:
        if name.startswith(_PREFIX) and name.endswith(part):
            return name.removeprefix(_PREFIX).removesuffix(part)
    raise ModelLoadError(
        f"{path} holds {name}, and only plain LoRA is read here; merge the adapters into their model with "
        "peft, and name that folder."
    )


def _checked(path: Path, matrix: str, pair: list[Tensor | None], config: AdapterConfig) -> LowRank:
    a, b = pair
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise ModelLoadError(f"{path} holds no A and B of one rank for {matrix}; copy it again.")
    rank = len(a)
    if rank != config.r and not config.rank_pattern:
        raise ModelLoadError(
            f"{path} holds adapters of rank {rank} for {matrix}, its {ADAPTER_CONFIG} says {config.r}; copy "
            "both from one place again."
        )
    return LowRank(a, b, config.lora_alpha / (math.sqrt(rank) if config.use_rslora else rank))


def low_rank_of(tensors: Iterable[tuple[str, Tensor]], scale: float) -> dict[str, LowRank]:
    """What matrices learn, by their names. tensors: by the names that files have."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        part = next(part for part in _PARTS if name.endswith(part))
        pairs.setdefault(name.removeprefix(_PREFIX).removesuffix(part), {})[part] = tensor
    return {matrix: LowRank(pair[_PARTS[0]], pair[_PARTS[1]], scale) for matrix, pair in pairs.items()}


def stacked(first: Mapping[str, LowRank], second: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """The sum of two, of ranks r and s, as one of rank r + s: its A has theirs below each other, its B has
    theirs side by side. Of a matrix that only one of them has, the other adds 0."""
    ranks = [max(len(a) for a, _, _ in adapters.values()) for adapters in (first, second)]
    both = {}
    for matrix in {**first, **second}:
        found = [adapters.get(matrix) for adapters in (first, second)]
        a, b, _ = next(filter(None, found))
        padded = [
            _padded(each or LowRank(a[:0], b[:, :0], 1.0), n) for each, n in zip(found, ranks, strict=True)
        ]
        both[matrix] = LowRank(
            torch.cat([a for a, _ in padded]), torch.cat([b for _, b in padded], dim=1), 1.0
        )
    return both


def _padded(low_rank: LowRank, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of a larger rank in fp32, with the scale in B."""
    a, b, scale = low_rank
    more = rank - len(a)
    return nn.functional.pad(a.float(), (0, 0, 0, more)), nn.functional.pad(b.float() * scale, (0, more))

"""Weights as a Hugging Face directory, written bucket by bucket, never all in memory."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import SystemErrors
from agentrl.types import JSON
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.codec import bytes_of, slices
from agentrl.weights.hf.adapters import (
    ADAPTER_TENSORS,
    LowRank,
    adapter_names,
    opened_adapters,
    stacked,
)
from agentrl.weights.hf.ahead import StillLayers
from agentrl.weights.hf.directory import atomic_directory
from agentrl.weights.hf.folders import (
    ADAPTER_CONFIG,
    TOKENIZER_FILES,
    AdapterConfig,
    adapter_config,
    base_folder,
    tokenizer_folder,
)
from agentrl.weights.hf.quantized import QUANTIZATION
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import FLOATS, TensorFiles, file_names, holds_tensors, meta_model
from agentrl.weights.quiet import quiet_transformers
from agentrl.weights.streamed import FILE_BYTES, write_model


# A trained model as a Hugging Face directory.
def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str,
) -> None:
    """Write model and tokenizer as a Hugging Face directory, atomically.

    Raises:
        OSError: the disk did not take it.
    """
    with atomic_directory(Path(directory)) as partial, SystemErrors(Path(directory)):
        with quiet_transformers():
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


_IGNORED_FILES = shutil.ignore_patterns(
    *(
        ADAPTER_CONFIG,
        "*.safetensors",
        "*.safetensors.index.json",
        "*.bin",
        "*.bin.index.json",
        "*.pt",
        "*.pth",
        "*.gguf",
    ),
    *(".git", ".cache"),
)


def write_directory(
    target: Path, buckets: Iterator[Bucket], *, manifest: Sequence[TensorSpec], like: Path
) -> None:
    """Write the tensors of the buckets; the iterator is exhausted also where writing fails.

    Layers of `like` that predict further ahead, and did not learn, are kept.

    Raises:
        ModelLoadError: `like` cannot be read any more.
        ValueError: the buckets do not match the manifest.
    """
    try:
        still = StillLayers(like, manifest)
        pieces = still.after(piece for bucket in buckets for piece in slices(bucket))
        write_tensors(target, pieces, manifest=[*manifest, *still.specs], like=like)
    finally:
        for _ in buckets:
            pass


def write_tensors(
    target: Path,
    tensors: Iterable[tuple[TensorSpec, npt.NDArray[np.uint8]]],
    *,
    manifest: Sequence[TensorSpec],
    like: Path,
    file_bytes: int = FILE_BYTES,
    quantization: Mapping[str, JSON] | None = None,
) -> None:
    """Write tensors, as bytes and in the order of the manifest, into the files in which `like` has them, or
    into some of about `file_bytes`, where it has none.

    All other files are copied from `like`; the write is atomic. quantization: what config.json says of
    tensors that are quantized.

    Raises:
        ValueError: the tensors do not match the manifest.
    """
    with atomic_directory(target) as partial:
        dtype = next((spec.dtype for spec in manifest if spec.dtype in FLOATS), "bfloat16")
        copy_without_weights(like, partial, dtype=dtype, quantization=quantization)
        files = _files_like(base_folder(like), manifest)
        write_model(partial, manifest, tensors, file_bytes=file_bytes, files=files)


def _files_like(like: Path, manifest: Sequence[TensorSpec]) -> dict[str, str] | None:
    """The file of each tensor, as a folder has it; None = it does not say so.

    One that the folder lacks, such as a scale, is in the file of the tensor before it.
    """
    if not holds_tensors(like):
        return None
    known = file_names(like)
    # Names from elsewhere become files here.
    if any(Path(name).name != name for name in known.values()):
        return None
    files: dict[str, str] = {}
    file = known.get("")
    for spec in manifest:
        file = known.get(spec.name, file)
        if file is None:
            return None
        files[spec.name] = file
    return files


def merge_adapters(directory: Path, target: Path) -> None:
    """Write the base model of a folder of adapters, with these added to it, into another folder, atomically.

    Tensor by tensor: the memory is that of the largest one, and the dtypes are the base model's.

    Raises:
        ModelLoadError: the folder has no adapters, or see `TensorFiles`.
        OSError: the disk does not take it.
    """
    if adapter_config(directory) is None:
        raise ModelLoadError(f"{directory} holds no {ADAPTER_CONFIG}; name a folder of adapters.")
    with TensorFiles(directory) as files:
        pieces = ((spec, bytes_of(files.read(spec.name))) for spec in files.all_specs)
        write_tensors(target, pieces, manifest=files.all_specs, like=directory)


def whole_model(directory: Path, target: Path) -> Path:
    """A folder with all weights of a model: its own, or `target`, into which adapters are merged.

    Raises:
        ModelLoadError, OSError: see `merge_adapters`.
    """
    if adapter_config(directory) is None:
        return directory
    merge_adapters(directory, target)
    return target


def copy_without_weights(
    like: Path, folder: Path, *, dtype: str, quantization: Mapping[str, JSON] | None = None
) -> None:
    """Copy a Hugging Face directory without its weights to `folder`; of adapters, that of their base model
    with their own tokenizer. dtype: of the new weights. quantization: see `write_tensors`.

    Raises:
        ModelLoadError: see `base_folder`.
    """
    own, like = like, base_folder(like)
    # Contents only, no permissions: `like` may be read-only. shutil.copytree would make one error of several,
    # which does not say any more that the disk is full.
    for place, folders, names in os.walk(like, followlinks=True):
        ignored = _IGNORED_FILES(place, [*folders, *names])
        folders[:] = [name for name in folders if name not in ignored]
        target = folder / Path(place).relative_to(like)
        target.mkdir(parents=True)
        for name in names:
            if name not in ignored:
                shutil.copyfile(Path(place) / name, target / name)
    if own != like:
        copy_tokenizer(own, folder)
    config = folder / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    # transformers casts the weights that it loads to the dtype in the config.
    changed: dict[str, JSON] = {
        key: dtype for key in ("dtype", "torch_dtype") if fields.get(key) not in (None, dtype)
    }
    if quantization is not None:
        changed[QUANTIZATION] = dict(quantization)
    if changed or QUANTIZATION in fields:
        # What is not given is not quantized: `like` may be.
        kept = {key: value for key, value in fields.items() if key != QUANTIZATION}
        config.write_text(json.dumps({**kept, **changed}, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(like: Path, folder: Path) -> None:
    """Copy the files of a model's tokenizer.

    Raises:
        ModelLoadError: see `base_folder`.
    """
    like = tokenizer_folder(like)
    for name in TOKENIZER_FILES:
        if (like / name).is_file():
            shutil.copyfile(like / name, folder / name)


def save_adapters(directory: Path, learned: Mapping[str, LowRank], *, like: Path) -> None:
    """Write a folder with adapters and the tokenizer of the model that they were learned on, atomically.

    Raises:
        OSError: the disk does not take it.
    """
    with atomic_directory(directory) as partial:
        partial.mkdir()
        write_adapters(partial, learned, like=like)
        copy_tokenizer(like, partial)


def write_adapters(folder: Path, learned: Mapping[str, LowRank], *, like: Path) -> None:
    """Write adapters into a folder as peft does. learned: by the names of their matrices.

    like: the model that they were learned on. Where it has adapters itself, both are written as one, for its
    base model; see `stacked`.

    Raises:
        OSError: the disk does not take it.
    """
    earlier = opened_adapters(like)
    if earlier is not None:
        learned = stacked(earlier.low_rank, learned)
    base = base_folder(like)
    a, _, scale = next(iter(learned.values()))
    config = AdapterConfig(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        # Whoever reads it may have another working directory.
        base_model_name_or_path=str(base.absolute()),
        r=len(a),
        lora_alpha=_number(scale * len(a)),
        target_modules=sorted(learned),
        fan_in_fan_out=_is_transposed(base),
        inference_mode=True,
    )
    tensors = {
        name: tensor.contiguous()
        for matrix in sorted(learned)
        for name, tensor in zip(adapter_names(matrix), learned[matrix][:2], strict=True)
    }
    with SystemErrors(folder):
        save_file(tensors, folder / ADAPTER_TENSORS, {"format": "pt"})
    text = config.model_dump_json(indent=2, exclude_none=True)
    (folder / ADAPTER_CONFIG).write_text(f"{text}\n", encoding="utf-8")


def _is_transposed(base: Path) -> bool:
    """Whether the matrices that a model adapts are [in, out], as those of GPT-2 are."""
    return any(isinstance(module, Conv1D) for module in meta_model(open_config(base)).modules())


def _number(alpha: float) -> float:
    """Without the rounding of `alpha / rank * rank`, where it was a whole number."""
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha

"""The model of a Hugging Face directory, loaded with all its weights."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from threading import Lock
from types import EllipsisType
from typing import Self, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import check_fetched
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.adapters import Adapters, opened_adapters
from agentrl.weights.hf.folders import base_folder
from agentrl.weights.hf.opening import check_finite
from agentrl.weights.hf.quantized import scheme_of
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import CONFIG_ERRORS, TensorFiles, meta_model
from agentrl.weights.model_types import AutoModelForCausalLM
from agentrl.weights.quiet import quiet_transformers

_LONGEST_REASON = 300


def open_directory(directory: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load all weights of a model directory, from this machine only; adapters, added to their base model's.

    Raises:
        ModelLoadError: the directory is missing, incomplete or broken, or a weight is not a finite number;
            see also `base_folder`.
    """
    path, adapters = base_folder(Path(directory)), opened_adapters(Path(directory))
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} holds no config.json; name a Hugging Face model directory.")
    check_fetched([path / "config.json", *sorted(path.glob("*.safetensors*"))], ModelLoadError)
    is_quantized = scheme_of(path) is not None
    try:
        with quiet_transformers():
            opened = (_dequantized if is_quantized else _as_stored)(path, dtype)
    except (OSError, SafetensorError, *CONFIG_ERRORS) as error:
        reason = shorten(str(error), _LONGEST_REASON) or type(error).__name__
        raise ModelLoadError(f"the model in {path} cannot be loaded: {reason}") from error
    model, report = cast("tuple[PreTrainedModel, dict[str, list[str]]]", opened)
    # transformers only warns, and initializes such tensors at random.
    if report["mismatched_keys"]:
        raise ModelLoadError(
            f"the model in {path} has {len(report['mismatched_keys'])} tensors of another shape than its "
            "config.json says; copy both from one place again."
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"the model in {path} lacks {len(missing)} tensors, {missing[0]} among them; copy it again."
        )
    if is_quantized:
        _complete(model, path)
    if adapters is not None:
        _add(adapters, model)
        model.name_or_path = str(directory)
    check_finite(path, named_weights(model))
    return model


def _as_stored(path: Path, dtype: torch.dtype) -> object:
    return AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )


def _dequantized(path: Path, dtype: torch.dtype) -> object:
    """The model that quantized numbers stand for; its matrices are computed one by one as it is built."""
    config = open_config(path)
    with TensorFiles(path) as files, _Reading(files) as reading:
        opened: object = type(meta_model(config)).from_pretrained(
            None,
            config=config,
            state_dict={name: _Stored(reading, name) for name in files.names},
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    return opened


def _complete(model: PreTrainedModel, path: Path) -> None:
    """Give a model what transformers reads beside the weights of a directory."""
    model.name_or_path = str(path)
    if (path / GENERATION_CONFIG_NAME).is_file():
        with quiet_transformers():
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)


class _Reading:
    """Reads one tensor at a time during the block, whichever thread asks: transformers has several, and after
    an error in one of them it does not wait for the others, whose files would be closed in mid-read."""

    def __init__(self, files: TensorFiles) -> None:
        self._files, self._lock, self._is_over = files, Lock(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True

    def read(self, name: str) -> Tensor:
        """The numbers of a tensor.

        Raises:
            ModelLoadError: they are none, or the block has ended.
        """
        with self._lock:
            if self._is_over:
                raise ModelLoadError(f"{name} was not read: another tensor could not be.")
            return self._files.read(name)


class _Stored:
    """A tensor of a directory, for transformers, which reads it as it reads a slice of a file."""

    def __init__(self, reading: _Reading, name: str) -> None:
        self._reading, self._name = reading, name

    def __getitem__(self, whole: EllipsisType) -> Tensor:
        return self._reading.read(self._name)


@torch.no_grad()
def _add(adapters: Adapters, model: PreTrainedModel) -> None:
    parameters = dict(model.named_parameters())
    adapters.check({name: tuple(parameter.shape) for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        parameter.copy_(adapters.merged(name, parameter))

"""The model of a Hugging Face directory, loaded with all its weights."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import check_fetched
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.adapters import Adapters, opened_adapters
from agentrl.weights.hf.folders import base_folder
from agentrl.weights.hf.opening import check_finite
from agentrl.weights.hf.tensors import CONFIG_ERRORS
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
    try:
        with quiet_transformers():
            opened = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
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
    if adapters is not None:
        _add(adapters, model)
        model.name_or_path = str(directory)
    check_finite(path, named_weights(model))
    return model


@torch.no_grad()
def _add(adapters: Adapters, model: PreTrainedModel) -> None:
    parameters = dict(model.named_parameters())
    adapters.check({name: tuple(parameter.shape) for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        parameter.copy_(adapters.merged(name, parameter))

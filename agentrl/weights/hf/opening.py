"""Safetensors files, opened: damaged ones, and numbers that are not finite, are refused in a sentence."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import check_fetched
from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import NamedTensors, non_finite
from agentrl.weights.streamed import dtype_of_code


def check_finite(path: Path, tensors: NamedTensors) -> None:
    """Check that all weights of the model at `path` are finite: sampling from any other is meaningless.

    Raises:
        ModelLoadError: one is NaN or infinite.
    """
    name = non_finite(tensors)
    if name is not None:
        raise ModelLoadError(
            f"{path} holds weights that are not finite numbers, in {name}: the training that wrote it has "
            "diverged, or the copy is damaged; take an earlier checkpoint, or copy it again."
        )


def open_tensors(path: Path) -> safe_open:
    """A safetensors file.

    Raises:
        ModelLoadError: it is missing, or its header is truncated or damaged.
    """
    check_fetched([path], ModelLoadError)
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); copy it again.") from None
    except SafetensorError as error:
        raise ModelLoadError(f"{path} is cut short or damaged ({error}); copy it again.") from None


def specs_in(opened: safe_open) -> dict[str, TensorSpec]:
    """The tensors of a file, by name."""
    names: list[str] = opened.keys()
    slices = {name: opened.get_slice(name) for name in names}
    return {
        name: TensorSpec(name, tuple(tensor.get_shape()), dtype_of_code(tensor.get_dtype()))
        for name, tensor in slices.items()
    }

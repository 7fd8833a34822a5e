"""The tensors of a Hugging Face directory, read one at a time, never the whole of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import NamedTuple, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from agentrl.errors import ModelLoadError
from agentrl.protocols import TensorSpec
from agentrl.weights.quiet import quiet_transformers
from agentrl.weights.streamed import dtype_of_code

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_SENSELESS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


class _Index(BaseModel):
    """Which file each tensor is in."""

    model_config = ConfigDict(frozen=True)

    weight_map: dict[str, str]


class _Held(NamedTuple):
    """A tensor, and the file that it is in."""

    path: Path
    opened: safe_open
    stored: TensorSpec


class TensorFiles:
    """Tensors by their names. Close it, or use it in a `with`.

    Raises:
        ModelLoadError: the directory holds no safetensors, or damaged ones.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._files = ExitStack()
        self._at: dict[str, _Held] = {}
        for name in sorted(set(self._places().values())):
            path = self.directory / name
            opened = self._files.enter_context(open_tensors(path))
            self._at |= {name: _Held(path, opened, stored) for name, stored in specs_in(opened).items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    @property
    def names(self) -> frozenset[str]:
        """All tensors of its files."""
        return frozenset(self._at)

    def read(self, name: str) -> Tensor:
        """A tensor.

        Raises:
            ModelLoadError: there is none of that name.
        """
        tensor: Tensor = self._held(name).opened.get_tensor(name)
        return tensor

    def spec(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> TensorSpec:
        """A tensor as its file describes it. shape: what the config says. dtype: in place of the file's.

        Raises:
            ModelLoadError: there is no tensor of that name, or it has another shape.
        """
        path, _, stored = self._held(name)
        if stored.shape != shape:
            raise ModelLoadError(
                f"{path} holds {name} as {list(stored.shape)}, its config.json says "
                f"{list(shape)}; copy both from one place again."
            )
        return stored._replace(dtype=dtype or stored.dtype)

    def _held(self, name: str) -> _Held:
        if name not in self._at:
            raise ModelLoadError(f"{self.directory} has no tensor {name}; is it a whole model?")
        return self._at[name]

    def _places(self) -> dict[str, str]:
        """The file of every tensor; of all of them, where there is one."""
        index = self.directory / _INDEX
        if index.exists():
            try:
                return _Index.model_validate_json(index.read_bytes()).weight_map
            except OSError as error:
                raise ModelLoadError(f"{index} cannot be read ({error}); copy it again.") from None
            except ValidationError as error:
                first = error.errors()[0]
                said = ": ".join([*map(str, first["loc"]), first["msg"]])
                raise ModelLoadError(f"{index} is no index of tensors ({said}); copy it again.") from None
        if not (self.directory / _SINGLE).exists():
            raise ModelLoadError(
                f"{self.directory} holds no {_SINGLE} and no {_INDEX}; save the model with safetensors."
            )
        return {"": _SINGLE}


def tensor_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a model with this config has, by its Hugging Face name.

    Raises:
        ModelLoadError: there is no model of such sizes.
    """
    with making_sense(Path(config.name_or_path or ".")), quiet_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def num_parameters(config: PreTrainedConfig) -> int:
    """Numbers that a model with this config has to learn (count); tied ones count once.

    Raises:
        ModelLoadError: there is no model of such sizes.
    """
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


@contextmanager
def making_sense(directory: Path) -> Iterator[None]:
    """As one sentence: what a damaged config comes to, in transformers, in torch and in `shape_of`."""
    try:
        yield
    except _SENSELESS as error:
        said = shorten(f"{type(error).__name__}: {error}", 200)
        raise ModelLoadError(f"{directory / _CONFIG} makes no sense ({said}); copy it again.") from error


def open_tensors(path: Path) -> safe_open:
    """A safetensors file.

    Raises:
        ModelLoadError: it is missing, or cut short or damaged where it says what it holds.
    """
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); copy it again.") from None
    except SafetensorError as error:
        raise ModelLoadError(f"{path} is cut short or damaged ({error}); copy it again.") from None


def specs_in(opened: safe_open) -> dict[str, TensorSpec]:
    """What a file holds, by name."""
    names: list[str] = opened.keys()
    told = {name: opened.get_slice(name) for name in names}
    return {
        name: TensorSpec(name, tuple(one.get_shape()), dtype_of_code(one.get_dtype()))
        for name, one in told.items()
    }

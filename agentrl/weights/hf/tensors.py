"""The tensors of a Hugging Face directory, read one at a time, never all in memory.

Of a folder of adapters, those of its base model, with the adapters added as they are read. Of a quantized
model, the matrices that its numbers and scales stand for, in the dtype of its other weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import NamedTuple, Self

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import check_fetched
from agentrl.types.seams import TensorSpec
from agentrl.weights.cast import decoded
from agentrl.weights.codec import names_in_checkpoints, torch_dtype
from agentrl.weights.hf.adapters import opened_adapters
from agentrl.weights.hf.folders import base_folder
from agentrl.weights.hf.opening import check_finite, open_tensors, specs_in
from agentrl.weights.hf.quantized import matrices_of, names_beside
from agentrl.weights.model_types import AutoModelForCausalLM
from agentrl.weights.quiet import quiet_transformers
from agentrl.weights.streamed import INDEX_FILE, SINGLE_FILE

_CONFIG = "config.json"
_UNKNOWN_TYPE = re.compile("has model type `([^`]{1,80})` but Transformers does not recognize")
FLOATS = ("bfloat16", "float16", "float32")
"""The dtypes of weights that are not quantized, as torch prints them."""
CONFIG_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


class _Index(BaseModel):
    """The file of each tensor."""

    model_config = ConfigDict(frozen=True)

    weight_map: dict[str, str]


class _StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    opened: safe_open
    stored: TensorSpec


class TensorFiles:
    """Tensors by their names. Close it, or use it in a `with`.

    Raises:
        ModelLoadError: the directory holds no safetensors, or damaged ones; see also `base_folder`.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = base_folder(Path(directory))
        self._adapters = opened_adapters(Path(directory))
        self._files = ExitStack()
        self._stored: dict[str, _StoredTensor] = {}
        for name in sorted(set(file_names(self.directory).values())):
            path = self.directory / name
            opened = self._files.enter_context(open_tensors(path))
            self._stored |= {
                name: _StoredTensor(path, opened, stored) for name, stored in specs_in(opened).items()
            }
        self.matrices = matrices_of(self.directory, {name: e.stored for name, e in self._stored.items()})
        """Those of its tensors that are stored in fewer bits, by name; see `agentrl.weights.cast`."""
        self._parts = {name for matrix in self.matrices.values() for name in names_beside(matrix)}
        if self._adapters is not None:
            self._adapters.check({spec.name: spec.shape for spec in self.all_specs})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    @property
    def names(self) -> frozenset[str]:
        """All tensors of the model in its files."""
        return frozenset(self._stored).difference(self._parts).union(self.matrices)

    @property
    def all_specs(self) -> tuple[TensorSpec, ...]:
        """All tensors of the model in its files, by name."""
        return tuple(self._spec_of(name) for name in sorted(self.names))

    def read(self, name: str) -> Tensor:
        """A tensor.

        Raises:
            ModelLoadError: there is none of that name, or it holds a number that is not finite.
        """
        path, opened, _ = self._lookup(name)
        if (matrix := self.matrices.get(name)) is not None:
            tensor = decoded([self._part(part.name) for part in matrix.parts], matrix, self._dtype)
        else:
            tensor = opened.get_tensor(name)
        if self._adapters is not None:
            tensor = self._adapters.merged(name, tensor)
        check_finite(path, [(name, tensor)])
        return tensor

    def spec(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> TensorSpec:
        """The spec of a tensor in its file. shape: by the config. dtype: in place of the file's.

        Raises:
            ModelLoadError: there is no tensor of that name, or it has another shape.
        """
        path, stored = self._lookup(name).path, self._spec_of(name)
        if stored.shape != shape:
            raise ModelLoadError(
                f"{path} holds {name} as {list(stored.shape)}, its config.json says "
                f"{list(shape)}; copy both from one place again."
            )
        return stored._replace(dtype=dtype or stored.dtype)

    @cached_property
    def _dtype(self) -> torch.dtype:
        """Of the matrices that quantized numbers stand for: that of the model's other weights."""
        found = {entry.stored.dtype for name, entry in self._stored.items() if name not in self._parts}
        # The shorter one: of some models norms or routers alone are in fp32.
        return torch_dtype(next((dtype for dtype in FLOATS if dtype in found), "bfloat16"))

    def _part(self, name: str) -> Tensor:
        part: Tensor = self._stored[name].opened.get_tensor(name)
        return part

    def _spec_of(self, name: str) -> TensorSpec:
        matrix = self.matrices.get(name)
        if matrix is None:
            return self._stored[name].stored
        return TensorSpec(name, matrix.shape, str(self._dtype).removeprefix("torch."))

    def _lookup(self, name: str) -> _StoredTensor:
        """The file of a tensor; of one that has several parts, of the first."""
        first = self.matrices[name].parts[0].name if name in self.matrices else name
        if first not in self._stored or name in self._parts - self.matrices.keys():
            raise ModelLoadError(f"{self.directory} has no tensor {name}; is it a whole model?")
        return self._stored[first]


def file_names(directory: Path) -> dict[str, str]:
    """The file of every tensor, by the index of a directory; {"": file} where one file holds all.

    Raises:
        ModelLoadError: the directory holds no safetensors, or a damaged index.
    """
    index = directory / INDEX_FILE
    if index.exists():
        check_fetched([index], ModelLoadError)
        try:
            return _Index.model_validate_json(index.read_bytes()).weight_map
        except OSError as error:
            raise ModelLoadError(f"{index} cannot be read ({error}); copy it again.") from None
        except ValidationError as error:
            first = error.errors()[0]
            reason = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise ModelLoadError(f"{index} is no index of tensors ({reason}); copy it again.") from None
    if not (directory / SINGLE_FILE).exists():
        raise ModelLoadError(
            f"{directory} holds no {SINGLE_FILE} and no {INDEX_FILE}; save the model with safetensors."
        )
    return {"": SINGLE_FILE}


def holds_tensors(directory: Path) -> bool:
    """Whether a directory has files of weights that `TensorFiles` reads."""
    return any((directory / name).exists() for name in (INDEX_FILE, SINGLE_FILE))


def tensor_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint with this config, by its name there: experts one by one.

    Raises:
        ModelLoadError: there is no model of such sizes.
    """
    model = meta_model(config)
    saved = model.state_dict().keys()
    own = dict(model.named_parameters()) | {n: buffer for n, buffer in model.named_buffers() if n in saved}
    renamed = names_in_checkpoints(model, own)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in own.items():
        shapes |= {part: tuple(shape) for part, shape in renamed.get(name, {name: tensor.shape}).items()}
    return shapes


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with this config in fp32, without memory: its parameters are on torch's device `meta`.

    Raises:
        ModelLoadError: there is no model of such sizes.
    """
    with config_errors(Path(config.name_or_path or ".")), quiet_transformers(), torch.device("meta"):
        # The dtype of a config is that of its files; it would become fp32.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            deepcopy(config), dtype=torch.float32, trust_remote_code=False
        )
    return model


def num_parameters(config: PreTrainedConfig) -> int:
    """The parameters of a model with this config (count); tied ones count once.

    Raises:
        ModelLoadError: there is no model of such sizes.
    """
    return sum(parameter.numel() for parameter in meta_model(config).parameters())


@contextmanager
def config_errors(directory: Path) -> Iterator[None]:
    """Replace the errors of an invalid config, by transformers, torch or `shape_of`, with one sentence."""
    try:
        yield
    except CONFIG_ERRORS as error:
        if unknown := _UNKNOWN_TYPE.search(str(error)):
            raise ModelLoadError(
                f"{directory / _CONFIG} is of model type `{unknown[1]}`, which neither transformers "
                f"{transformers.__version__} nor agentrl has; its Python files are never run. Choose another."
            ) from error
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise ModelLoadError(f"{directory / _CONFIG} makes no sense ({reason}); copy it again.") from error

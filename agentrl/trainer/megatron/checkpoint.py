"""A Hugging Face directory as Megatron's ranks read it: tensor by tensor, never the whole of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from agentrl.errors import ModelLoadError
from agentrl.protocols import TensorSpec
from agentrl.trainer.megatron.families import rules_of
from agentrl.trainer.megatron.shape import Shape, shape_of

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint:
    """Tensors by their names. Close it, or use it in a `with`.

    Raises:
        ModelLoadError: the directory holds no safetensors, or a model that Megatron does not train.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self.shape: Shape = shape_of(AutoConfig.from_pretrained(self.directory, local_files_only=True))
        except (OSError, ValueError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelLoadError(f"{directory} cannot be read: {reason}") from error
        self._files = ExitStack()
        self._at: dict[str, safe_open] = {}
        for name in sorted(set(self._places().values())):
            opened = self._files.enter_context(safe_open(self.directory / name, framework="pt"))
            self._at |= dict.fromkeys(opened.keys(), opened)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, name: str) -> Tensor:
        """A tensor.

        Raises:
            ModelLoadError: there is none of that name.
        """
        if name not in self._at:
            raise ModelLoadError(f"{self.directory} has no tensor {name}; is it a whole model?")
        tensor: Tensor = self._at[name].get_tensor(name)
        return tensor

    def specs(self, dtype: str) -> Iterator[TensorSpec]:
        """What a trained copy of this model consists of, in the order in which it is published."""
        layers = int(self.shape.sizes["num_layers"])
        for placed in rules_of(self.shape.family, layers, tied=self.shape.tied):
            for name in placed.hf:
                if name not in self._at:
                    raise ModelLoadError(f"{self.directory} has no tensor {name}; is it a whole model?")
                yield TensorSpec(name, tuple(self._at[name].get_slice(name).get_shape()), dtype)

    def _places(self) -> dict[str, str]:
        """The file of every tensor; of all of them, where there is one."""
        index = self.directory / _INDEX
        if index.exists():
            places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return places
        if not (self.directory / _SINGLE).exists():
            raise ModelLoadError(f"{self.directory} holds no {_SINGLE} and no {_INDEX}; convert the model.")
        return {"": _SINGLE}

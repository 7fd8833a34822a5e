"""A Hugging Face directory as Megatron's ranks read it: tensor by tensor, never the whole of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from agentrl.checkpoints.tensors import TensorFiles, making_sense, tensor_shapes
from agentrl.errors import ModelLoadError
from agentrl.protocols import TensorSpec
from agentrl.trainer.megatron.model.shape import Shape, shape_of


class Checkpoint(TensorFiles):
    """Tensors by their names, and the shape of their model. Close it, or use it in a `with`.

    Raises:
        ModelLoadError: the directory holds no safetensors, or a model that Megatron does not train.
    """

    def __init__(self, directory: str | Path) -> None:
        self.config = config_of(Path(directory))
        self.shape: Shape = shape_of(self.config)
        super().__init__(directory)

    def specs(self, dtype: str | None = None) -> Iterator[TensorSpec]:
        """What a trained copy of this model consists of, in the order in which it is published.

        dtype: of all tensors; None = as its files have them.

        Raises:
            ModelLoadError: a tensor is missing, or has another shape than the config says.
        """
        shapes = tensor_shapes(self.config)
        for name in (name for placed in self.shape.rules() for name in placed.hf):
            yield self.spec(name, shapes[name], dtype)


def config_of(directory: Path) -> PreTrainedConfig:
    """The config of a Hugging Face directory, out of which a `Shape` can be read.

    Raises:
        ModelLoadError: there is none, it makes no sense, or Megatron does not train such models.
    """
    with making_sense(directory):
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelLoadError(f"{directory} cannot be read: {reason}") from error
        shape_of(config)
    return config

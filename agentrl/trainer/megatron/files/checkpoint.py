"""A Hugging Face directory, read tensor by tensor, so that a rank never holds all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedConfig

from agentrl.errors import ModelLoadError
from agentrl.trainer.megatron.model.shape import Shape, num_ahead, shape_of, tensor_shapes_of
from agentrl.types.seams import TensorSpec
from agentrl.weights.hf.folders import base_folder
from agentrl.weights.hf.quantized import without_quantization
from agentrl.weights.hf.tensors import TensorFiles, config_errors
from agentrl.weights.model_types import AutoConfig


class CheckpointReader(TensorFiles):
    """Tensors by their names, and the shape of their model. Close it, or use it in a `with`.

    ahead: with its layers that predict tokens further ahead.

    Raises:
        ModelLoadError: the directory holds no safetensors, or a model that Megatron does not train; or no
            such layers.
    """

    def __init__(self, directory: str | Path, *, ahead: bool = False) -> None:
        self.config = config_of(Path(directory))
        self.shape: Shape = shape_of(self.config)
        rules, number = self.shape.family.ahead, num_ahead(self.config)
        if ahead and not number:
            raise _without_ahead(directory)
        super().__init__(directory)
        self.has_ahead = (
            rules is not None and number > 0 and rules.first(len(self.shape.experts_by_layer)) in self.names
        )
        """Whether its files have layers that predict further ahead."""
        if ahead and not self.has_ahead:
            self.close()
            raise _without_ahead(directory)
        if ahead:
            self.shape = self.shape._replace(ahead=number)

    def specs(self, dtype: str | None = None) -> Iterator[TensorSpec]:
        """The tensors of a trained copy of this model, in the order of publication.

        dtype: of all tensors that learn; None = as in its files.

        Raises:
            ModelLoadError: a tensor is missing, or its shape contradicts the config.
        """
        shapes = tensor_shapes_of(self.shape, self.config)
        for name, (placed, *_) in self.shape.by_tensor().items():
            yield self.spec(name, shapes[name], dtype if placed.rule.learns else "float32")


def _without_ahead(directory: str | Path) -> ModelLoadError:
    return ModelLoadError(
        f"{directory} has no layers that predict several tokens, or not of a kind that Megatron trains here; "
        "leave enable_mtp_training out."
    )


def config_of(directory: Path) -> PreTrainedConfig:
    """The config of a Hugging Face directory, from which a `Shape` can be read.

    Raises:
        ModelLoadError: there is none, it is invalid, or Megatron does not train such models.
    """
    directory = base_folder(directory)
    with config_errors(directory):
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelLoadError(f"{directory} cannot be read: {reason}") from error
        config = without_quantization(config)
        shape_of(config)
    return config

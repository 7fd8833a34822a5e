"""The parts of a model that a run's driver loads: its config and its tokenizer, never its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import check_fetched
from agentrl.weights.hf.folders import (
    TOKENIZER_FILES,
    base_folder,
    check_has_config,
    model_remedy,
    tokenizer_folder,
)
from agentrl.weights.hf.quantized import without_quantization
from agentrl.weights.hf.tensors import config_errors, meta_model
from agentrl.weights.model_types import AutoConfig
from agentrl.weights.quiet import quiet_transformers

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""The fields of configs that say how many experts a layer has."""
_TIKTOKEN = "tiktoken.model"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model directory with its config and tokenizer; the processes that compute load its weights.

    seed: for weights that the first process to open them initializes; None = the directory holds weights.
    """

    directory: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    seed: int | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding (tokens)."""
        return int(self.config.get_text_config().to_dict()["vocab_size"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; nothing is added at its ends."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Operations:
    """What a model computes for tokens; a multiplication and an addition count as two operations.

    matrices: elements of the matrices that each token is multiplied with, but the head; of experts those that
    it goes through. head: of the head. scores: multiplications for each pair of tokens of which one attends
    to the other.
    """

    matrices: int
    head: int
    scores: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Operations | None:
        """Those of a model with this config; None = it has layers other than full attention, or experts whose
        matrices lie in another way than one behind the other.

        Raises:
            ModelLoadError: there is no model of such sizes.
        """
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ())
        if not kinds and getattr(text, "sliding_window", None):
            return None
        if kinds - {"full_attention"}:
            return None
        model = meta_model(config)
        head = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        matrices = sum(module.weight.numel() for module in linear)
        number = next((n for name in EXPERTS if (n := getattr(text, name, None))), 0)
        routed = _routed(model, int(number), int(getattr(text, "num_experts_per_tok", None) or 1))
        if number and not routed:
            return None
        try:
            heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
            layers, vocab = int(text.num_hidden_layers), int(text.vocab_size)
        except AttributeError:
            return None
        width = 2 * int(getattr(text, "head_dim", None) or hidden // heads)
        if getattr(text, "kv_lora_rank", None):
            # Multi-latent attention: values are not as wide as queries and keys.
            width = int(text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
        return cls(matrices + routed, vocab * hidden, layers * heads * width)

    def forward(self, lengths: Sequence[int], predicted: int, *, causal: bool = True) -> float:
        """The operations of a forward pass over sequences; a backward pass needs twice as many.

        lengths: of the sequences (tokens). predicted: tokens that go through the head (count). causal: a
        token attends to itself and to all earlier tokens; else to all.
        """
        pairs = sum(length * (length + 1) / 2 if causal else length**2 for length in lengths)
        return 2.0 * (self.matrices * sum(lengths) + self.scores * pairs + predicted * self.head)


def _routed(model: PreTrainedModel, number: int, chosen: int) -> int:
    """Elements of routers, and of the experts that a token goes through: their matrices are one parameter of
    a layer, [number, rows, columns]. number: experts of a layer; chosen: those of a token."""
    routers = experts = 0
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 3 and len(parameter) == number:
                experts += parameter.numel() * chosen // number
            if parameter.ndim == 2 and len(parameter) == number:
                routers += parameter.numel()
    return routers + experts if experts else 0


def long_ropes(config: PreTrainedConfig) -> tuple[int, ...]:
    """The lengths beyond which a model turns all positions of a sequence in another way (tokens).

    Raises:
        ModelLoadError: it turns them by the longest sequence so far, so that no sequence has probabilities of
            its own.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    # Some have one for each type of layer.
    each = [ropes, *(below for below in ropes.values() if isinstance(below, dict))]
    if any(rope.get("rope_type") == "dynamic" for rope in each):
        raise ModelLoadError(
            "with `dynamic` position scaling the probabilities of a sequence depend on those computed before "
            "it, so nothing can be learned from them; choose another model."
        )
    return tuple(
        int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
        for rope in each
        if rope.get("rope_type") == "longrope"
    )


def open_source(directory: str | Path) -> ModelSource:
    """Read config and tokenizer of a Hugging Face model directory; no weight is read.

    Raises:
        ModelLoadError: the directory is missing, or holds no config or no tokenizer.
    """
    path = Path(directory)
    return ModelSource(path, open_config(path), open_tokenizer(path))


def open_config(directory: Path) -> PreTrainedConfig:
    """The config of a Hugging Face model directory; of a quantized model, of what its numbers stand for.

    Raises:
        ModelLoadError: it holds none, or an invalid one.
    """
    check_has_config(directory)
    directory = base_folder(directory)
    check_fetched([directory / "config.json"], ModelLoadError)
    try:
        with config_errors(directory), quiet_transformers():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
    except OSError as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelLoadError(f"the model in {directory} cannot be loaded: {reason}") from error
    return without_quantization(config)


def open_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face model directory.

    Raises:
        ModelLoadError: it holds none, or one of tiktoken's files alone.
    """
    # transformers would look for a model of that name on the network.
    if not Path(directory).is_dir():
        raise ModelLoadError(f"there is no folder {directory}; {model_remedy(Path(directory))}.")
    directory = tokenizer_folder(Path(directory))
    check_fetched((directory / name for name in TOKENIZER_FILES), ModelLoadError)
    if (directory / _TIKTOKEN).exists() and not (directory / "tokenizer.json").exists():
        raise ModelLoadError(
            f"{directory} holds {_TIKTOKEN}, which splits text by a pattern that is in its Python files, and "
            "those are never run; write its tokenizer.json once, with transformers' TikTokenConverter, "
            "and take auto_map out of tokenizer_config.json."
        )
    with _Broken(directory):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # Without its files transformers makes an empty one of the model's type.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ModelLoadError(f"{directory} holds no tokenizer; copy tokenizer.json into it.")
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


class _Broken:
    """Replaces any error by one sentence: libraries raise whatever the contents of a file lead them to, and
    `tokenizers` a bare Exception."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = directory

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What panics in Rust is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelLoadError(f"the tokenizer in {self._directory} cannot be loaded: {reason}") from error

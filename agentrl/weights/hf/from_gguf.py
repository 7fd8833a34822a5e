"""A GGUF file, such as llama.cpp runs, as a Hugging Face model directory.

The weights are those that its quantized numbers stand for, in fp32, where every scale times a small integer
is exact. One tensor is in memory at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH, GGUFReader, ReaderTensor, dequantize, get_tensor_name_map
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import SystemErrors
from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import bytes_of
from agentrl.weights.hf.directory import atomic_directory
from agentrl.weights.hf.gguf_file import check_header, located
from agentrl.weights.hf.opening import check_finite
from agentrl.weights.hf.tensors import CONFIG_ERRORS, TensorFiles, tensor_shapes
from agentrl.weights.quiet import quiet_transformers
from agentrl.weights.streamed import write_model

_Array = npt.NDArray[np.float32]
_MODELS = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
_PAIRED = "llama"
"""In files of this architecture the rows of each head that RoPE rotates together are adjacent."""
_DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
_SPLITS: Mapping[tuple[str, str], pre_tokenizers.PreTokenizer | None] = {
    ("llama", "default"): None,
    ("gpt2", "gpt-2"): None,
    ("gpt2", "llama-bpe"): None,
    ("gpt2", "qwen2"): None,
    ("gpt2", "deepseek-r1-qwen"): None,
    # transformers knows no such name, and splits "a  12" as GPT-2, into other tokens than the model knows.
    ("gpt2", "smollm"): _DIGITS,
}
"""By kind of tokenizer and name: how text is split before merges are applied; None = as transformers does."""


class Converted(NamedTuple):
    """What was converted. kinds: how many tensors the file holds in each quantization, by its name."""

    num_tensors: int
    num_parameters: int
    kinds: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A GGUF file whose model is known. sources: by the name of a tensor, that of the file."""

    path: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    tensors: Mapping[str, ReaderTensor]
    sources: Mapping[str, str]
    manifest: tuple[TensorSpec, ...]

    def weights(self) -> Iterator[tuple[TensorSpec, npt.NDArray[np.uint8]]]:
        """The tensors of the manifest, in its order."""
        for spec in self.manifest:
            tensor = torch.from_numpy(self._turned(spec.name, self._values(spec.name), inverse=True))
            check_finite(self.path, [(spec.name, tensor)])
            yield spec, bytes_of(tensor)

    def check(self, folder: Path) -> None:
        """Compare what was written with the file: as many tensors, and each number of them.

        Raises:
            ModelLoadError: they differ.
        """
        with TensorFiles(folder) as files:
            wrong = files.names ^ {spec.name for spec in self.manifest}
            for spec in () if wrong else self.manifest:
                written = self._turned(spec.name, files.read(spec.name).numpy(), inverse=False)
                if not np.array_equal(written, self._values(spec.name)):
                    wrong = frozenset({spec.name})
        if wrong:
            raise ModelLoadError(
                f"{min(wrong)} was not written as {self.path} has it, so nothing was kept; convert it again."
            )

    def _values(self, name: str) -> _Array:
        tensor = self.tensors[self.sources[name]]
        values: _Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return values

    def _turned(self, name: str, values: _Array, *, inverse: bool) -> _Array:
        """Have the rows of each head in the order of the file, or, inverse, in that of Hugging Face."""
        heads = {
            "q_proj": self.config.num_attention_heads,
            "k_proj": self.config.num_key_value_heads,
        }.get(name.split(".")[-2])
        if heads is None or self.config.model_type != _PAIRED:
            return values
        sides = (heads, -1, 2) if inverse else (heads, 2, values.shape[0] // heads // 2)
        return values.reshape(*sides, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def convert(source: Path, target: Path) -> Converted:
    """Write the model of a GGUF file as a new model directory: fp32 weights, config, tokenizer, template.

    Then every tensor that was written is read back, and compared with the file's own.

    Args:
        source: the file, or a folder, a wheel or a zip file that holds one.

    Raises:
        ModelLoadError: it is damaged, or of an architecture or a tokenizer that is not known here.
        OSError: the disk does not take it.
    """
    if target.exists():
        raise ModelLoadError(f"{target} exists already; name a new folder.")
    with located(source) as path:
        check_header(path)
        with _broken(path), quiet_transformers():
            opened = _opened(path)
        with atomic_directory(target) as partial, SystemErrors(target), quiet_transformers():
            opened.config.save_pretrained(partial)
            opened.tokenizer.save_pretrained(partial)
            GenerationConfig.from_model_config(opened.config).save_pretrained(partial)
            write_model(partial, opened.manifest, opened.weights())
            opened.check(partial)
        return Converted(
            len(opened.tensors),
            sum(math.prod(spec.shape) for spec in opened.manifest),
            Counter(tensor.tensor_type.name for tensor in opened.tensors.values()),
        )


@contextmanager
def _broken(path: Path) -> Iterator[None]:
    """Replace what libraries make of a damaged file by one sentence."""
    try:
        yield
    except (OSError, *CONFIG_ERRORS) as error:
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise ModelLoadError(f"{path} cannot be read ({reason}); download it again.") from error


def _opened(path: Path) -> _Opened:
    reader = GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(path, reader, tensors)
    shapes = tensor_shapes(config)
    names = get_tensor_name_map(_MODELS[config.model_type], config.num_hidden_layers)
    sources = {name: names.get_name(name, (".weight", ".bias")) or name for name in shapes}
    unknown = tensors.keys() - sources.values()
    missing = sources.values() - tensors.keys()
    if unknown or missing:
        verb, name = ("holds", min(unknown)) if unknown else ("lacks", min(missing))
        raise ModelLoadError(
            f"{path} {verb} the tensor {name}, and {type(config).__name__} is another model; take a GGUF "
            "file of a Llama, a Qwen2 or a Qwen3."
        )
    for name, shape in shapes.items():
        held = tuple(int(size) for size in reversed(tensors[sources[name]].shape))
        if held != shape:
            raise ModelLoadError(
                f"{path} holds {sources[name]} as {list(held)}, and its own sizes say {list(shape)}; "
                "download it again."
            )
    manifest = tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items())
    return _Opened(path, config, _tokenizer(path, reader), tensors, sources, manifest)


def _config(path: Path, reader: GGUFReader, tensors: Mapping[str, ReaderTensor]) -> PreTrainedConfig:
    architecture = _text(reader, "general.architecture")
    if architecture not in _MODELS:
        raise ModelLoadError(
            f"{path} has the architecture `{architecture}`; known here are {', '.join(_MODELS)}."
        )
    scaling = next((key for key in reader.fields if key.startswith(f"{architecture}.rope.scaling")), None)
    if scaling is not None and _text(reader, f"{architecture}.rope.scaling.type") != "none":
        raise ModelLoadError(
            f"{path} scales positions ({scaling}), which is not known here; take another model."
        )
    layers = reader.fields[f"{architecture}.block_count"].contents()
    if layers > len(tensors):
        raise ModelLoadError(f"{path} claims {layers} layers, and holds {len(tensors)} tensors.")
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
    )
    # transformers reads it for some architectures only.
    head_dim = reader.fields.get(f"{architecture}.attention.key_length")
    if head_dim is not None:
        config.head_dim = head_dim.contents()
    config.tie_word_embeddings = "output.weight" not in tensors
    config.dtype = torch.float32
    return config


def _tokenizer(path: Path, reader: GGUFReader) -> PreTrainedTokenizerBase:
    kind = (_text(reader, "tokenizer.ggml.model"), _text(reader, "tokenizer.ggml.pre") or "default")
    if kind not in _SPLITS:
        raise ModelLoadError(
            f"{path} has a tokenizer ({kind[0]}, {kind[1]}) that splits text in an unknown way; "
            "take another model, or its Hugging Face folder."
        )
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
    )
    split = _SPLITS[kind]
    if split is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = split
    return tokenizer


def _text(reader: GGUFReader, name: str) -> str:
    field = reader.fields.get(name)
    return "" if field is None else str(field.contents())

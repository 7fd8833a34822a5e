"""The shapes of models with random weights, and how much of each fits onto a card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

VOCAB: Final = 151_936
_TINY_VOCAB: Final = 2_000
_GIB: Final = 1 << 30
_PARTS_OF_A_LAYER = 3
_OF_MEMORY = 0.75
"""The share of a card that weights, gradients and optimizer may take; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense Qwen3 with tied embeddings. kv_heads, width: of its attention (heads, width of each)."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int = 8
    width: int = 128
    vocab: int = VOCAB

    def config(self, layers: int | None = None) -> Qwen3Config:
        """Its configuration. layers: fewer than it has."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.width,
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )

    def parameters(self, layers: int) -> int:
        """Its parameters with this number of layers, without those of norms (count)."""
        attention = self.hidden * self.width * (2 * self.heads + 2 * self.kv_heads)
        of_a_layer = attention + _PARTS_OF_A_LAYER * self.hidden * self.intermediate
        return self.hidden * self.vocab + layers * of_a_layer

    def fitting_layers(self, memory: int, ranks: int) -> int:
        """The layers whose states fit onto each of `ranks` cards with `memory` free bytes, a multiple of 4.

        Weights in bf16 and gradients in fp32 lie on every card, AdamW's three fp32 numbers are shared.
        """
        bytes_each = 6 + 12 / ranks
        for layers in range(self.layers, 4, -1):
            fits = self.parameters(layers) * bytes_each <= _OF_MEMORY * memory
            if fits and (layers == self.layers or layers % 4 == 0):
                return layers
        return min(self.layers, 4)


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("0.6B", 1024, 3072, 28, 16),
        Shape("1.7B", 2048, 6144, 28, 16),
        Shape("4B", 2560, 9728, 36, 32),
    )
}


def shape_of(name: str, *, tiny: bool) -> Shape:
    """The shape of this name. tiny: a few thousand parameters under the same name, for a CPU."""
    if tiny:
        return Shape(name, 64, 96, 2, 4, kv_heads=2, width=16, vocab=_TINY_VOCAB)
    return SHAPES[name]


@dataclass(frozen=True, slots=True)
class Work:
    """What a trainer gets. samples: of a batch, for each rank. rows: tokens of a micro-batch."""

    samples: int
    rows: int
    recompute: bool
    layers: int


def work_of(shape: Shape, memory: int, ranks: int, *, tiny: bool) -> Work:
    """Sizes that fit onto each of `ranks` cards with this much free memory (bytes)."""
    if tiny:
        return Work(6, 128, False, shape.layers)
    layers = shape.fitting_layers(memory, ranks)
    is_large = memory >= 100 * _GIB
    match shape.name:
        case "0.6B":
            return Work(64, 16_384, False, layers)
        case "1.7B":
            return Work(32, 16_384 if is_large else 8_192, not is_large, layers)
        case _:
            return Work(16, 8_192, True, layers)


def lengths_of(count: int, *, tiny: bool) -> tuple[int, ...]:
    """Seeded lengths of samples: 512 to 4,096 tokens."""
    low, high = (16, 64) if tiny else (512, 4096)
    return tuple(np.random.default_rng(0).integers(low, high + 1, count).tolist())


def model_folder(folder: Path, shape: Shape, device: str, layers: int | None = None) -> Path:
    """A directory with this shape in bf16, random weights; made where there is none.

    An interrupted one is made again. device: where the weights are drawn.
    """
    import torch
    from transformers import AutoModelForCausalLM

    layers = layers or shape.layers
    path = folder / "models" / f"{shape.name}-{layers}-layers-of-{shape.hidden}"
    if (path / "complete").exists():
        return path
    shutil.rmtree(path, ignore_errors=True)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            shape.config(layers), trust_remote_code=False, dtype=torch.bfloat16
        )
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    (path / "complete").touch()
    del model
    if device != "cpu":
        torch.cuda.empty_cache()
    return path


def bytes_of_model(path: Path) -> int:
    """The size of a model's weights (bytes)."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def layers_of(path: Path) -> int:
    """The layers of the model in a directory."""
    return int(json.loads((path / "config.json").read_text())["num_hidden_layers"])


WORDS: Sequence[str] = (
    *("river", "stone", "tower", "bridge", "harbour", "market", "garden"),
    *("winter", "summer", "castle", "forest", "valley", "window", "silver"),
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for the episodes of `generator`; it has fewer tokens than the models."""
    from agentrl.rendering.fresh_tokenizer import train_tokenizer
    from benchmarks.question import QUESTION

    tags = ["<look>", "</look>", "<answer>", "</answer>", "<result>", "</result>"]
    return train_tokenizer([*WORDS, QUESTION], special_tokens=tags, vocab_size=512)

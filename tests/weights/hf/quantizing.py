"""Models of several blocks a matrix, and what a matrix is after a cast: in numpy, by definition."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

_SIZES = {
    **{"hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": 3},
}
_CONFIGS = {
    "qwen3": lambda **sizes: Qwen3Config(**{**_SIZES, **sizes}),
    "qwen3_moe": lambda **sizes: Qwen3MoeConfig(
        **{**_SIZES, **sizes}, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2
    ),
}


def model_of(kind: str, *, vocab_size: int = 97, **sizes: int) -> PreTrainedModel:
    """The same in every process."""
    torch.manual_seed(0)
    config = _CONFIGS[kind](vocab_size=vocab_size, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(0.1 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
    return model


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest number with three bits after the leading one, from 2^-6 on, and multiples of 2^-9 below."""
    x = np.clip(x.astype(np.float64), -448, 448)
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(x))), -6)
    step = 2.0 ** (exponent - 3)
    # numpy rounds halves to the even one.
    return np.round(x / step) * step


def rounded_by(matrix: np.ndarray, cast: str, dtype: torch.dtype) -> torch.Tensor:
    """A matrix [rows, columns] in fp32 after a cast. dtype: of the model, and so of the result."""
    rows, columns = matrix.shape
    height, width = {"fp8": (128, 128), "fp8-tensor": (rows, columns), "int4": (1, 32)}[cast]
    largest = np.float32(7 if cast == "int4" else 448)
    result = np.zeros_like(matrix)
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            block = matrix[i : i + height, j : j + width]
            scale = torch.tensor(np.float32(np.abs(block).max()) / largest)
            # Scales of int4 have the weights' own dtype.
            scale = np.float32(float(scale.to(dtype) if cast == "int4" else scale)) or np.float32(1)
            quotient = np.clip(block / scale, -largest, largest)
            numbers = np.round(quotient) if cast == "int4" else e4m3(quotient)
            result[i : i + height, j : j + width] = numbers.astype(np.float32) * scale
    return torch.from_numpy(result).to(dtype).float()

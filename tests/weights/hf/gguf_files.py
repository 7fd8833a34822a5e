"""Tiny models, as llama.cpp's converter writes them: names, order of rows, metadata of the tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "rms_norm_eps": 1e-5,
}
# SmolLM2's own.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
TOKENS = [*bytes_to_unicode().values(), "<|im_start|>", "<|im_end|>", "ĠĠ", "12"]
CONFIGS = {
    "llama": LlamaConfig(**_SIZES, vocab_size=len(TOKENS), rope_theta=100.0, tie_word_embeddings=True),
    "llama, untied": LlamaConfig(**_SIZES, vocab_size=len(TOKENS), tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SIZES, vocab_size=len(TOKENS), tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SIZES, vocab_size=len(TOKENS), tie_word_embeddings=True),
}
_ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}


def random_model(name: str) -> PreTrainedModel:
    """A model of one of the configurations; no weight, bias or norm of it is 0 or 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.ndim == 1))
    return model.eval()


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str = "F32",
    *,
    pre: str = "smollm",
    more: dict[str, np.ndarray] | None = None,
    scaled: bool = False,
) -> Path:
    """Write a model. kind: of its matrices. pre: how its text is split. more: further tensors."""
    config = model.config
    writer = GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if scaled:
        writer.add_string(f"{config.model_type}.rope.scaling.type", "yarn")
    _write_tokenizer(writer, pre)
    names = get_tensor_name_map(_ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # As convert_hf_to_gguf.py has it, LlamaModel.permute.
        values = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if config.model_type == "llama" and (number := heads.get(name.split(".")[-2])):
            size = values.shape[0] // number // 2
            values = values.reshape(number, 2, size, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        chosen = GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(
            names.get_name(name, (".weight", ".bias")), quantize(values, chosen), raw_dtype=chosen
        )
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in TOKENS])
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)

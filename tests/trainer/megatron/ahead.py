"""Tiny models with layers that predict further ahead, and their loss as DeepSeek-V3's paper has it.

The oracle is in float64 and over transformers' own layers, one sample after the other: h'_i = eh_proj [enorm
Emb(t_i+k); hnorm h_i], a layer of the model, and the cross-entropy of t_i+k+1 (arXiv:2412.19437, 21 to 25).
In MiMo the state comes first: input_proj [hidden_layernorm h_i; token_layernorm Emb(t_i+k)].
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from agentrl.weights.hf.export import save_model
from tests.trainer.megatron.equality import samples
from tests.trainer.megatron.models import checkpoint_of, model_of
from tests.trainer.tiny import tokenizer

BESIDE = {
    "mimo": (
        ("enorm", "token_layernorm"),
        ("hnorm", "hidden_layernorm"),
        ("eh_proj", "input_proj"),
        ("post_norm", "final_layernorm"),
    ),
    "others": (
        *((name, name) for name in ("enorm", "hnorm", "eh_proj")),
        ("post_norm", "shared_head.norm"),
    ),
}
"""Of a layer, what it has beside one of the model: transformers' names, and those in checkpoints."""


@lru_cache
def with_ahead(kind: str, depths: int) -> tuple[PreTrainedModel, MtpModel]:
    """A model, and its layers that predict further ahead; the same in every process."""
    model = model_of(kind)
    model.config.num_mtp_layers = depths
    if is_mimo(kind):
        model.config.num_nextn_predict_layers = depths
        model.config.mtp_layer_types = ["full_attention"] * depths
        model.config.mtp_hidden_states_first = True
    # Grouped products are of 32 bits at most.
    model.set_experts_implementation("eager")
    torch.manual_seed(3)
    ahead = MtpModel(model, depths).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, tensor in (*ahead.layers.named_parameters(), *ahead.layers.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            is_norm = tensor.dim() == 1 and "bias" not in name
            tensor.copy_(1 + 0.2 * noise if is_norm else 0.2 * noise)
    return model, ahead


def is_mimo(kind: str) -> bool:
    return kind == "mimo"


def place_of(model: PreTrainedModel, depth: int) -> str:
    """What the names of a layer begin with in checkpoints."""
    if is_mimo(model.config.model_type):
        return f"model.mtp_layers.{depth}."
    return f"model.layers.{model.config.num_hidden_layers + depth}."


def checkpoint_with(kind: str, depths: int) -> dict[str, Tensor]:
    """All tensors by the names of the model's checkpoints, with the copies of embedding and head there."""
    model, ahead = with_ahead(kind, depths)
    tensors = {**checkpoint_of(model), **by_names(model, dict(ahead.layers.state_dict()))}
    for copy, original in copies(kind, depths).items():
        tensors[copy] = tensors[original].clone()
    return tensors


def copies(kind: str, depths: int = 1) -> dict[str, str]:
    """Of embedding and head, which layers of other families than MiMo have in files: of what, by name."""
    places = [] if is_mimo(kind) else [place_of(model_of(kind), depth) for depth in range(depths)]
    embeddings = {f"{place}embed_tokens.weight": "model.embed_tokens.weight" for place in places}
    return embeddings | {f"{place}shared_head.head.weight": "lm_head.weight" for place in places}


def by_names(model: PreTrainedModel, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers calls `0.mtp_block.mlp...`, by its names in checkpoints."""
    last, named = model.config.num_hidden_layers - 1, {}
    for depth in {int(name.split(".")[0]) for name in own}:
        begin, place = f"{depth}.mtp_block.", place_of(model, depth)
        block = {
            f"model.layers.{last}.{name.removeprefix(begin)}": tensor
            for name, tensor in own.items()
            if name.startswith(begin)
        }
        for name, tensor in checkpoint_of(model, block).items():
            named[place + name.removeprefix(f"model.layers.{last}.")] = tensor
        for ours, theirs in BESIDE["mimo" if is_mimo(model.config.model_type) else "others"]:
            named[f"{place}{theirs}.weight"] = own[f"{depth}.{ours}.weight"]
    return named


@lru_cache
def loss_by_hand(kind: str, depths: int) -> tuple[float, dict[str, Tensor]]:
    """The mean over tokens and depths, and the gradients of the layers, by their names in checkpoints."""
    model, ahead = with_ahead(kind, depths)
    model, ahead = model.double(), ahead.double()
    total = torch.zeros((), dtype=torch.float64)
    for k in range(1, depths + 1):
        terms = []
        for sample in samples():
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))
            predicted = [p for p in np.flatnonzero(sample.loss_mask).tolist() if p - k - 1 >= 0]
            if predicted:
                logits = model.lm_head(_states(model, ahead, ids, k))[0]
                terms += [cross_entropy(logits[p - k - 1], ids[p]) for p in predicted]
        total = total + torch.stack(terms).mean() / depths
    gradients = torch.autograd.grad(total, list(ahead.layers.parameters()))
    names = [name for name, _ in ahead.layers.named_parameters()]
    named = by_names(model, dict(zip(names, gradients, strict=True)))
    model.float(), ahead.float()
    return total.item(), {name: gradient.float() for name, gradient in named.items()}


def _states(model: PreTrainedModel, ahead: MtpModel, ids: Tensor, depth: int) -> Tensor:
    """[1, T - depth, width]: the state of token i knows of the tokens up to i + depth."""
    if depth == 0:
        with torch.no_grad():
            return model.model(ids[None]).last_hidden_state
    states = _states(model, ahead, ids, depth - 1)[:, :-1]
    embedded = model.model.embed_tokens(ids[None, depth:]).detach()
    places = torch.arange(states.shape[1])[None]
    hidden = torch.full((states.shape[1],) * 2, -torch.inf, dtype=states.dtype).triu(1)
    return ahead.layers[depth - 1](
        embedded,
        states,
        position_embeddings=model.model.rotary_emb(embedded, position_ids=places),
        attention_mask=hidden[None, None],
        position_ids=places,
        past_key_values=None,
    )


def save_with(folder: Path, kind: str, depths: int = 1) -> Path:
    """A Hugging Face directory of such a model."""
    save_model(with_ahead(kind, depths)[0], tokenizer(), str(folder))
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint_with(kind, depths).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder

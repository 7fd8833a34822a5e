"""The memory of a run's processes by part, computed from shapes: nothing is allocated.

    weights, gradients, optimizer    what the trainers allocate, to the byte (torch), or to the padding of a
                                     shard (several ranks of it) or of Megatron's buffers
    activations                      what one row holds at once beside them: counted over its operations
                                     (torch, see `RowMemory`), or an estimate of what it keeps for its
                                     backward pass (Megatron, see `row_bytes`; `_layer_bytes`); and the layers
                                     that are gathered for it
    dispatch                         an estimate: of a layer of experts what is on its way to them and back
    logits                           an estimate: those of a chunk, and the gradient of the head, where
                                     they do not count as activations
    runtime                          on a GPU: CUDA's context, libraries, graphs (see `cards`)
    kv_cache                         what the embedded engine allocates
    published                        versions of the weights that servers have, or are sent

Ranks of Megatron are counted in `layout_memory`. For P parameters on a rank the torch trainer takes 4 P bytes
for weights, 4 P for gradients and 8 P for AdamW
(4 P for Muon's matrices), all divided by the ranks that share a replica; gradients are those of one network.
With bf16, matrices below adapters, and of networks that do not learn, take 2 P, if they come in bfloat16 and
no ranks share them. With bf16 Megatron takes 2 P, 4 P
and 12 P. The last, weights in fp32 and two means, is divided by the ranks that share it (arXiv:1910.02054).
With optimizer_cpu_offload the optimizer takes nothing on the device, and 12 P in the CPU's memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch.compact import frozen_matrices
from agentrl.trainer.torch.critic import critic_over
from agentrl.trainer.torch.frozen import freeze
from agentrl.trainer.torch.learner import hidden_matrices
from agentrl.trainer.torch.peak import RowJob, RowMemory
from agentrl.trainer.torch.sharding import layers_of
from agentrl.view.scores import size_text
from agentrl.weights.hf.source import EXPERTS
from agentrl.weights.hf.tensors import meta_model, num_parameters, tensor_shapes

FP32, BF16 = 4, 2
"""Bytes of a number."""
_MAX_LOGITS = 2**24


class MemoryNeed(NamedTuple):
    """The memory of one process by part (bytes)."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    published: int = 0
    logits: int = 0
    runtime: int = 0
    dispatch: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self)

    @property
    def known(self) -> MemoryNeed:
        """The parts that are no estimates."""
        return self._replace(activations=0, dispatch=0, logits=0, runtime=0)

    @property
    def exact(self) -> int:
        """All parts that are no estimates."""
        return self.known.total

    def plus(self, other: MemoryNeed) -> MemoryNeed:
        """The sum, part by part."""
        return MemoryNeed(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: int) -> MemoryNeed:
        """So much of each part."""
        return MemoryNeed(*(number * size for size in self))


class Networks(NamedTuple):
    """The networks of a trainer, by their configs. has_critic: one with the policy's trunk learns, too."""

    policy: PreTrainedConfig
    has_critic: bool = False
    frozen: Sequence[PreTrainedConfig] = ()


class RunSizes(NamedTuple):
    """The sizes of a model that its activations and its cache depend on (numbers of a token).

    query, key: all query heads, and all key heads, together. spread: its copies for the experts that it goes
    through; experts: the scores of all. latent: the state that a server keeps of it in a layer in place of
    keys and values; 0 = it has none.
    """

    layers: int
    hidden: int
    query: int
    key: int
    ffn: int
    vocab: int
    has_qk_norm: bool
    spread: int = 0
    experts: int = 0
    latent: int = 0

    @classmethod
    def of(cls, config: PreTrainedConfig) -> RunSizes:
        """Those of a model's config; what it does not have is taken for what most families do."""
        text = config.get_text_config()

        def size(name: str, otherwise: int) -> int:
            return int(getattr(text, name, None) or otherwise)

        hidden = size("hidden_size", 0)
        heads = size("num_attention_heads", 1)
        head = size("head_dim", hidden // heads)
        query, key = heads * head, size("num_key_value_heads", heads) * head
        latent = size("kv_lora_rank", 0)
        if latent:
            # A server keeps what all heads are made of; keys and values themselves are not equally wide.
            latent += size("qk_rope_head_dim", 0)
            query = heads * (size("qk_nope_head_dim", 0) + size("qk_rope_head_dim", 0))
            key = (query + heads * size("v_head_dim", head)) // 2
        chosen = size("num_experts_per_tok", 0)
        number = next((n for name in EXPERTS if (n := size(name, 0))), 0)
        width = size("moe_intermediate_size", size("intermediate_size", 0) if number else 0)
        shared = size("shared_expert_intermediate_size", size("n_shared_experts", 0) * width)
        return cls(
            layers=size("num_hidden_layers", 0),
            hidden=hidden,
            query=query,
            key=key,
            ffn=max(size("intermediate_size", 4 * hidden), chosen * width + shared),
            vocab=size("vocab_size", 0),
            has_qk_norm=any(name.endswith("q_norm.weight") for name in tensor_shapes(config)),
            spread=chosen * hidden if number else 0,
            experts=number,
            latent=latent,
        )

    def cache_bytes(self, number_bytes: int) -> int:
        """Keys and values of one token in all layers (bytes)."""
        return self.layers * 2 * self.key * number_bytes


def cache_bytes(policy: PreTrainedConfig, gpus: int) -> int:
    """Keys and values of one token on one GPU: where there are more GPUs than heads, several have a head.

    With multi-latent attention each has the small state that all heads are made of.
    """
    sizes = RunSizes.of(policy)
    if sizes.latent:
        return sizes.layers * sizes.latent * BF16
    fields = policy.get_text_config().to_dict()
    heads = int(fields.get("num_key_value_heads") or fields["num_attention_heads"])
    return sizes.cache_bytes(BF16) // min(gpus, heads)


def torch_memory(
    networks: Networks,
    trainer: TrainerConfig,
    tokens: int,
    shards: int = 1,
    gpu_bytes: int | None = None,
) -> MemoryNeed:
    """A rank of the torch trainer, see `TorchRank`. tokens: of its longest row."""
    return TorchRank(networks, trainer, shards, gpu_bytes).at(tokens)


class TorchRank:
    """A rank of the torch trainer.

    shards: ranks that share a replica (count). gpu_bytes: of its GPU; None = it is on a CPU. fixed: without
    rows. learned: numbers that learn, of all networks, in all ranks (count).

    Raises:
        ConfigError: see `freeze`.
    """

    def __init__(
        self,
        networks: Networks,
        trainer: TrainerConfig,
        shards: int = 1,
        gpu_bytes: int | None = None,
    ) -> None:
        self._trainer, self._shards = trainer, shards
        policy = _learning_model(networks.policy, trainer, shards)
        memory, self._gathered = _learned(policy, trainer, shards), 0
        models = [policy]
        if networks.has_critic:
            models.append(critic_over(policy))
            critic = _learned(models[-1], trainer, shards)
            # The critic's are gone when the policy's come.
            memory = memory.plus(critic)._replace(gradients=max(memory.gradients, critic.gradients))
        if shards > 1:
            self._gathered = _gathered_bytes(policy)
        self.learned = sum(p.numel() for model in models for p in model.parameters() if p.requires_grad)
        frozen = sum(_judge_bytes(config, trainer, shards) for config in networks.frozen)
        self.fixed = memory.plus(MemoryNeed(weights=frozen))
        self._sizes = RunSizes.of(networks.policy)
        jobs = (
            RowJob(trainer.bf16, trainer.gradient_checkpointing, model is not policy, gpu_bytes)
            for model in models
        )
        self._rows = [RowMemory(model, job) for model, job in zip(models, jobs, strict=True)]

    def at(self, tokens: int) -> MemoryNeed:
        """With a longest row of so many tokens."""
        counted = [row.peak(tokens) for row in self._rows]
        peaks = [peak for peak in counted if peak is not None]
        row = MemoryNeed(activations=max(peaks, default=0))
        if len(peaks) < len(counted):
            row = self._estimated(tokens)
        return self.fixed.plus(row._replace(activations=row.activations + self._gathered))

    def _estimated(self, tokens: int) -> MemoryNeed:
        """A row, where it cannot be counted."""
        sizes = self._sizes
        outer, inner = _layer_bytes(sizes)
        row = sizes.layers * (outer + inner) + outer // 2
        if self._trainer.gradient_checkpointing:
            # The input of each layer, and all of one.
            row = sizes.layers * FP32 * sizes.hidden + outer + inner + outer // 2
        return MemoryNeed(activations=tokens * row, logits=3 * FP32 * min(tokens * sizes.vocab, _MAX_LOGITS))


def _learning_model(config: PreTrainedConfig, trainer: TrainerConfig, shards: int) -> PreTrainedModel:
    """The policy without memory: what learns of it requires a gradient, and the rest is as in the trainer.

    Raises:
        ConfigError: see `freeze`.
    """
    model = meta_model(config)
    freeze(model, trainer)
    if shards == 1 and trainer.lora_rank:
        _compact(model, config, trainer, learns=True)
    return model


def _compact(
    model: PreTrainedModel, config: PreTrainedConfig, trainer: TrainerConfig, *, learns: bool
) -> None:
    """What `compact` does to weights that come in bfloat16."""
    if trainer.bf16 and getattr(config, "dtype", None) == torch.bfloat16:
        for matrix in frozen_matrices(model, learns=learns):
            matrix.data = matrix.data.to(torch.bfloat16)


def _judge_bytes(config: PreTrainedConfig, trainer: TrainerConfig, shards: int) -> int:
    """The weights of a network that does not learn."""
    model = meta_model(config)
    if shards == 1:
        _compact(model, config, trainer, learns=False)
    return _weights(model, shards)


def _gathered_bytes(model: PreTrainedModel) -> int:
    """What a rank has gathered at most: all outside of the layers, two layers, and the gradient of one."""
    total, layers = (sum(p.numel() for p in m.parameters()) for m in (model, nn.ModuleList(layers_of(model))))
    largest = max((sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)), default=0)
    return FP32 * (2 * (total - layers) + 3 * largest)


def embedded_memory(
    config: PreTrainedConfig, max_slots: int, context_len: int, dtype: torch.dtype = torch.float32
) -> MemoryNeed:
    """The embedded engine: weights and cache in `dtype`. context_len: tokens of a slot."""
    # One column more, which padding is written to.
    cache = RunSizes.of(config).cache_bytes(dtype.itemsize) * max_slots * (context_len + 1)
    return MemoryNeed(weights=dtype.itemsize * num_parameters(config), kv_cache=cache)


def published_memory(config: PreTrainedConfig, *, bf16: bool) -> MemoryNeed:
    """One version of the policy's weights, for servers, in shared memory on the machine of rank 0."""
    return MemoryNeed(published=(BF16 if bf16 else FP32) * num_parameters(config))


def learned_memory(config: PreTrainedConfig, trainer: TrainerConfig, shards: int = 1) -> MemoryNeed:
    """The policy in a rank of the torch trainer, without its activations; see `TorchRank`.

    Raises:
        ConfigError: see `freeze`.
    """
    return _learned(_learning_model(config, trainer, shards), trainer, shards)


def machine_memory() -> int:
    """The memory of this machine (bytes)."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_machine(what: str, memory: MemoryNeed, remedy: str) -> None:
    """Check that one process asks for no more memory than this machine has; activations do not count.

    what: the process, with its sizes. remedy: what to change.

    Raises:
        ConfigError: it asks for more.
    """
    available = machine_memory()
    if memory.exact <= available:
        return
    sizes = {name.replace("_", " "): size for name, size in memory.known._asdict().items()}
    parts = " and ".join(f"{size_text(size)} of {name}" for name, size in sizes.items() if size)
    raise ConfigError(f"{what} asks for {parts}, and this machine has {size_text(available)}; {remedy}.")


def _learned(model: PreTrainedModel, trainer: TrainerConfig, shards: int) -> MemoryNeed:
    """A network that learns in the torch trainer; AdamW also counts its steps for each parameter."""
    matrices = set(hidden_matrices(model)) if trainer.optimizer == "muon" else set()
    learning = {p: _own_numel(p, shards) for p in model.parameters() if p.requires_grad}
    optimizer = sum(FP32 * size if p in matrices else 2 * FP32 * size + FP32 for p, size in learning.items())
    if trainer.optimizer_cpu_offload:
        optimizer = 0
    return MemoryNeed(_weights(model, shards), FP32 * sum(learning.values()), optimizer)


def _weights(model: PreTrainedModel, shards: int) -> int:
    """A rank's part of a network's weights (bytes)."""
    return sum(p.itemsize * _own_numel(p, shards) for p in model.parameters())


def _own_numel(parameter: Tensor, shards: int) -> int:
    """Rank 0 has the first rows, and as many as any other."""
    return -(-len(parameter) // shards) * parameter[0].numel()


def _layer_bytes(sizes: RunSizes) -> tuple[int, int]:
    """What one layer keeps of a token for its backward pass: the norms' tensors, and those between them.

    A norm keeps its input, the normalised values and its output. Attention keeps rotated queries and
    keys, values, and its output twice; a norm of queries and keys, these as well. The feed-forward block
    keeps gate and up, the gate's activation, and their product.
    """
    inner = FP32 * (3 * sizes.query + 2 * sizes.key + 4 * sizes.ffn)
    # Of experts also the token's copies, and the scores, their softmax and the weights.
    inner += FP32 * (sizes.spread + 3 * sizes.experts)
    if sizes.has_qk_norm:
        inner += 2 * FP32 * (sizes.query + sizes.key)
    return 2 * 3 * FP32 * sizes.hidden, inner

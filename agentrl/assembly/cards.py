"""The GPUs that a rank of the trainer and a server share: what each side takes, and what the server is given.

    total  =  rank: weights, gradients, optimizer, activations, published versions, logits, runtime
           +  server: weights, cache, activations, logits, runtime
           +  spare

A server of SGLang sizes its cache by what is free before and after it loads its weights:

    cache = free after - free before x (1 - mem_fraction_static), at most max_total_tokens

So both are given, where the user has given neither. max_total_tokens is what is left beside the rank at its
peak; mem_fraction_static is as large as a start beside that peak needs, so that neither the order of the
starts nor a restart in the middle of the run changes the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig

from agentrl.assembly.cluster import POLICY
from agentrl.assembly.config import RunConfig
from agentrl.assembly.layout_memory import MegatronRanks
from agentrl.assembly.memory import (
    BF16,
    FP32,
    MemoryNeed,
    Networks,
    RunSizes,
    TorchRank,
    cache_bytes,
)
from agentrl.assembly.places import local_places
from agentrl.assembly.rollout import most_in_flight
from agentrl.envs import BaseEnv
from agentrl.errors import ConfigError
from agentrl.losses.tokens import max_logits_on
from agentrl.processes.gpus import present_gpus
from agentrl.types import JSON
from agentrl.view.scores import size_text
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import num_parameters, tensor_shapes

CONTEXT_BYTES = 640 * 2**20
"""CUDA's context of one process, with the workspaces of cuBLAS and NCCL."""
_GRAPH_BYTES = 2 * 2**20
"""A CUDA graph of one more request of a batch, as SGLang itself reckons."""
_PREFILL_TOKENS = 8192
_MOST_GRAPHS = 512
SPARE = 0.05
"""Of a GPU: what allocators round up, and pieces that are free but too small."""
_LIMITS = ("mem_fraction_static", "max_total_tokens")
_DIGITS = 1000


class Card(NamedTuple):
    """GPUs of a rank and a server. total: of each; rank, server: at their peaks (bytes).

    gpus: as CUDA_VISIBLE_DEVICES names them. takes_turns: each has freed all but its runtime in the other's
    turn. tokens: of the server's cache. arguments: of the server that follow from this; {} = the user has
    given such.
    """

    gpus: Collection[str]
    total: int
    rank: MemoryNeed
    server: MemoryNeed
    takes_turns: bool
    tokens: int
    arguments: Mapping[str, int | float]

    @property
    def peak(self) -> int:
        """The most that is held at once (bytes)."""
        if not self.takes_turns:
            return self.rank.total + self.server.total
        resting = self.rank.runtime, self.server.runtime
        return max(self.rank.total + resting[1], self.server.total + resting[0])

    def lines(self) -> Iterator[str]:
        """What each side will hold, in a sentence for the start of a run."""
        gpus = f"{'GPU' if len(self.gpus) == 1 else 'each of GPUs'} {', '.join(self.gpus)}"
        how = "in turns" if self.takes_turns else "at once"
        yield (
            f"{gpus} ({size_text(self.total)}) has a rank and a server {how}: the rank takes up to "
            f"{_parts_text(self.rank)}; the server {_parts_text(self.server)}, a cache of {self.tokens:,} "
            f"tokens; {size_text(self.peak)} at most."
        )

    def facts(self) -> dict[str, JSON]:
        """The same for the dry run; keys that end in `_bytes` are bytes."""
        return {
            "gpus": [*self.gpus],
            "rank": _facts_of(self.rank),
            "server": _facts_of(self.server),
            "takes_turns": self.takes_turns,
            "cache_tokens": self.tokens,
            "arguments_of_the_server": dict(self.arguments),
            "peak_bytes": self.peak,
            "total_bytes": self.total,
        }


class Serving(NamedTuple):
    """What the policy's servers follow from. max_in_flight: requests at once (count). card: as `shared_card`.

    returns_experts: whether they return those of each token.
    """

    max_in_flight: int
    card: Card | None = None
    returns_experts: bool = False

    @property
    def arguments(self) -> Mapping[str, int | float]:
        """Those of the servers."""
        own = {"enable_return_routed_experts": True} if self.returns_experts else {}
        return own if self.card is None else {**own, **self.card.arguments}

    @property
    def lines(self) -> Iterator[str]:
        """What each side of the card will hold."""
        return iter(()) if self.card is None else self.card.lines()


def serving_of(config: RunConfig, policy: PreTrainedConfig, env: BaseEnv) -> Serving:
    """How large the servers of a run are, for its environment.

    Raises:
        ConfigError: a server and a rank do not fit on the GPU that they share.
    """
    in_flight = most_in_flight(config, num_agents=len(env.possible_agents))
    card = shared_card(config, policy, env.limits.max_tokens, in_flight)
    return Serving(in_flight, card, config.returns_experts)


def shared_gpus(config: RunConfig) -> Collection[str]:
    """The GPUs of this machine that a rank and a server share, as CUDA_VISIBLE_DEVICES names them.

    On Ray each has GPUs of its own, unless they take turns, and then the ranks start in a turn of theirs.

    Raises:
        ConfigError: there are too few GPUs for the run.
    """
    return () if config.cluster.cluster != "local" else local_places(config).gpus.shared


def networks_of(config: RunConfig, policy: PreTrainedConfig) -> Networks:
    """The networks of the run's trainer."""
    algorithm = config.algorithm
    # With adapters a reference without a directory is the policy without them.
    adapts = config.trainer.lora_rank is not None
    has_reference = algorithm.has_reference and not (adapts and algorithm.ref_load is None)
    frozen = [
        open_config(Path(directory)) if directory is not None else policy
        for directory, is_used in (
            (algorithm.ref_load, has_reference),
            (algorithm.opd.teacher_load, algorithm.use_opd),
        )
        if is_used
    ]
    return Networks(policy, algorithm.critic is not None, frozen)


def trainer_memory(
    config: RunConfig, policy: PreTrainedConfig, gpu_bytes: int | None = None
) -> Callable[[int], MemoryNeed]:
    """One rank of the run's trainer, by the tokens of its longest row.

    gpu_bytes: of the GPU that it has; None = it has none.
    """
    networks = networks_of(config, policy)
    if config.trainer.trainer == "megatron":
        return MegatronRanks(networks, config.layout, config.trainer).at
    return TorchRank(networks, config.trainer, config.fsdp_size, gpu_bytes).at


def optimizers_on_cpu(config: RunConfig, policy: PreTrainedConfig) -> MemoryNeed:
    """What a machine's ranks have in the CPU's memory with optimizer_cpu_offload: 12 bytes a number."""
    networks = networks_of(config, policy)
    trainer = config.trainer.with_all_on_device
    if trainer.trainer == "megatron":
        state = MegatronRanks(networks, config.layout, trainer).at(1).optimizer
    else:
        state = TorchRank(networks, trainer, config.fsdp_size).fixed.optimizer
    # Beside two means there are the weights in fp32, which Megatron counts with bf16 only.
    has_weights = trainer.trainer == "megatron" and trainer.bf16
    each = state if has_weights else state * 3 // 2
    return MemoryNeed(optimizer=each * config.layout.actor_num_gpus_per_node)


def longest_row(config: RunConfig, max_tokens: int | None) -> int:
    """The tokens of the run's longest row. max_tokens: of an episode; None = there is no limit."""
    return max(config.trainer.max_tokens_per_gpu, max_tokens or 0)


def server_memory(
    policy: PreTrainedConfig, gpus: int, in_flight: int, tokens: int, attention_copies: int = 1
) -> MemoryNeed:
    """A server on one of its `gpus`, in bfloat16.

    in_flight: requests at once; tokens: of the cache. attention_copies: SGLang's dp_size, where each part of
    the GPUs has the matrices of attention, and attends for requests of its own (counts).
    """
    sizes, batch = RunSizes.of(policy), min(in_flight, _MOST_GRAPHS)
    # A prompt's pieces go through one layer at a time; gate, up and their product are the widest of it. Of
    # experts each GPU has outputs of full width.
    layer = 3 * sizes.ffn // gpus + 4 * sizes.hidden + (2 * sizes.query + 2 * sizes.key) // gpus
    layer += sizes.spread
    return MemoryNeed(
        weights=BF16 * (num_parameters(policy) + (attention_copies - 1) * _attention(policy)) // gpus,
        activations=BF16 * _PREFILL_TOKENS * layer,
        kv_cache=tokens * cache_bytes(policy, gpus),
        # Logits, probabilities, and one copy that is sorted or drawn from.
        logits=3 * FP32 * in_flight * sizes.vocab,
        runtime=CONTEXT_BYTES + _GRAPH_BYTES * batch,
    )


def _attention(policy: PreTrainedConfig) -> int:
    """The parameters of attention in all layers (count)."""
    return sum(math.prod(shape) for name, shape in tensor_shapes(policy).items() if "attn." in name)


def servers_on_paper(config: RunConfig, policy: PreTrainedConfig, total: int) -> dict[str, MemoryNeed]:
    """What a GPU of each group of the policy's servers has, by a name with their number; with a cache where
    its mem_fraction_static is given. total: memory of a GPU (bytes)."""
    engine, servers = config.engine, {}
    if engine.engine != "sglang" or engine.sglang_url is not None or config.rollout.replay is not None:
        return {}
    for number, group in enumerate(engine.groups):
        gpus = engine.gpus_of(group)
        if not gpus:
            continue
        given = {name.replace("-", "_"): value for name, value in engine.arguments_of(group).items()}
        copies = int(str(given.get("dp_size", 1))) if given.get("enable_dp_attention") else 1
        server = server_memory(policy, gpus, engine.max_slots // copies, 0, copies)
        if "mem_fraction_static" in given:
            static = float(str(given["mem_fraction_static"])) * (total - CONTEXT_BYTES)
            server = server._replace(kv_cache=max(int(static) - server.weights, 0))
        which = "server" if len(engine.groups) == 1 else f"server of group {number}"
        servers[f"{which}, each of {gpus} GPUs"] = server
    return servers


def shared_card(
    config: RunConfig, policy: PreTrainedConfig, max_tokens: int | None, in_flight: int
) -> Card | None:
    """The GPUs that ranks and servers of the run share; None = there is none, or its memory is not known.

    max_tokens: of an episode; None = there is no limit. in_flight: requests at once (count).

    Raises:
        ConfigError: both do not fit on one.
    """
    present = present_gpus()
    if not present:
        # The run is for another machine.
        return None
    of_policy = () if config.cluster.cluster != "local" else local_places(config).fleets.get(POLICY, ())
    shared = tuple(gpu for gpu in shared_gpus(config) if any(gpu in gpus for gpus in of_policy))
    total = min((gpu.memory for gpu in present if gpu.id in shared), default=0)
    if not total:
        return None
    takes_turns = _takes_turns(config)
    rank = rank_on_card(config, policy, total)(longest_row(config, max_tokens))
    gpus = max(config.engine.gpus_of(config.engine.groups[0]), 1)
    server = server_memory(policy, gpus, in_flight, 0)
    each, chosen = cache_bytes(policy, gpus), _chosen(config)
    resting = rank.runtime if takes_turns else rank.total
    # Weights and cache: what SGLang calls static.
    static = int(total * (1 - SPARE)) - resting - (server.total - server.weights)
    if chosen:
        fraction = chosen.get("mem_fraction_static", 1.0)
        tokens = int((fraction * (total - CONTEXT_BYTES) - server.weights) // each)
        tokens = int(min(tokens, chosen.get("max_total_tokens", tokens)))
        arguments: dict[str, int | float] = {}
    else:
        tokens = (static - server.weights) // each
        others = server.activations + server.logits + _GRAPH_BYTES * min(in_flight, _MOST_GRAPHS)
        fraction = int(_DIGITS * static / (static + others)) / _DIGITS if static > 0 else 0.0
        arguments = {"max_total_tokens": tokens, "mem_fraction_static": fraction}
    held = server._replace(kv_cache=max(tokens, 0) * each)
    card = Card(shared, total, rank, held, takes_turns, tokens, arguments)
    _check(card, config.engine.max_context_len or max_tokens or 1)
    return card


def rank_on_card(config: RunConfig, policy: PreTrainedConfig, total: int) -> Callable[[int], MemoryNeed]:
    """A rank on a GPU of so many bytes, by the tokens of its longest row.

    The chunks of its head are larger than on a CPU.
    """
    at, sizes, layout = trainer_memory(config, policy, total), RunSizes.of(policy), config.layout
    number = BF16 if config.trainer.published_dtype == "bfloat16" else FP32
    by_memory = config.engine.engine == "sglang" and config.engine.update_weights_transport in (
        None,
        "tensor",
    )
    is_kept = by_memory and not _takes_turns(config)
    # The version that is served, for servers that restart, and the one that is being sent.
    published = 2 * number * num_parameters(policy) if is_kept else 0
    rows = -(-sizes.vocab // layout.tensor_model_parallel_size)
    computed = BF16 if config.trainer.bf16 else FP32

    def on_card(tokens: int) -> MemoryNeed:
        memory = at(tokens)._replace(published=published, runtime=CONTEXT_BYTES)
        if config.trainer.trainer == "torch":
            return memory
        chunk = min(-(-tokens // layout.context_parallel_size) * rows, max_logits_on(total))
        # Logits and their gradient; the head's own gradient: a sum in fp32, a share of it, and the result.
        return memory._replace(logits=2 * computed * chunk + (FP32 + 2 * computed) * rows * sizes.hidden)

    return on_card


def _check(card: Card, least_tokens: int) -> None:
    rank, server = card.rank, card.server._replace(kv_cache=0)
    fits = rank.total + card.server.runtime <= card.total
    if card.tokens >= least_tokens and fits and (card.arguments or card.peak <= card.total):
        return
    turns = "" if card.takes_turns else "colocate = true, by which they take turns, "
    change = "lower" if card.tokens >= least_tokens else "raise"
    # Those that follow from the GPU are as large as they can be.
    limits = "" if card.arguments else f"{change} {' or '.join(_LIMITS)}, "
    raise ConfigError(
        f"a rank takes up to {_parts_text(rank)} of a GPU, a server on the same one {_parts_text(server)} "
        f"and a cache of {least_tokens:,} tokens for one episode; the GPU has {size_text(card.total)}: "
        f"{limits}lower max_tokens_per_gpu, or set {turns}recompute_granularity = full, or take more GPUs."
    )


def _takes_turns(config: RunConfig) -> bool:
    """Whether each side frees its memory in the other's turn: one that keeps it, keeps that of its peak."""
    return config.trainer.offloads_rollout and config.trainer.offloads_train


def _chosen(config: RunConfig) -> dict[str, float]:
    """The limits that the user has given to the policy's servers."""
    given = [config.engine.sglang, *(group.sglang for group in config.engine.groups)]
    values = {name.replace("-", "_"): value for arguments in given for name, value in arguments.items()}
    return {name: float(str(values[name])) for name in _LIMITS if name in values}


def _parts_text(memory: MemoryNeed) -> str:
    parts = {name.replace("_", " "): size for name, size in memory._asdict().items() if size}
    return f"{size_text(memory.total)} ({', '.join(f'{name} {size_text(n)}' for name, n in parts.items())})"


def _facts_of(memory: MemoryNeed) -> dict[str, JSON]:
    parts = {f"{name}_bytes": size for name, size in memory._asdict().items() if size}
    return {**parts, "total_bytes": memory.total}

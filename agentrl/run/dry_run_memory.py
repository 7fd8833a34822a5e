"""The memory and the disk that a run would take, in its dry run: by process, and whether it fits."""

from __future__ import annotations

import os
from collections.abc import Mapping

from transformers import PreTrainedConfig

from agentrl.assembly.cards import (
    longest_row,
    optimizers_on_cpu,
    servers_on_paper,
    trainer_memory,
)
from agentrl.assembly.cluster import num_ranks
from agentrl.assembly.config import RunConfig
from agentrl.assembly.memory import (
    MemoryNeed,
    embedded_memory,
    machine_memory,
    published_memory,
)
from agentrl.processes.gpus import present_gpus
from agentrl.processes.ray.session import cluster_address
from agentrl.types import JSON
from agentrl.weights.codec import torch_dtype

_A_GPU = 80 * 2**30
"""Where the run is for a machine elsewhere; it bounds logits that are held at once, and servers' caches."""
PUBLISHED, DELTAS = "published weights, where rank 0 is", "deltas of weights, in the run's process"
OPTIMIZERS = "optimizers of the trainer, in the CPU's memory"


def memory_by_process(
    config: RunConfig, model: PreTrainedConfig, max_tokens: int | None
) -> dict[str, MemoryNeed]:
    """The memory of each kind of process, by a name with their number. max_tokens: of an episode."""
    engine = config.engine
    ranks, is_torch = config.layout.world_size, config.trainer.trainer == "torch"
    name, memory = f"trainer, each of {ranks} ranks", {}
    of_rank = trainer_memory(config, model, _gpu_of_a_rank(config))(longest_row(config, max_tokens))
    if is_torch and (ranks == 1 or config.trainer.device == "cpu"):
        # Those on CPUs share the memory of this machine.
        name, of_rank = "trainer" if ranks == 1 else f"trainer, {ranks} processes", of_rank.times(ranks)
    memory[name] = of_rank
    if config.trainer.moves_optimizer_to_cpu:
        memory[OPTIMIZERS] = optimizers_on_cpu(config, model)
    if engine.engine == "embedded" and config.rollout.replay is None:
        length = engine.max_context_len or max_tokens or model.max_position_embeddings
        memory["embedded engine"] = embedded_memory(
            model, engine.max_slots, length, torch_dtype(engine.engine_dtype)
        )
        if config.has_eval_engine:
            memory["engine of evaluations"] = memory["embedded engine"]
    return memory | servers_on_paper(config, model, _smallest_gpu()) | _published(config, model)


def _smallest_gpu() -> int:
    """Of this machine; where it has none, that of the machine that the run may be for (bytes)."""
    return min((gpu.memory for gpu in present_gpus() if gpu.memory), default=_A_GPU)


def _gpu_of_a_rank(config: RunConfig) -> int | None:
    """The memory of the GPU of a torch trainer's rank (bytes); None = it has none."""
    if config.trainer.device == "cpu":
        return None
    return _smallest_gpu()


def _published(config: RunConfig, model: PreTrainedConfig) -> dict[str, MemoryNeed]:
    """The versions of the policy that are in memory for servers, while the next one is sent."""
    engine = config.engine
    if engine.engine != "sglang" or config.rollout.replay is not None or not num_ranks(config):
        return {}
    is_half = config.trainer.published_dtype == "bfloat16"
    # Each fleet has one, and one more is sent.
    version = published_memory(model, bf16=is_half)
    memory = {PUBLISHED: version.times(2 + config.has_eval_engine)}
    if engine.update_weights_transport == "delta":
        # Of child ranks the two versions are those above, which the run's process has mapped.
        memory[DELTAS] = version.times(3 if config.cluster.cluster == "ray" else 1)
    return memory


def memory_shortage(memory: Mapping[str, MemoryNeed], *, is_elsewhere: bool = False) -> str | None:
    """A sentence where the parts that are known exactly exceed the memory of a GPU, or of this machine; None
    where they do not.

    is_elsewhere: the trainer runs on machines of a cluster, which are not asked.
    """
    ranks = next((part for name, part in memory.items() if "ranks" in name), None)
    # Its driver may not tell how large a GPU is.
    sizes = [] if is_elsewhere else [gpu.memory for gpu in present_gpus() if gpu.memory]
    if ranks is not None and sizes and ranks.exact > min(sizes):
        return (
            f"weights, gradients and optimizer of a rank take {ranks.exact / 2**30:.1f} GiB, and a GPU has "
            f"{min(sizes) / 2**30:.1f} GiB; take more ranks, or, with several networks (a reference, "
            "a critic), offload = true."
        )
    elsewhere = ("ranks", "server", "trainer", PUBLISHED) if is_elsewhere else ("ranks", "server")
    here = {name: part for name, part in memory.items() if not any(word in name for word in elsewhere)}
    local, machine = sum(part.exact for part in here.values()), machine_memory()
    if local <= machine:
        return None
    return (
        f"{' and '.join(here)} take {local / 2**30:.1f} GiB, and this machine has "
        f"{machine / 2**30:.1f} GiB; take a smaller model or fewer max_slots, or trainer = megatron and "
        "engine = sglang on GPUs."
    )


def parts_of(memory: MemoryNeed) -> dict[str, JSON]:
    """The parts of a process that are not empty, and their sum."""
    parts = {f"{name}_bytes": size for name, size in memory._asdict().items() if size}
    return {**parts, "total_bytes": memory.total}


def is_elsewhere(config: RunConfig) -> bool:
    """Whether trainer and servers are on machines of a cluster that runs already, which are not asked."""
    return config.cluster.cluster == "ray" and cluster_address(config.cluster, os.environ) is not None


def disk_shortage(config: RunConfig, disk: Mapping[str, JSON]) -> str | None:
    """A sentence where the checkpoints and models do not fit on the disk; None where they do."""
    needed, free = disk["needed_bytes"], disk["free_bytes"]
    assert isinstance(needed, int), "a number of bytes"
    assert isinstance(free, int), "a number of bytes"
    if needed <= free:
        return None
    return (
        f"output_dir = {config.run.output_dir!r}: {disk['checkpoints']} checkpoints and the models take "
        f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; lower save_total_limit, or choose "
        "another --output-dir."
    )

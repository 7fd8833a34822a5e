"""What fits on GPUs: the ways to train a model there, the memory of each by part, and its longest row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig

from agentrl.assembly.cards import (
    CONTEXT_BYTES,
    SPARE,
    optimizers_on_cpu,
    rank_on_card,
    server_memory,
)
from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import load_run
from agentrl.assembly.memory import MemoryNeed, cache_bytes
from agentrl.assembly.places import with_devices
from agentrl.assembly.speed import Work, tokens_per_s
from agentrl.errors import ConfigError
from agentrl.trainer.config import ON_GPUS
from agentrl.trainer.megatron.config import rest_of_layers
from agentrl.trainer.megatron.model.shape import check_layout, shape_of
from agentrl.types import JSON
from agentrl.weights.hf.folders import has_config
from agentrl.weights.hf.source import open_config

_MOST_TOKENS = 2**24
_STEP = 256
_CLOSE = 0.01
_ROWS = 4
_OF_A_MACHINE = 8
"""GPUs (count)."""
_CONCURRENT = 256
"""Requests at once that a server has room for, beside its cache."""


def _settings(**settings: JSON) -> dict[str, JSON]:
    return settings


_RUN_OF_A_MODEL = _settings(engine="sglang", rollout_num_gpus_per_engine=1, colocate=True, warm_start_steps=0)


class Cards(NamedTuple):
    """GPUs of one kind. memory: of each (bytes)."""

    number: int
    memory: int


class Way(NamedTuple):
    """A way to train. settings: that differ from the other ways. memory: of each GPU's rank, by part.

    longest: tokens of the longest row that fits; 0 = not even one of 256. speed: tokens that all GPUs
    together would learn from in a second, see `tokens_per_s`; None = not of this trainer.
    """

    settings: Mapping[str, JSON]
    config: RunConfig
    memory: MemoryNeed
    longest: int
    speed: float | None = None


class Fit(NamedTuple):
    """A model on GPUs.

    tokens: of the row that the ways' memory is for. available: of a GPU, for a rank in its turn (bytes).
    context: the most tokens of a sequence, by the model's config; None = it does not say. server: one that
    has a GPU in its own turn, by part; cached: the tokens of its cache. on_cpu: what optimizers take in the
    CPU's memory, at most (bytes).
    """

    cards: Cards
    tokens: int
    available: int
    context: int | None
    ways: Sequence[Way]
    server: MemoryNeed
    cached: int
    on_cpu: int

    @property
    def fastest(self) -> Way | None:
        """Of those that fit; None = none does, or their speeds are not known."""
        known = [way for way in self.ways if way.speed and way.memory.total <= self.available]
        return max(known, key=lambda way: way.speed or 0.0, default=None)


def fit(
    what: Path,
    cards: Cards,
    settings: Mapping[str, JSON],
    tokens: int,
    working: Callable[[Sequence[Mapping[str, JSON]]], Iterator[Mapping[str, JSON]]] = iter,
) -> Fit:
    """Find out what fits, with engine and trainer in turns.

    Args:
        what: a model directory, of which config.json is enough, or a run file, whose settings hold.
        cards: what there is.
        settings: those that hold for every way; `trainer` decides which ways there are.
        tokens: of the longest sequence.
        working: passes the ways on, as they are tried.

    Raises:
        ConfigError: there is no model, or a setting is wrong.
        ModelLoadError: its config makes no sense.
    """
    run, every = (None, _of_model(what, settings)) if what.is_dir() else (what, dict(settings))
    config = load_run(run, every)
    if config.model.hf_checkpoint is None or not has_config(Path(config.model.hf_checkpoint)):
        raise ConfigError(
            f"{what}: there is no model to fit; name a model directory (its config.json is enough), or a run "
            "file with hf_checkpoint."
        )
    if config.engine.engine == "sglang":
        every["colocate"] = True
    policy = open_config(Path(config.model.hf_checkpoint))
    usable, empty = int(cards.memory * (1 - SPARE)), server_memory(policy, 1, _CONCURRENT, 0)
    # While one has its turn, the other has given all but its context back.
    cached = max(usable - empty.total - CONTEXT_BYTES, 0) // cache_bytes(policy, 1)
    available, ways = usable - empty.runtime, []
    for changes in working(list(_ways(config, policy, cards.number))):
        way = with_devices(load_run(run, {**every, **changes}), ON_GPUS)
        at = rank_on_card(way, policy, cards.memory)
        memory = at(tokens)
        longest = _longest(at, available, tokens, memory)
        ways.append(Way(changes, way, memory, longest, _speed(way, policy, tokens)))
    context = getattr(policy.get_text_config(), "max_position_embeddings", None)
    server = server_memory(policy, 1, _CONCURRENT, cached)
    on_cpu = [
        optimizers_on_cpu(way.config, policy).total
        for way in ways
        if way.config.trainer.optimizer_cpu_offload
    ]
    return Fit(cards, tokens, available, context, ways, server, cached, max(on_cpu, default=0))


def _speed(way: RunConfig, policy: PreTrainedConfig, tokens: int) -> float | None:
    """Of rows of one sequence each, in each replica so many that waits of a pipeline do not decide."""
    if way.trainer.trainer != "megatron":
        return None
    work = Work(_ROWS * way.layout.pipeline_model_parallel_size, tokens, tokens)
    return tokens_per_s(policy, way.layout, work, offloads=way.trainer.optimizer_cpu_offload)


def _of_model(directory: Path, settings: Mapping[str, JSON]) -> dict[str, JSON]:
    """The settings of a run of a model."""
    device = {} if "megatron" in settings.values() else _settings(device="cuda")
    return {**_RUN_OF_A_MODEL, **device, **_settings(hf_checkpoint=str(directory)), **settings}


def longest_row_that_fits(config: RunConfig, policy: PreTrainedConfig, available: int, total: int) -> int:
    """The tokens of the longest row of a run's rank on a GPU; 0 = not even one of 256.

    available: what servers leave of the GPU; total: all of it (bytes).
    """
    at = rank_on_card(config, policy, total)
    return _longest(at, available, config.trainer.max_tokens_per_gpu, at(config.trainer.max_tokens_per_gpu))


def _ways(config: RunConfig, policy: PreTrainedConfig, gpus: int) -> Iterator[dict[str, JSON]]:
    """The settings of each way.

    Raises:
        ConfigError: Megatron is to have adapters.
    """
    rank = config.trainer.lora_rank
    if config.trainer.trainer == "megatron":
        if rank is not None:
            raise ConfigError("trainer = megatron has no adapters: drop lora_rank, or choose torch.")
        yield from _layouts(config, policy, gpus)
        return
    for lora, again in product((None, rank or 16), (False, True)):
        yield _settings(
            device="cuda", actor_num_gpus_per_node=gpus, lora_rank=lora, gradient_checkpointing=again
        )


def _layouts(config: RunConfig, policy: PreTrainedConfig, gpus: int) -> Iterator[dict[str, JSON]]:
    """Those of Megatron that the model can have."""
    shape, powers = shape_of(policy), [2**power for power in range(gpus.bit_length())]
    machines = gpus // _OF_A_MACHINE if gpus % _OF_A_MACHINE == 0 else 1
    places = _settings(actor_num_gpus_per_node=gpus // machines)
    if machines > 1:
        places |= _settings(actor_num_nodes=machines, cluster="ray")
    for tensor, pipeline in product(powers, powers):
        if gpus % (tensor * pipeline) or (shape.num_experts and tensor > _OF_A_MACHINE):
            continue
        for experts in _of_experts(shape.num_experts, gpus // pipeline, tensor):
            layout = _settings(
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                sequence_parallel=tensor > 1,
                **_of_stages(len(shape.experts_by_layer), pipeline),
                **experts,
            )
            try:
                check_layout(shape, config.layout.model_copy(update=layout))
            except ConfigError:
                # Its heads, layers or experts cannot be divided so.
                continue
            yield _settings(**places, **layout)
            yield _settings(**places, **layout, recompute_granularity="full")


def _of_stages(layers: int, ranks: int) -> dict[str, JSON]:
    """Fewer layers on the last pipeline rank where not all can have equally many."""
    last = rest_of_layers(layers, ranks)
    return _settings(decoder_last_pipeline_num_layers=last) if layers % ranks and last > 0 else {}


def _of_experts(number: int, ranks: int, tensor: int) -> Iterator[dict[str, JSON]]:
    """Experts on as many ranks of a stage as divide them, and on as many of one machine; with tensor ranks
    also sharded over these. ranks: of a stage; tensor: of these (counts)."""
    if not number:
        yield {}
        return
    sizes = {(math.gcd(number, each), 1) for each in (ranks, math.gcd(ranks, _OF_A_MACHINE))}
    sizes.add((math.gcd(number, ranks // tensor), tensor))
    for experts, sharding in sorted(sizes):
        yield _settings(expert_model_parallel_size=experts, expert_tensor_parallel_size=sharding)


def _longest(at: Callable[[int], MemoryNeed], available: int, tokens: int, memory: MemoryNeed) -> int:
    """The tokens of the longest row that takes no more than is available; 0 = there is none.

    memory: of a row of `tokens`.
    """
    known = {0: memory._replace(activations=0, dispatch=0, logits=0).total, tokens: memory.total}
    while True:
        fits = max((tokens for tokens, size in known.items() if size <= available), default=0)
        above = min((tokens for tokens, size in known.items() if size > available), default=_MOST_TOKENS)
        # Memory is nearly linear in the tokens.
        near = sorted(known, key=lambda tokens: abs(known[tokens] - available))[:2]
        first, second = sorted(near)
        slope = max((known[second] - known[first]) / (second - first), 1.0)
        guess = first + int((available - known[first]) / slope)
        step = max(_STEP, int(_CLOSE * fits))
        if above - fits <= step or (fits in near[:1] and guess - fits < step):
            return fits
        guess = min(max(guess // _STEP * _STEP, fits + _STEP), above - 1)
        known[guess] = at(guess).total

"""The embedded engine against transformers' generate: same weights, dtype, threads and requests.

Lengths are forced: no stop, no end token. Equal: every request has the same lengths. Ragged: prompts
and completions differ, the baseline pads prompts on the left and runs until the longest is done;
only requested tokens count. Both sides sample at temperature 1, except where a
workload is greedy; the engine returns logprobs as well, the baseline does not. Sides take turns, and
the order is reversed in every other repeat.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import cast

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.types import JSON
from agentrl.types.seams import Sampling
from benchmarks.machine import machine


@dataclass(frozen=True, slots=True)
class GenerationWorkload:
    """Requests that are sent together. Ranges are inclusive; lengths in tokens.

    turns: requests of each session, with `world` new tokens after each completion.
    """

    name: str
    concurrency: int = 32
    prompt: tuple[int, int] = (32, 32)
    new: tuple[int, int] = (64, 64)
    temperature: float = 1.0
    turns: int = 1
    world: int = 16
    is_target: bool = False

    @property
    def context_len(self) -> int:
        """The longest prefix that any session reaches."""
        return self.prompt[1] + self.turns * self.new[1] + (self.turns - 1) * self.world


RAGGED = GenerationWorkload("ragged", prompt=(8, 56), new=(16, 112), is_target=True)
GREEDY = GenerationWorkload("equal, greedy", temperature=0.0)
TURNS = GenerationWorkload("four short turns", new=(10, 10), turns=4)
SINGLE = GenerationWorkload("one request alone", concurrency=1)
"""An adverse case: with a batch of one, batching gains nothing."""

CONCURRENT = tuple(
    GenerationWorkload(
        f"{number} at once{', greedy' if greedy else ''}",
        concurrency=number,
        prompt=(24, 24),
        temperature=float(not greedy),
        is_target=True,
    )
    for greedy in (False, True)
    for number in (32, 128, 256, 512)
)
"""Frozen: 64 new tokens after prompts of 24, up to the quickstart's number of episodes in flight."""

TINY_WORKLOADS = (
    *CONCURRENT,
    GenerationWorkload("equal", new=(192, 192), is_target=True),
    GenerationWorkload("equal, 64 tokens"),
    RAGGED,
    GREEDY,
    TURNS,
    SINGLE,
)
"""Frozen. `equal` fills the context of the quickstart's episodes."""

SMALL_WORKLOADS = (GenerationWorkload("equal", is_target=True), RAGGED, GREEDY, TURNS, SINGLE)
"""Frozen."""


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """A model under test. target: the ratio to reach in the workloads that are targets."""

    name: str
    dtype: torch.dtype
    make: Callable[[], PreTrainedModel]
    workloads: tuple[GenerationWorkload, ...]
    target: float


def tiny_model(vocab_size: int = 200) -> PreTrainedModel:
    """The quickstart's shape, 0.66M parameters, random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def small_model() -> PreTrainedModel:
    """The shape of SmolLM2-135M, random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


MODELS = (
    ModelUnderTest("tiny", torch.float32, tiny_model, TINY_WORKLOADS, 2.0),
    ModelUnderTest("135M", torch.bfloat16, small_model, SMALL_WORKLOADS, 1.8),
    ModelUnderTest("135M", torch.float32, small_model, SMALL_WORKLOADS[:2], 1.8),
)


def bench_engine(
    *, models: Sequence[ModelUnderTest] = MODELS, repeats: int = 5, threads: int = 1
) -> dict[str, JSON]:
    """Tokens per second of both sides for every model and workload.

    Returns:
        summary: one line per row with the ratio of medians and the target, where there is one.
        rows: all repeats, medians, spread (max - min, over the median). settings: of runs and machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = [row for model in models for row in _bench_model(model, repeats)]
    finally:
        torch.set_num_threads(before)
    return {
        "summary": {str(row["name"]): row["line"] for row in rows},
        "rows": list(rows),
        "settings": _settings(models, repeats, threads),
    }


def _bench_model(under_test: ModelUnderTest, repeats: int) -> list[dict[str, JSON]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = under_test.make().eval()
        # Module.to is wrapped by transformers in a way that hides its signature from type checkers.
        nn.Module.to(model, under_test.dtype)
        return [_bench_row(under_test, model, workload, repeats) for workload in under_test.workloads]


def _bench_row(
    under_test: ModelUnderTest, model: PreTrainedModel, workload: GenerationWorkload, repeats: int
) -> dict[str, JSON]:
    requests = Requests.draw(workload, model.config.vocab_size)
    engine = EmbeddedEngine.from_model(
        model, max_slots=workload.concurrency, max_context_len=workload.context_len, eos_token_ids=()
    )
    sides: dict[str, Callable[[], None]] = {
        "embedded": lambda: asyncio.run(send_all(engine, requests)),
        "transformers": lambda: _transformers(model, requests),
    }
    for run in sides.values():
        run()
    rates: dict[str, list[float]] = {side: [] for side in sides}
    cpu_rates: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sorted(sides, reverse=repeat % 2 == 1):
            wall, cpu = time.perf_counter(), time.process_time()
            sides[side]()
            rates[side].append(requests.num_tokens / (time.perf_counter() - wall))
            cpu_rates[side].append(requests.num_tokens / (time.process_time() - cpu))
    asyncio.run(engine.close())
    dtype = str(under_test.dtype).removeprefix("torch.")
    target = under_test.target if workload.is_target else None
    return {"name": f"{under_test.name} {dtype}, {workload.name}"} | _figures(target, rates, cpu_rates)


def _figures(
    target: float | None, rates: dict[str, list[float]], cpu_rates: dict[str, list[float]]
) -> dict[str, JSON]:
    medians = {side: statistics.median(values) for side, values in rates.items()}
    ratio = medians["embedded"] / medians["transformers"]
    cpu_medians = [statistics.median(cpu_rates[side]) for side in ("embedded", "transformers")]
    line = f"{ratio:.2f}x ({medians['embedded']:.0f} against {medians['transformers']:.0f} tokens/s)"
    return {
        "line": line if target is None else f"{line}, target {target}x",
        "ratio": ratio,
        "ratio_of_cpu_time": cpu_medians[0] / cpu_medians[1],
        "target": target,
        "sides": {
            side: {
                "tokens_per_s": [*values],
                "median": medians[side],
                "spread": (max(values) - min(values)) / medians[side],
                "tokens_per_cpu_s": [*cpu_rates[side]],
            }
            for side, values in rates.items()
        },
    }


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one run of a workload. new: tokens to sample, by session; world: between turns."""

    prompts: tuple[list[int], ...]
    new: tuple[int, ...]
    world: list[int]
    workload: GenerationWorkload

    @classmethod
    def draw(cls, workload: GenerationWorkload, vocab_size: int) -> Requests:
        """The same ones in every run."""
        rng = np.random.default_rng(0)

        def length(bounds: tuple[int, int]) -> int:
            return int(rng.integers(bounds[0], bounds[1], endpoint=True))

        def tokens(size: int) -> list[int]:
            return [int(token) for token in rng.integers(1, vocab_size, size)]

        each = range(workload.concurrency)
        return cls(
            tuple(tokens(length(workload.prompt)) for _ in each),
            tuple(length(workload.new) for _ in each),
            tokens(workload.world),
            workload,
        )

    @property
    def num_tokens(self) -> int:
        """Requested tokens, over all turns."""
        return sum(self.new) * self.workload.turns


async def send_all(engine: EmbeddedEngine, requests: Requests) -> None:
    """Send all requests at once, those of a session one after the other; returns when all have ended."""

    async def converse(number: int) -> None:
        prefix = list(requests.prompts[number])
        for turn in range(requests.workload.turns):
            sampling = Sampling(requests.new[number], temperature=requests.workload.temperature, seed=turn)
            completion = await engine.generate(prefix, sampling, session=str(number))
            prefix += [*completion.token_ids.tolist(), *requests.world]
        await engine.close_session(str(number))

    await asyncio.gather(*(converse(number) for number in range(len(requests.prompts))))


@torch.inference_mode()
def _transformers(model: PreTrainedModel, requests: Requests) -> None:
    generate = cast("Callable[..., torch.Tensor]", model.generate)
    prefixes = [list(prompt) for prompt in requests.prompts]
    for _ in range(requests.workload.turns):
        width = max(len(prefix) for prefix in prefixes)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prefixes])
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prefixes])
        out = generate(input_ids=ids, attention_mask=mask, **_generate_settings(requests))
        sampled = out[:, width:].tolist()
        for prefix, tokens, size in zip(prefixes, sampled, requests.new, strict=True):
            prefix += [*tokens[:size], *requests.world]


def _generate_settings(requests: Requests) -> dict[str, int | float | bool | None]:
    common: dict[str, int | float | bool | None] = {
        "max_new_tokens": max(requests.new),
        "pad_token_id": 0,
        "eos_token_id": None,
        "use_cache": True,
    }
    if requests.workload.temperature == 0:
        return common | {"do_sample": False}
    return common | {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def _settings(models: Sequence[ModelUnderTest], repeats: int, threads: int) -> dict[str, JSON]:
    return {
        "repeats": repeats,
        "threads": threads,
        "warm_up": "one run of each side per row",
        "machine": machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "baseline": {
            "call": "generate() under inference_mode, prompts padded on the left, with an attention mask",
            "version": version("transformers"),
            "cache": "dynamic",
            "attention": "sdpa",
            "sampling": "do_sample, temperature 1, top_k 0, top_p 1; greedy workloads: do_sample off",
        },
        "workloads": {model.name: [_described(workload) for workload in model.workloads] for model in models},
    }


def _described(workload: GenerationWorkload) -> dict[str, JSON]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in asdict(workload).items()
    }

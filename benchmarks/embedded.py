"""The embedded engine against transformers' generate: same weights, dtype, threads and requests.

Lengths are forced: no stop, no end token. Equal: every request has the same lengths. Ragged: prompts
and completions differ, the baseline pads prompts on the left and runs until the longest is done;
only requested tokens count. Both sides sample at temperature 1, except where a
workload is greedy; the engine returns logprobs as well, the baseline does not.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.types import JSON
from agentrl.types.seams import Sampling
from agentrl.weights.codec import torch_dtype
from benchmarks.compare import Duration, Side, rates_of, timed
from benchmarks.machine import machine
from benchmarks.models import seeded, small_model, tiny_model, vocab_size, windowed
from benchmarks.sections import ResultRow, as_json, one_thread, reported

EMBEDDED, BASE = "embedded", "transformers"
BASELINE: Final[dict[str, JSON]] = {
    "call": "generate() under inference_mode, prompts padded on the left, with an attention mask",
    "cache": "dynamic",
    "attention": "sdpa",
    "sampling": "do_sample, temperature 1, top_k 0, top_p 1; greedy workloads: do_sample off",
}
_MODELS: Final = {"tiny": tiny_model, "tiny Gemma 2": windowed, "135M": small_model}


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
ALONE = GenerationWorkload("one request alone", concurrency=1)
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
    ALONE,
)
"""Frozen. `equal` fills the context of the quickstart's episodes."""

SMALL_WORKLOADS = (GenerationWorkload("equal", is_target=True), RAGGED, GREEDY, TURNS, ALONE)
"""Frozen."""


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """A model by its name, with its dtype. target: the ratio to reach in the workloads that are targets."""

    model: str
    dtype: str
    workloads: tuple[GenerationWorkload, ...]
    target: float


MODELS = (
    ModelUnderTest("tiny", "float32", TINY_WORKLOADS, 2.0),
    # Without a decoder of its own: by transformers' code. Here ragged requests are the adverse case.
    ModelUnderTest("tiny Gemma 2", "float32", (GenerationWorkload("equal"), RAGGED, TURNS, ALONE), 1.0),
    ModelUnderTest("135M", "bfloat16", SMALL_WORKLOADS, 1.8),
    ModelUnderTest("135M", "float32", SMALL_WORKLOADS[:2], 1.8),
)


def bench_embedded(models: Sequence[ModelUnderTest] = MODELS, repeats: int = 5) -> dict[str, JSON]:
    """Every model with each of its workloads; both sides in one thread.

    Returns:
        summary: one line per row. rows: every repeat, medians and spreads. settings: of runs and machine.
    """
    with one_thread():
        rows = asyncio.run(_rows(models, repeats))
    return {
        **reported([("embedded", row) for row in rows]),
        "settings": {
            **as_json({"models": [asdict(tested) for tested in models], "repeats": repeats}),
            "threads": 1,
            "warm_up": "one run of each side per row",
            "baseline": BASELINE,
            "machine": machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
    }


async def _rows(models: Sequence[ModelUnderTest], repeats: int) -> list[ResultRow]:
    rows = []
    for tested in models:
        network = seeded(_MODELS[tested.model], torch_dtype(tested.dtype))
        rows += [await _row(tested, network, workload, repeats) for workload in tested.workloads]
    return rows


async def _row(
    tested: ModelUnderTest, network: PreTrainedModel, workload: GenerationWorkload, repeats: int
) -> ResultRow:
    requests = Requests.draw(workload, vocab_size(network))
    engine = EmbeddedEngine.from_model(
        network, max_slots=workload.concurrency, max_context_len=workload.context_len, eos_token_ids=()
    )
    sides: dict[str, Side] = {
        EMBEDDED: partial(_send_all, engine, requests),
        BASE: partial(_generate_all, network, requests),
    }
    try:
        spent = await timed(sides, repeats=repeats)
    finally:
        await engine.close()
    name = f"{tested.model} {tested.dtype}, {workload.name}"
    return _result_row(name, spent, requests.num_tokens, tested.target if workload.is_target else None)


def _result_row(
    name: str, spent: dict[str, list[Duration]], num_tokens: int, target: float | None
) -> ResultRow:
    medians, sides = rates_of(spent, num_tokens, "tokens_per_s")
    per_cpu_s = {side: [num_tokens / run.cpu_s for run in runs] for side, runs in spent.items()}
    cpu_medians = {side: statistics.median(values) for side, values in per_cpu_s.items()}
    ratio = medians[EMBEDDED] / medians[BASE]
    line = f"{ratio:.2f}x ({medians[EMBEDDED]:.0f} against {medians[BASE]:.0f} tokens/s)"
    figures: dict[str, JSON] = {
        "ratio": ratio,
        "ratio_of_cpu_time": cpu_medians[EMBEDDED] / cpu_medians[BASE],
        "target": target,
        "sides": sides,
        "tokens_per_cpu_s": {side: [*values] for side, values in per_cpu_s.items()},
    }
    return ResultRow(name, line if target is None else f"{line}, target {target}x", figures)


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


async def _send_all(engine: EmbeddedEngine, requests: Requests) -> None:
    """Send all requests at once, those of a session one after the other; returns when all have ended."""

    async def converse(number: int) -> None:
        prefix = list(requests.prompts[number])
        for turn in range(requests.workload.turns):
            sampling = Sampling(requests.new[number], temperature=requests.workload.temperature, seed=turn)
            completion = await engine.generate(prefix, sampling, session=str(number))
            prefix += [*completion.token_ids.tolist(), *requests.world]
        await engine.close_session(str(number))

    await asyncio.gather(*(converse(number) for number in range(len(requests.prompts))))


async def _generate_all(network: PreTrainedModel, requests: Requests) -> None:
    prefixes = [list(prompt) for prompt in requests.prompts]
    is_greedy = requests.workload.temperature == 0
    for _ in range(requests.workload.turns):
        sampled = generate(network, prefixes, max(requests.new), greedy=is_greedy)
        for prefix, tokens, size in zip(prefixes, sampled, requests.new, strict=True):
            prefix += [*tokens[:size], *requests.world]


@torch.inference_mode()
def generate(
    network: PreTrainedModel, prefixes: Sequence[Sequence[int]], new: int, *, greedy: bool = False
) -> list[list[int]]:
    """The `new` tokens that transformers samples after each prefix, all in one batch."""
    call = cast("Callable[..., torch.Tensor]", network.generate)
    width = max(len(prefix) for prefix in prefixes)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    out = call(
        input_ids=torch.tensor([[0] * (width - len(prefix)) + [*prefix] for prefix in prefixes]),
        attention_mask=torch.tensor([[0] * (width - len(prefix)) + [1] * len(prefix) for prefix in prefixes]),
        max_new_tokens=new,
        pad_token_id=0,
        eos_token_id=None,
        use_cache=True,
        **({"do_sample": False} if greedy else sampling),
    )
    sampled: list[list[int]] = out[:, width:].tolist()
    return sampled

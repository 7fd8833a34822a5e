"""The description of an engine for the conformance checks, and their error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.errors import AgentRLError
from agentrl.types import Completion
from agentrl.types.seams import Bucket, RunningPolicy, Sampling, TensorSpec, WeightSink

PATIENCE_S = 60.0
"""The timeout of a check for a result that should come at once."""


class ConformanceError(AgentRLError):
    """An engine failed a check; the message states the expected and the observed behaviour."""


@dataclass(frozen=True, slots=True)
class EngineCaps:
    """The capabilities of an engine. False declares one as missing."""

    seeds: bool = True
    """A seed reproduces a completion, whatever else is in the batch."""

    stop_strings: bool = True
    """Stop strings, and not only stop tokens."""

    prefix_cache: bool = True
    """The turns of a session share a cache, and `cached_tokens` reports how much of it was used."""

    private_caches: bool = True
    """Only the session itself uses its cache, which is dropped when the session is closed."""

    weight_updates: bool = True
    """A sink accepts new weights while requests run."""

    kept_ids: bool = True
    """Completions have the ids that top-k and top-p kept, where they are asked for and top-k is set."""

    kept_ids_of_top_p: bool = True
    """They have them where only top-p is set, too; needs kept_ids."""

    releases_memory: bool = True
    """Weights and cache can be released while requests run, which then wait; needs weight updates."""


class WeightVersion(NamedTuple):
    """One version of the weights, ready to be sent."""

    manifest: Sequence[TensorSpec]
    buckets: Sequence[Bucket]
    checksum: int


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """An engine under test, new and idle, and an independent reference for its model's logits.

    logits(ids, version): float [T, V]; row t predicts the token after ids[: t + 1]. Versions 0 and 1 differ;
    later ones alternate between the weights of these two.
    delivery(version): the manifest and buckets of version 0 or 1. decode: the text of tokens.
    tolerance: the maximum difference of logprobs from those of `logits`. sink: of the engine; None = it has
    none.
    """

    engine: RunningPolicy
    caps: EngineCaps
    vocab_size: int
    max_slots: int
    max_context_len: int
    logits: Callable[[Sequence[int], int], npt.NDArray[np.floating]]
    delivery: Callable[[int], WeightVersion]
    decode: Callable[[Sequence[int]], str]
    tolerance: float = 1e-5
    sink: WeightSink | None = None

    def prompt(self, number: int, length: int = 7) -> list[int]:
        """A reproducible prompt."""
        return [int(i) for i in np.random.default_rng(number).integers(0, self.vocab_size, length)]

    async def sample(self, number: int, sampling: Sampling) -> Completion:
        """Run prompt `number` in a session of its own."""
        return await self.engine.generate(self.prompt(number), sampling, session=f"s{number}")


def expect(holds: bool | np.bool_, sentence: str) -> None:
    """Raise ConformanceError with `sentence` unless the condition holds."""
    if not holds:
        raise ConformanceError(sentence)


def expect_logprobs(
    subject: Subject, prompt: Sequence[int], completion: Completion, temperature: float
) -> None:
    """Expect the logprob of each token to be that of the model at the token's version."""
    ids = [*prompt, *completion.token_ids.tolist()]
    rows = {version: subject.logits(ids, version % 2) for version in set(completion.versions.tolist())}
    for t, token in enumerate(completion.token_ids.tolist()):
        row = rows[int(completion.versions[t])][len(prompt) + t - 1].astype(np.float64)
        row = row / (temperature or 1.0)
        expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        difference = abs(expected - float(completion.logprobs[t]))
        expect(
            difference <= subject.tolerance,
            f"token {t} of a completion at temperature {temperature:g} has logprob "
            f"{completion.logprobs[t]:.6f}; the model has {expected:.6f}: is it that token's own, after "
            "temperature, before top-p?",
        )


async def in_flight(subject: Subject) -> list[asyncio.Task[Completion]]:
    """More long requests than slots, some of them running: a short concurrent request has ended."""
    rule = Sampling(subject.max_context_len - 7, seed=1)

    def started(numbers: range) -> list[asyncio.Task[Completion]]:
        return [asyncio.create_task(subject.sample(n, rule)) for n in numbers]

    # One slot is free for the short request, whichever of them arrives first.
    tasks = started(range(subject.max_slots - 1))
    first = subject.engine.generate(subject.prompt(0), Sampling(4), session="first")
    await asyncio.wait_for(first, PATIENCE_S)
    tasks += started(range(subject.max_slots - 1, subject.max_slots + 2))
    await asyncio.sleep(0)
    return tasks

"""An engine as its author describes it to the suite, and what a broken promise looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.errors import AgentRLError
from agentrl.protocols import Bucket, RunningPolicy, Sampling, TensorSpec, WeightSink
from agentrl.types import Completion


class ConformanceError(AgentRLError):
    """An engine broke a promise; the sentence says which, and how it showed."""


@dataclass(frozen=True, slots=True)
class EngineCaps:
    """What an engine can do. False is a declared lack."""

    seeds: bool = True
    """A seed reproduces a completion, whatever runs beside it."""

    stop_strings: bool = True
    """Stop strings, not stop tokens only."""

    prefix_cache: bool = True
    """The turns of a session share a cache, and `cached_tokens` says how much of it was used."""

    private_caches: bool = True
    """What a session cached is used by it alone, and forgotten when it is closed."""

    weight_updates: bool = True
    """New weights are taken by a sink, while requests run."""


class WeightVersion(NamedTuple):
    """One version of the weights, ready to be sent."""

    manifest: Sequence[TensorSpec]
    buckets: Sequence[Bucket]
    checksum: int


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """An engine under test, fresh and idle, and an independent account of what its model believes.

    logits(ids, version): float [T, V]; row t is what follows ids[: t + 1]. Versions 0 and 1 differ.
    delivery(version): how that version is sent. decode: the text of tokens.
    tolerance: how far logprobs may be from those of `logits`. sink: of the engine; None = it has none.
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
    """Raise ConformanceError with `sentence` unless the promise holds."""
    if not holds:
        raise ConformanceError(sentence)


def expect_logprobs(subject: Subject, prompt: Sequence[int], got: Completion, temperature: float) -> None:
    """Each token's logprob must be what the model of that token's version says."""
    ids = [*prompt, *got.token_ids.tolist()]
    rows = {version: subject.logits(ids, version) for version in set(got.versions.tolist())}
    for t, token in enumerate(got.token_ids.tolist()):
        row = rows[int(got.versions[t])][len(prompt) + t - 1].astype(np.float64)
        row = row / (temperature or 1.0)
        wanted = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        off = abs(wanted - float(got.logprobs[t]))
        expect(
            off <= subject.tolerance,
            f"token {t} of a completion at temperature {temperature:g} has logprob {got.logprobs[t]:.6f}; "
            f"the model says {wanted:.6f}: is it that token's own, after temperature, before top-p?",
        )

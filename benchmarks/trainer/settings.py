"""The loads of the trainer's benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedModel

from agentrl.types import JSON
from benchmarks.models import ten_million


@dataclass(frozen=True, slots=True)
class TrainerBench:
    """What is trained, and how often.

    prompts, siblings: of a step (count). prompt, new: tokens of an episode of one turn. row_tokens: of a row
    of ours. padded: samples of a batch of the others. longest: of the long-tailed samples (tokens). head:
    tokens, width and vocabulary whose scores are counted.
    """

    make: Callable[[], PreTrainedModel] = field(default=ten_million, repr=False)
    threads: int = 2
    repeats: int = 5
    prompts: int = 8
    siblings: int = 8
    prompt: int = 32
    new: int = 64
    row_tokens: int = 4096
    padded: int = 16
    longest: int = 1000
    head: tuple[int, int, int] = (32_768, 1024, 151_936)

    @property
    def episodes(self) -> int:
        """Of a step (count)."""
        return self.prompts * self.siblings

    @property
    def facts(self) -> dict[str, JSON]:
        """The settings as JSON."""
        names = (
            "threads",
            "repeats",
            "prompts",
            "siblings",
            "prompt",
            "new",
            "row_tokens",
            "padded",
            "longest",
        )
        return {"model": self.make.__name__, **{name: getattr(self, name) for name in names}}


def long_tailed(number: int, longest: int) -> list[int]:
    """Lengths of samples (tokens): half of them below 120, a few near the longest."""
    drawn = np.random.default_rng(0).lognormal(np.log(120.0), 0.8, number)
    return [int(length) for length in np.clip(drawn, 48, longest)]

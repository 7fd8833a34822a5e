"""The workloads of `python -m benchmarks megatron`. Frozen: they change only with docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from benchmarks.models import small_even, ten_million

STEP_TARGET = 0.85
PUBLISH_TARGET = 1.5


@dataclass(frozen=True, slots=True)
class BatchWorkload:
    """Samples of one batch, by their lengths (tokens). target: the share of the torch trainer's speed."""

    name: str
    lengths: tuple[int, ...]
    target: float | None = STEP_TARGET


SHORT = BatchWorkload("very short", tuple(np.random.default_rng(0).integers(8, 17, 84).tolist()), target=None)
"""An adverse case: 84 sequences of nine lengths in a row of 1,024 tokens."""

WORKLOADS = (
    BatchWorkload("four of 256", (256,) * 4),
    BatchWorkload("ragged", (17, 256, 96, 198, 64, 33, 141, 219)),
    SHORT,
)


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """row_tokens: of a micro-batch; layout_row_tokens: the same for `layouts`."""

    trained: Callable[[], PreTrainedModel] = ten_million
    published: Callable[[], PreTrainedModel] = small_even
    workloads: tuple[BatchWorkload, ...] = WORKLOADS
    row_tokens: int = 1024
    layout_row_tokens: int = 256
    repeats: int = 9


SETTINGS = MegatronSettings()
"""Frozen."""

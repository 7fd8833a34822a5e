"""The longest kernels of an update, by the trainer's own recording."""

from __future__ import annotations

import gzip
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.recording import Recording
from agentrl.types import JSON

_ON_CARD: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_CPU: Final = ("cpu_op",)
_LONGEST = 10
_NAME_CHARS = 90
_KINDS: Final = (
    (r"gemm|nvjet|cutlass|wgmma|cublas|splitK|aten::mm|addmm|bmm", "matmul"),
    (r"flash|fmha|attention", "attention"),
    (r"softmax|cross_entropy|log_soft", "softmax"),
    (r"(?i)memcpy|memset|copy_", "copies"),
    (r"adam|multi_tensor|foreach", "optimizer"),
    (r"triton", "compiled"),
    (r"reduce|norm", "reductions"),
    (r"index|gather|scatter|embedding", "indexing"),
    (r"elementwise|vectorized", "elementwise"),
    (r"cat|CatArray", "concatenation"),
)


class Total(NamedTuple):
    """All kernels of a name, or of a kind: their launches (count), and their time (ms)."""

    name: str
    launches: int
    ms: float


@dataclass(frozen=True, slots=True)
class Kernels:
    """longest: by name. kinds: by what they do. launches: of all (count). busy_ms: time of all kernels.

    wall_ms: from the start of the first to the end of the last. recorded_s: of the update with its recording.
    """

    longest: list[Total]
    kinds: list[Total]
    launches: int
    busy_ms: float
    wall_ms: float
    recorded_s: float

    def figures(self) -> dict[str, JSON]:
        """As JSON."""
        return {
            "launches": self.launches,
            "busy_ms": self.busy_ms,
            "wall_ms": self.wall_ms,
            "recorded_s": self.recorded_s,
            "kinds": [[*total] for total in self.kinds],
            "longest": [[*total] for total in self.longest],
        }

    def __str__(self) -> str:
        kinds = ", ".join(f"{total.name} {total.ms / self.busy_ms:.0%}" for total in self.kinds[:5])
        return f"the card is busy for {self.busy_ms / max(self.wall_ms, 1e-9):.0%} of the time; {kinds}"


async def record_update(
    trainer: RankTrainer, update: Callable[[], Awaitable[object]], folder: Path
) -> Kernels:
    """The kernels of one update on rank 0."""
    traces = folder / f"trace-{uuid.uuid4().hex[:6]}"
    recording = Recording(0, traces, None)
    await trainer.start_recording(recording)
    started = time.perf_counter()
    await update()
    seconds = time.perf_counter() - started
    await trainer.write_recording(recording, [])
    path = next(iter(sorted(traces.glob("*rank-0.json.gz"))))
    with gzip.open(path) as file:
        events = cast(list[dict[str, JSON]], json.load(file)["traceEvents"])
    return kernels_of(events, seconds)


def kernels_of(events: Iterable[Mapping[str, JSON]], recorded_s: float) -> Kernels:
    """The kernels in the events of a Chrome trace; of a trace without a card, its operators."""
    timed = [event for event in events if event.get("cat") in (*_ON_CARD, *_ON_CPU)]
    on_card = [event for event in timed if event["cat"] in _ON_CARD]
    chosen = on_card or timed
    names, kinds = dict[str, list[float]](), dict[str, list[float]]()
    for event in chosen:
        name, ms = str(event["name"]), _number(event["dur"]) / 1e3
        names.setdefault(name[:_NAME_CHARS], []).append(ms)
        kinds.setdefault(kind_of(name), []).append(ms)
    starts = [_number(event["ts"]) for event in chosen]
    ends = [_number(event["ts"]) + _number(event["dur"]) for event in chosen]
    return Kernels(
        _longest(names)[:_LONGEST],
        _longest(kinds),
        len(chosen),
        sum(map(sum, names.values())),
        (max(ends, default=0.0) - min(starts, default=0.0)) / 1e3,
        recorded_s,
    )


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    return next((kind for pattern, kind in _KINDS if re.search(pattern, kernel)), "other")


def _longest(by_name: Mapping[str, list[float]]) -> list[Total]:
    totals = [Total(name, len(ms), round(sum(ms), 2)) for name, ms in by_name.items()]
    return sorted(totals, key=lambda total: -total.ms)


def _number(value: JSON) -> float:
    assert isinstance(value, int | float), "times of a trace are numbers"
    return float(value)

"""The rates of the card: matrix products in bf16, and copies.

The job also makes the model that the first ones of the others begin with.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial

import torch

from agentrl.types import JSON
from benchmarks.compare import Figures, figures_of
from benchmarks.gpu import card
from benchmarks.gpu.job import Bench
from benchmarks.gpu.shapes import model_folder, shape_of

_REPEATS = 5


async def run(bench: Bench) -> None:
    """A row of the first card's rates."""
    tiny, device = bench.spec.tiny, bench.spec.device
    # Imported here, so that nobody waits for it later.
    import transformers

    bench.turn()
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    memory = card.free()
    matmul = figures_of(_matmul(256 if tiny else 8192, device))
    copy, to_host = _copies(1 << 22 if tiny else 4 << 30, device)
    card.empty()
    line = (
        f"matmul {matmul.median / 1e12:.0f} TFLOP/s (spread {matmul.spread:.0%}), copy "
        f"{copy.median / 1e9:.0f} GB/s, to the host pinned {to_host['pinned'] / 1e9:.1f}, pageable "
        f"{to_host['pageable'] / 1e9:.1f} GB/s"
    )
    figures: dict[str, JSON] = {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "free_bytes": memory,
        "matmul": matmul._asdict(),
        "copy": copy._asdict(),
        "to_host": {**to_host},
    }
    best = {"matmul_tflops": matmul.median / 1e12, "copy_gbps": copy.median / 1e9}
    bench.row("hw", line, figures, best)
    bench.tell(card=name, cards=card.cards(), memory=memory, matmul=matmul.median, copy=copy.median)
    shape = shape_of(bench.spec.shape, tiny=tiny)
    started = time.monotonic()
    path = model_folder(bench.folder, shape, device)
    bench.note(f"{shape.name} lies at {path} after {time.monotonic() - started:.1f} s")


def _matmul(size: int, device: str) -> list[float]:
    """Operations a second of a square matrix product in bf16, by repeat."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return [2 * size**3 / seconds for seconds in _seconds(partial(torch.matmul, a, b), 10)]


def _copies(num_bytes: int, device: str) -> tuple[Figures, dict[str, float]]:
    """Bytes a second of a copy on the card, and to memory of this process."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = [num_bytes / seconds for seconds in _seconds(partial(target.copy_, source), 2)]
    part = source[: num_bytes // 4]
    pageable = torch.empty(len(part), dtype=torch.uint8)
    pinned = pageable.pin_memory() if device == "cuda" else pageable
    to_host = {
        name: len(part) / min(_seconds(partial(host.copy_, part), 2))
        for name, host in (("pinned", pinned), ("pageable", pageable))
    }
    return figures_of(rates), to_host


def _seconds(work: Callable[[], object], count: int) -> list[float]:
    """Seconds of one call, in each of several repeats of `count` calls."""
    work()
    card.synchronize()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        for _ in range(count):
            work()
        card.synchronize()
        seconds.append((time.perf_counter() - started) / count)
    return seconds

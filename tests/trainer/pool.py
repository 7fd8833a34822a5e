"""Several real processes that compute together, kept for the tests of a file."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from types import TracebackType

import torch
from torch.distributed import FileStore

from agentrl.runtime.temporary import temporary_folder


class Pool:
    """`count` processes; each call makes them ranks that meet. One that fails ends the others."""

    def __init__(self, count: int) -> None:
        self.count = count
        # A process stays the same rank: torch keeps what it knows of a mesh of ranks.
        context = get_context("spawn")
        self._pools = [ProcessPoolExecutor(1, context, initializer=_prepare) for _ in range(count)]
        self._folder = ExitStack()
        self._path = self._folder.enter_context(temporary_folder("ranks"))
        self._meetings = 0

    def __enter__(self):
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
        self._folder.close()

    def meet(self, work: Callable[..., object], *args: object) -> list:
        """work(store, rank, *args) inside every rank; what each gave, in the order of the ranks."""
        self._meetings += 1
        meeting = str(self._path / str(self._meetings))
        running = [
            pool.submit(_as_rank, work, meeting, self.count, rank, args)
            for rank, pool in enumerate(self._pools)
        ]
        for ended in as_completed(running, timeout=240):
            if ended.exception() is not None:
                for process in (process for pool in self._pools for process in pool._processes.values()):
                    process.kill()
                raise ended.exception()
        return [future.result() for future in running]


def _prepare() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _as_rank(work, meeting, count, rank, args):
    try:
        return work(FileStore(meeting, count), rank, *args)
    finally:
        # What a test built refers to its groups, whose threads wake up a hundred times a second each.
        gc.collect()

"""Engine and trainer that take turns on one set of devices.

engine    play | release                       resume weights | new weights | resume kv_cache | play
trainer        | onload, score, update | offload              | publish     |

A checkpoint is copied in a turn of the trainer of its own, after which the served version is sent again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Self

from agentrl.runtime.activity import set_engine_released
from agentrl.runtime.clocks import Waits
from agentrl.trainer.config import TrainerConfig
from agentrl.types.seams import Engine, MemoryTag, Trainer, WeightSink

WEIGHTS: MemoryTag = "weights"
CACHE: MemoryTag = "kv_cache"


@dataclass(slots=True)
class Colocation:
    """The turns of an iteration. Without `offload_rollout` and `offload_train` its blocks do nothing.

    engine: None = nothing plays. sink: of its weights. trainer: None = it starts in its first turn.
    offload_rollout: the engine frees weights and cache in the trainer's turn; episodes in flight stop between
    two tokens, and go on in the engine's turn. offload_train: the trainer frees its memory in the engine's.
    absence: from the engine's release to its next turn.
    """

    engine: Engine | None = None
    sink: WeightSink | None = None
    trainer: Trainer | None = None
    offload_rollout: bool = False
    offload_train: bool = False
    absence: Waits = field(default_factory=Waits)
    _metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TrainerConfig, engine: Engine | None, sink: WeightSink | None) -> Self:
        """As configured; the trainer is set when it has started. Without an engine there are no turns."""
        if engine is None:
            return cls()
        return cls(engine, sink, offload_rollout=config.offloads_rollout, offload_train=config.offloads_train)

    @asynccontextmanager
    async def starting(self, version: int) -> AsyncIterator[None]:
        """A first turn of the trainer: the block starts it, and sets `trainer`.

        version: of its weights, which are then published; 0 = the engine has opened the very weights.

        Raises:
            EngineError: the engine cannot release memory, or rejected the weights.
            TrainerError: a rank failed.
        """
        async with self.training():
            yield
        async with self.publishing(sends=bool(version)):
            if version and self.trainer is not None and self.sink is not None:
                await self.trainer.publish(self.sink, version=version)
        self.take_metrics()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer's turn; the engine's begins with `publishing`.

        Raises:
            EngineError: the engine cannot release memory.
            TrainerError: a rank failed.
        """
        with self._timed():
            if self.offload_rollout and self.engine is not None:
                self.absence.leave()
                self._count("rollout_bytes", await self.engine.release_memory((WEIGHTS, CACHE)))
                set_engine_released(True)
            if self.offload_train and self.trainer is not None:
                self._count("train_free_bytes", await self.trainer.onload())
        yield

    @asynccontextmanager
    async def publishing(self, *, sends: bool) -> AsyncIterator[None]:
        """The engine's turn, after a block in which new weights are published.

        sends: whether the block publishes weights. Where it does not, the served version is sent again: the
        engine has lost its weights, and the trainer's are the same.

        Raises:
            EngineError: the engine cannot resume its memory, or rejected the weights.
            TrainerError: a rank failed.
        """
        with self._timed():
            if self.offload_train and self.trainer is not None:
                self._count("train_bytes", await self.trainer.offload())
            if self.offload_rollout and self.engine is not None:
                await self.engine.resume_memory((WEIGHTS,))
        yield
        if not self.offload_rollout or self.engine is None:
            return
        with self._timed():
            if not sends and self.trainer is not None and self.sink is not None:
                await self.trainer.publish(self.sink, version=self.engine.version)
            await self.engine.resume_memory((CACHE,))
            set_engine_released(False)
            self.absence.come_back()

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """A turn of the trainer for a checkpoint: to be copied, its state needs the memory of a step.

        Raises:
            EngineError: the engine cannot release or resume its memory.
            TrainerError: a rank failed.
        """
        if not (self.offload_rollout and self.offload_train):
            yield
            return
        async with self.training():
            yield
        async with self.publishing(sends=False):
            pass

    def take_metrics(self) -> dict[str, float]:
        """The metrics since the last call; none where nothing is offloaded."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _count(self, name: str, value: int | None) -> None:
        if value is not None:
            self._metrics[f"perf/offload_{name}"] = float(value)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.offload_rollout or self.offload_train:
            seconds = time.perf_counter() - started
            self._metrics["perf/offload_time"] = self._metrics.get("perf/offload_time", 0.0) + seconds

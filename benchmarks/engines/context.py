"""The servers and models of the benchmark: each server is stopped when its block or this process ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentrl.engine.sglang.launch import ServerReplicas, Servers, ServerSettings, Value
from agentrl.engine.sglang.launch.listener import Listener, free_ports
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER
from agentrl.types import JSON
from agentrl.weights.hf.export import save_model
from benchmarks.engines import canned
from benchmarks.engines.settings import EngineSettings
from benchmarks.machine import interpreter_versions

SGLANG_PACKAGES = ("sglang", "sglang-router", "torch", "transformers")
SINGLE_THREADED = {"OMP_NUM_THREADS": "1"}
_SERVED_S = 120.0
_CANNED_S = 30.0


class ResultRow(NamedTuple):
    """A line of the summary, and its figures."""

    name: str
    line: str
    figures: dict[str, JSON]


@dataclass(frozen=True, slots=True)
class EngineContext:
    """python: the interpreter that SGLang is installed for. folder: for models and logs.

    on_event: called with a message for each step.
    """

    python: Path
    folder: Path
    settings: EngineSettings
    on_event: Callable[[str], None]

    @asynccontextmanager
    async def sglang(self, model: Path, *, count: int = 1, **arguments: Value) -> AsyncIterator[Servers]:
        """SGLang servers on the CPU, one thread each, with a router where there are several.

        Raises:
            ConfigError: the interpreter has no SGLang.
            EngineUnavailableError: a server does not start.
        """
        settings = ServerSettings(
            model=model,
            log_folder=model.parent,
            device="cpu",
            arguments={"custom_weight_loader": [LOADER], **arguments},
            python=self.python,
            python_path=(LOADER_FOLDER,),
            environment=SINGLE_THREADED,
        )
        async with Servers(ServerReplicas(settings, count=count), on_event=self.on_event) as servers:
            yield servers

    async def versions(self) -> dict[str, JSON]:
        """The versions of SGLang's interpreter and packages.

        Raises:
            ConfigError: it cannot be run, or has no SGLang.
        """
        remedy = (
            "name the interpreter that it is installed for with --sglang-python, or install one with "
            "`make sglang-cpu`."
        )
        return await interpreter_versions(self.python, "SGLang", SGLANG_PACKAGES, remedy)


class EmbeddedServer(Listener):
    """`agentrl serve` as a process of its own, one thread."""

    def __init__(self, model: Path, *, slots: int, context_len: int) -> None:
        super().__init__("agentrl-serve", free_ports(1)[0], model.parent)
        self._arguments = [str(model), "--port", str(self.port), "--num-threads", "1"]
        self._arguments += ["--max-slots", str(slots), "--max-context-len", str(context_len)]

    async def start(self) -> None:
        """See `Listener.start`."""
        command = [sys.executable, "-m", "agentrl.cli", "serve", *self._arguments]
        await self._start_process(command, {**os.environ, **SINGLE_THREADED}, grace_s=1.0, within_s=_SERVED_S)


class StubServer(Listener):
    """The stub server of `canned`."""

    role = "regular"

    def __init__(self, folder: Path, tokens: int) -> None:
        super().__init__("canned", free_ports(1)[0], folder)
        self._tokens = tokens

    async def start(self) -> None:
        """See `Listener.start`."""
        command = [sys.executable, "-I", "-S", str(Path(canned.__file__)), str(self.port), str(self._tokens)]
        await self._start_process(command, dict(os.environ), grace_s=1.0, within_s=_CANNED_S)


@asynccontextmanager
async def up(listener: Listener) -> AsyncIterator[str]:
    """Run a server during the block; yields its address."""
    try:
        await listener.start()
        yield listener.url
    finally:
        await listener.stop()


def seeded(make: Callable[[], PreTrainedModel], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with reproducible random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make()
    network.eval()
    # Module.to is wrapped by transformers in a way that hides its signature from type checkers.
    nn.Module.to(network, dtype)
    return network


def save(network: PreTrainedModel, folder: Path) -> Path:
    """Write a model directory, with the tokenizer of `tokenizer_of`."""
    save_model(network, tokenizer_of(network), str(folder))
    return folder


def tokenizer_of(network: PreTrainedModel) -> PreTrainedTokenizerFast:
    """One word for each token of a model, and no end of text."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size(network))}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    longest = int(network.config.max_position_embeddings)
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=longest)


def vocab_size(network: PreTrainedModel) -> int:
    """The size of a model's vocabulary."""
    return int(network.config.vocab_size)


async def at_once(send: Callable[[int], Coroutine[None, None, None]], count: int, concurrency: int) -> None:
    """Send `count` requests, `concurrency` at a time; each caller sends its next one without a pause."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await send(number)

    await asyncio.gather(*(caller() for _ in range(min(concurrency, count))))


def spread(figures: Sequence[float], median: float) -> float:
    """max - min, over the median."""
    return (max(figures) - min(figures)) / median


def listed(figures: Sequence[float]) -> list[JSON]:
    """Figures as JSON."""
    return cast(list[JSON], list(figures))

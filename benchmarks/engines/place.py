"""Where and how servers are started for the benchmark: each is gone when its block ends, or we do."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentrl.checkpoints.saving import save_model
from agentrl.engine.sglang.launch import ServerReplicas, Servers, ServerSettings, Value
from agentrl.engine.sglang.launch.listener import Listener, free_ports
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER
from agentrl.errors import ConfigError
from agentrl.types import JSON
from benchmarks.engines import canned
from benchmarks.engines.settings import Settings

SGLANG_PACKAGES = ("sglang", "sglang-router", "torch", "transformers")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_SERVED_S = 120.0
_CANNED_S = 30.0


class Row(NamedTuple):
    """A line of the summary, and what stands behind it."""

    name: str
    line: str
    figures: dict[str, JSON]


@dataclass(frozen=True, slots=True)
class Place:
    """python: the interpreter that SGLang is installed for. folder: for models and logs.

    on_event: gets a sentence for each step.
    """

    python: Path
    folder: Path
    settings: Settings
    on_event: Callable[[str], None]

    @asynccontextmanager
    async def sglang(self, model: Path, *, count: int = 1, **arguments: Value) -> AsyncIterator[Servers]:
        """SGLang servers on the CPU, one thread each, and a router before several.

        Raises:
            ConfigError: the interpreter has no SGLang.
            EngineUnavailableError: a server does not come up.
        """
        settings = ServerSettings(
            model=model,
            log_folder=model.parent,
            device="cpu",
            arguments={"custom_weight_loader": [LOADER], **arguments},
            python=self.python,
            python_path=(LOADER_FOLDER,),
            environment=ONE_THREAD,
        )
        async with Servers(ServerReplicas(settings, count=count), on_event=self.on_event) as servers:
            yield servers

    async def versions(self) -> dict[str, JSON]:
        """The versions of what SGLang's interpreter runs.

        Raises:
            ConfigError: it cannot be run, or has no SGLang.
        """
        code = (
            "import json, platform; from importlib.metadata import distributions\n"
            "found = {one.metadata['Name'].lower(): one.version for one in distributions()}\n"
            "print(json.dumps({**found, 'python': platform.python_version()}))"
        )
        try:
            process = await asyncio.create_subprocess_exec(
                self.python, "-c", code, stdout=PIPE, stderr=DEVNULL, stdin=DEVNULL
            )
        except OSError as error:
            raise ConfigError(_no_sglang(self.python, str(error.strerror))) from error
        out, _ = await process.communicate()
        found: dict[str, JSON] = json.loads(out) if process.returncode == 0 else {}
        if missing := [name for name in SGLANG_PACKAGES if name not in found]:
            raise ConfigError(_no_sglang(self.python, f"it lacks {', '.join(missing)}"))
        return {name: found[name] for name in ("python", *SGLANG_PACKAGES)}


def _no_sglang(python: Path, why: str) -> str:
    return (
        f"{python} does not run SGLang ({why}); name the interpreter that it is installed for with "
        "--sglang-python, or install one with `make sglang-cpu`."
    )


class Served(Listener):
    """`agentrl serve` as a process of its own, one thread."""

    def __init__(self, model: Path, *, slots: int, context_len: int) -> None:
        super().__init__("agentrl-serve", free_ports(1)[0], model.parent)
        self._words = [str(model), "--port", str(self.port), "--num-threads", "1"]
        self._words += ["--max-slots", str(slots), "--max-context-len", str(context_len)]

    async def start(self) -> None:
        """See `Listener.start`."""
        command = [sys.executable, "-m", "agentrl.cli", "serve", *self._words]
        await self._start_process(command, {**os.environ, **ONE_THREAD}, grace_s=1.0, within_s=_SERVED_S)


class Canned(Listener):
    """The server that costs little."""

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
    """Start a process, and end it with the block; gives its address."""
    try:
        await listener.start()
        yield listener.url
    finally:
        await listener.stop()


def seeded(make: Callable[[], PreTrainedModel], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with the same random weights every time."""
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
    """How many tokens a model knows."""
    return int(network.config.vocab_size)


async def at_once(ask: Callable[[int], Coroutine[None, None, None]], count: int, concurrency: int) -> None:
    """Ask `count` times, so many at a time; whoever has an answer asks again at once."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*(caller() for _ in range(min(concurrency, count))))


def spread(figures: Sequence[float], median: float) -> float:
    """max - min, over the median."""
    return (max(figures) - min(figures)) / median


def listed(figures: Sequence[float]) -> list[JSON]:
    """Figures as JSON."""
    return cast(list[JSON], list(figures))

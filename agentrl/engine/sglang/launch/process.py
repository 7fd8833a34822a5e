"""One SGLang server as a subprocess."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from agentrl.engine.config import CPU_DTYPE, GPU_DTYPE, HALF_ONLY, Role, is_too_wide
from agentrl.engine.sglang import inside
from agentrl.engine.sglang.launch.arguments import Arguments, Value, installed
from agentrl.engine.sglang.launch.listener import HOST, PORT_OFFSET, Listener, free_ports, url_of
from agentrl.errors import ConfigError, EngineUnavailableError
from agentrl.processes.gpus import NO_GPU, VARIABLE
from agentrl.processes.interfaces import interface_variables
from agentrl.records.gpu_memory import held_text, is_out_of_memory
from agentrl.runtime.files import compiler_caches

# On SIGTERM, SGLang waits for its requests, which are abandoned by then, and then 5 s for its GPUs.
GRACE_S = 1.0
_KEY_VARIABLE, _KEY_MODULE = "AGENTRL_SERVER_KEY", "agentrl_sglang_key"
_KEY_FOLDER = Path(inside.__file__).parent
_LAST_PORT = 65_535 - PORT_OFFSET
_PORT_IS_TAKEN = "EADDRINUSE"
# The names of one argument in SGLang's versions, the newest first.
_GRAPH_SIZES = ("cuda_graph_max_bs_decode", "cuda_graph_max_bs")
_MOST_GRAPHS = 512
# A log line for every request costs time and disk space. With metrics a reply says what the request took.
_EVERY: Mapping[str, Value] = {"log_level_http": "warning", "enable_metrics": True}
_METRICS = "PROMETHEUS_MULTIPROC_DIR"
GPU_DEFAULTS: Mapping[str, Value] = {**_EVERY, "dtype": GPU_DTYPE}
"""The default arguments of servers on GPUs."""
CPU_DEFAULTS: Mapping[str, Value] = {
    **_EVERY,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "dtype": CPU_DTYPE,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 20_000,
}
"""The default arguments of servers on a CPU, with a cache of 20,000 tokens."""


class ServerPart(NamedTuple):
    """The part of a server on one of its machines, from 0. host, port: where the parts meet, on the first;
    port: None = a free one there."""

    rank: int
    host: str
    port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The start settings of servers.

    model: the directory of the model. log_folder: of a log file for each. role: the stages that they run.
    python: the interpreter that SGLang is installed for. python_path: directories that it searches first.
    arguments: SGLang's own, by their names; GPU_DEFAULTS or CPU_DEFAULTS apply to those left
    out.
    environment: variables, in addition to those of this process.
    first_wait_s: how long a server may take to be healthy (seconds).
    rendezvous_host: where the process group that sends them weights meets; None = on this machine.
    host: the address that they listen at. key: every request but those of their health must have it as
    `Authorization: Bearer KEY`; None = they ask for none.
    max_in_flight: the requests that a server may get at once (count); None = that is not known.
    router: arguments of the router before several of them, by their names.
    machines: that each server is spread over (count). part: of one on several; the first serves requests.

    Raises:
        ConfigError: they would compute in float32 on GPUs.
    """

    model: Path
    log_folder: Path
    role: Role = "regular"
    device: Literal["cpu", "cuda"] = "cuda"
    arguments: Mapping[str, Value] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    python_path: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    first_wait_s: float = 600.0
    rendezvous_host: str | None = None
    host: str = HOST
    key: str | None = field(default=None, repr=False)
    max_in_flight: int | None = None
    router: Mapping[str, Value] = field(default_factory=dict)
    machines: int = 1
    part: ServerPart | None = None

    def sizes(self, available: Arguments) -> dict[str, Value]:
        """How many requests a server on a GPU runs, and has CUDA graphs for, where `arguments` do not say so.

        Without these SGLang takes numbers of its own for the GPU: more graphs than can be used cost seconds
        of each start and memory, and larger batches than have graphs are slow.
        """
        number = self.max_in_flight
        if number is None or self.device == "cpu" or self.role == "prefill":
            return {}
        chosen = {name.removeprefix("--").replace("-", "_"): value for name, value in self.arguments.items()}
        limit = chosen.get("max_running_requests", number)
        sizes: dict[str, Value] = {"max_running_requests": number}
        name = next(filter(available.has, _GRAPH_SIZES), None)
        if name is not None and isinstance(limit, int) and not any("cuda_graph" in name for name in chosen):
            sizes[name] = min(limit, _MOST_GRAPHS)
        return sizes

    def __post_init__(self) -> None:
        """Refuse what no server starts with."""
        if is_too_wide(self.arguments, on_gpu=self.device == "cuda"):
            raise ConfigError(HALF_ONLY)

    def environment_of(self, gpus: Sequence[str]) -> dict[str, str]:
        """All variables of a server on `gpus`; none: on the GPUs that this process can use, or on the CPU."""
        # Servers use no Ray, and its token is a secret.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        # The working directory of this process must not provide modules to servers.
        variables["PYTHONSAFEPATH"] = "1"
        variables["PYTHONUNBUFFERED"] = "1"
        variables.update(compiler_caches(variables))
        if self.device == "cpu":
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
            variables.setdefault("OMP_NUM_THREADS", "1")
            variables |= NO_GPU
        if self.rendezvous_host is not None:
            variables = {**interface_variables(self.rendezvous_host), **variables}
        if gpus:
            variables[VARIABLE] = ",".join(gpus)
        python_path = self.python_path if self.key is None else (*self.python_path, _KEY_FOLDER)
        folders = [str(folder.absolute()) for folder in python_path]
        folders += filter(None, [variables.get("PYTHONPATH")])
        if folders:
            variables["PYTHONPATH"] = os.pathsep.join(folders)
        variables.update(self.environment)
        if self.key is not None:
            variables[_KEY_VARIABLE] = self.key
        return variables


def parts_of(settings: ServerSettings, host: str, port: int | None = None) -> list[ServerSettings]:
    """The settings of each part of a server, which meet on the first machine; of one on one machine, its own.

    host, port: see `ServerPart`.
    """
    if settings.machines == 1:
        return [settings]
    return [replace(settings, part=ServerPart(rank, host, port)) for rank in range(settings.machines)]


class ServerProcess(Listener):
    """An SGLang server, or its part on one of several machines.

    meeting_port: where the parts meet; None = it is on one machine.

    port: None = a free one. gpus: its GPUs, as in CUDA_VISIBLE_DEVICES; none: those that this process can
    use.

    Raises:
        ConfigError: a port that SGLang cannot use.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        name: str = "server-0",
        port: int | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        host = settings.host
        port = free_ports(1, host)[0] if port is None else port
        super().__init__(name, port, settings.log_folder, host)
        if not 0 < self.port <= _LAST_PORT:
            raise ConfigError(f"port {self.port} cannot be a server's; choose one from 1 to {_LAST_PORT}.")
        self.settings = settings
        self.gpus = tuple(gpus)
        self.bootstrap_port = free_ports(1, host)[0] if settings.role == "prefill" else None
        part = settings.part
        self.meeting_port = None if part is None else part.port or free_ports(1, part.host)[0]

    @property
    def role(self) -> Role:
        """The stages of a request that it runs."""
        return self.settings.role

    @property
    def key(self) -> str | None:
        """The key that it asks for; None = none."""
        return self.settings.key

    async def check(self) -> None:
        """Check its arguments, before it is started.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
        """
        await self.command()

    async def command(self) -> list[str]:
        """The command line that starts it, with arguments that the installed version accepts.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
        """
        available = await installed(self.settings.python, self.settings.environment_of(self.gpus))
        defaults = CPU_DEFAULTS if self.settings.device == "cpu" else GPU_DEFAULTS
        ours = {
            "--model-path": str(self.settings.model.absolute()),
            "--host": self.host,
            "--port": str(self.port),
            "--device": self.settings.device,
            "--weight-version": "0",
        }
        if self.role != "regular":
            ours["--disaggregation-mode"] = self.role
        if self.bootstrap_port is not None:
            ours["--disaggregation-bootstrap-port"] = str(self.bootstrap_port)
        if (part := self.settings.part) is not None:
            meeting = url_of(part.host, self.meeting_port or 0).partition("//")[2]
            ours |= {"--nnodes": str(self.settings.machines), "--node-rank": str(part.rank)}
            ours["--dist-init-addr"] = meeting
        command_line = [word for pair in ours.items() for word in pair]
        defaults = {**defaults, **self.settings.sizes(available)}
        command_line += available.command_line(self.settings.arguments, defaults)
        module = "sglang.launch_server" if self.key is None else _KEY_MODULE
        return [str(self.settings.python.absolute()), "-m", module, *command_line]

    async def start(self) -> None:
        """Start or restart it, and wait until it is healthy. On interruption it is stopped.

        It is started once more where a port of SGLang's choice was taken before SGLang bound it.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
            EngineUnavailableError: it ended, or was not healthy after first_wait_s; with the last lines of
                its log.
        """
        command = await self.command()
        try:
            await self._start_once(command)
        except EngineUnavailableError as error:
            if is_out_of_memory(self.log_tail()) and (held := held_text()):
                raise EngineUnavailableError(
                    f"{self.name} found too little memory on its GPU ({held}); lower what others take there "
                    f"(max_tokens_per_gpu of ranks), or set mem_fraction_static; {self.log_tail()}"
                ) from error
            # SGLang chooses further ports seconds before it binds them, among those of outgoing connections.
            if _PORT_IS_TAKEN not in self.log_tail():
                raise
            await self._start_once(command)

    async def stop(self) -> None:
        """Stop it and all its children, and wait for their end. Does nothing where it does not run."""
        await super().stop()
        await asyncio.to_thread(shutil.rmtree, self._metrics, ignore_errors=True)

    @property
    def _metrics(self) -> Path:
        """The folder of its metrics, while it runs: left to itself, SGLang leaves one behind at each kill."""
        return self.log.with_suffix(".metrics")

    async def _start_once(self, command: Sequence[str]) -> None:
        variables, within_s = self.settings.environment_of(self.gpus), self.settings.first_wait_s
        await self.stop()
        if "--enable-metrics" in command:
            # Where it cannot be made, the log cannot either, and that is the error.
            with suppress(OSError):
                self._metrics.mkdir(parents=True, exist_ok=True)
            variables[_METRICS] = str(self._metrics.absolute())
        await self._start_process(command, variables, grace_s=GRACE_S, within_s=within_s)

"""One SGLang server as a subprocess."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentrl.engine.config import Role
from agentrl.engine.sglang.launch.arguments import Value, installed
from agentrl.engine.sglang.launch.listener import HOST, PORT_OFFSET, Listener, free_ports
from agentrl.errors import ConfigError

# On SIGTERM, SGLang waits for its requests, which are abandoned by then, and then 5 s for its GPUs.
GRACE_S = 1.0
_LAST_PORT = 65_535 - PORT_OFFSET
# A log line for every request costs time and disk space.
DEFAULTS: Mapping[str, Value] = {"log_level_http": "warning"}
"""The default arguments of every server."""
CPU_DEFAULTS: Mapping[str, Value] = {
    **DEFAULTS,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "dtype": "float32",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 20_000,
}
"""The default arguments of servers on a CPU, with a cache of 20,000 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The start settings of servers.

    model: the directory of the model. log_folder: of a log file for each. role: the stages that they run.
    python: the interpreter that SGLang is installed for. python_path: directories that it searches first.
    arguments: SGLang's own, by their names; DEFAULTS or CPU_DEFAULTS apply to those left out.
    environment: variables, in addition to those of this process.
    first_wait_s: how long a server may take to be healthy (seconds).
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

    def environment_of(self, gpus: Sequence[str]) -> dict[str, str]:
        """All variables of a server on `gpus`; none: on the GPUs that this process can use."""
        variables = dict(os.environ)
        # The working directory of this process must not provide modules to servers.
        variables["PYTHONSAFEPATH"] = "1"
        variables["PYTHONUNBUFFERED"] = "1"
        if self.device == "cpu":
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
            variables.setdefault("OMP_NUM_THREADS", "1")
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        folders = [str(folder.absolute()) for folder in self.python_path]
        folders += filter(None, [variables.get("PYTHONPATH")])
        if folders:
            variables["PYTHONPATH"] = os.pathsep.join(folders)
        variables.update(self.environment)
        return variables


class ServerProcess(Listener):
    """An SGLang server.

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
        super().__init__(name, free_ports(1)[0] if port is None else port, settings.log_folder)
        if not 0 < self.port <= _LAST_PORT:
            raise ConfigError(f"port {self.port} cannot be a server's; choose one from 1 to {_LAST_PORT}.")
        self.settings = settings
        self.gpus = tuple(gpus)
        self.bootstrap_port = free_ports(1)[0] if settings.role == "prefill" else None

    @property
    def role(self) -> Role:
        """The stages of a request that it runs."""
        return self.settings.role

    async def command(self) -> list[str]:
        """The command line that starts it, with arguments that the installed version accepts.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
        """
        available = await installed(self.settings.python, self.settings.environment_of(self.gpus))
        defaults = CPU_DEFAULTS if self.settings.device == "cpu" else DEFAULTS
        ours = {
            "--model-path": str(self.settings.model.absolute()),
            "--host": HOST,
            "--port": str(self.port),
            "--device": self.settings.device,
            "--weight-version": "0",
        }
        if self.role != "regular":
            ours["--disaggregation-mode"] = self.role
        if self.bootstrap_port is not None:
            ours["--disaggregation-bootstrap-port"] = str(self.bootstrap_port)
        command_line = [part for pair in ours.items() for part in pair]
        command_line += available.command_line(self.settings.arguments, defaults)
        return [str(self.settings.python.absolute()), "-m", "sglang.launch_server", *command_line]

    async def start(self) -> None:
        """Start or restart it, and wait until it is healthy. On interruption it is stopped.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
            EngineUnavailableError: it ended, or was not healthy after first_wait_s; with the last lines of
                its log.
        """
        await self._start_process(
            await self.command(),
            self.settings.environment_of(self.gpus),
            grace_s=GRACE_S,
            within_s=self.settings.first_wait_s,
        )

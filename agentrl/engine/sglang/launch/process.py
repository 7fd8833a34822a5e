"""One SGLang server as a process of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentrl.engine.config import Role
from agentrl.engine.sglang.launch.arguments import Value, installed
from agentrl.engine.sglang.launch.listener import ABOVE, HOST, Listener, free_ports
from agentrl.errors import ConfigError

# Asked to end, SGLang waits for its requests, which nobody wants any more, and then 5 s for its GPUs.
GRACE_S = 1.0
_LAST_PORT = 65_535 - ABOVE
# A line for every request costs time and room.
DEFAULTS: Mapping[str, Value] = {"log_level_http": "warning"}
"""Arguments of every server, where nobody says otherwise."""
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
"""Those of servers on a CPU: what SGLang needs there, and memory for 20,000 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How servers are started.

    model: the folder that they load. log_folder: gets a log file for each. role: what they do.
    python: the interpreter that SGLang is installed for. python_path: folders that it searches first.
    arguments: SGLang's own, by their names; where there are none, DEFAULTS or CPU_DEFAULTS.
    environment: variables, beside those of this process.
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
        """All variables of a server that computes on `gpus`; none: on those that this process sees."""
        told = dict(os.environ)
        # The folder that we happen to be in holds no modules for servers.
        told["PYTHONSAFEPATH"] = "1"
        told["PYTHONUNBUFFERED"] = "1"
        if self.device == "cpu":
            told["SGLANG_USE_CPU_ENGINE"] = "1"
            told.setdefault("OMP_NUM_THREADS", "1")
        if gpus:
            told["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        folders = [str(folder.absolute()) for folder in self.python_path]
        folders += filter(None, [told.get("PYTHONPATH")])
        if folders:
            told["PYTHONPATH"] = os.pathsep.join(folders)
        told.update(self.environment)
        return told


class ServerProcess(Listener):
    """An SGLang server.

    port: None = one that is free. gpus: those that it computes on, as CUDA_VISIBLE_DEVICES names them; none:
    those that this process sees.

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
        """What it does."""
        return self.settings.role

    async def command(self) -> list[str]:
        """The command line that starts it, with arguments that the installed version takes.

        Raises:
            ConfigError: the interpreter, or an argument.
        """
        known = await installed(self.settings.python, self.settings.environment_of(self.gpus))
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
        words = [word for pair in ours.items() for word in pair]
        words += known.words(self.settings.arguments, defaults)
        return [str(self.settings.python.absolute()), "-m", "sglang.launch_server", *words]

    async def start(self) -> None:
        """Start it, again where it runs, and wait until it is healthy. Interrupted, it leaves nothing.

        Raises:
            ConfigError: the interpreter, or an argument.
            EngineUnavailableError: it ended, or was not healthy after first_wait_s; with the last lines of
                its log.
        """
        await self._bring_up(
            await self.command(),
            self.settings.environment_of(self.gpus),
            grace_s=GRACE_S,
            within_s=self.settings.first_wait_s,
        )

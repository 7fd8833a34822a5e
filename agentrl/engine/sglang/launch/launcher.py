"""Where servers run: on this machine, as guarded programs, or elsewhere, behind the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from agentrl.engine.config import Role
from agentrl.engine.sglang.launch.listener import HOST, free_ports
from agentrl.engine.sglang.launch.process import ServerProcess, ServerSettings
from agentrl.engine.sglang.processes import Process, Program


class Handle(Program, Protocol):
    """A program that this process has started.

    log: on this machine. It ends with this process, also where that is killed, and so do all its children.
    """

    name: str
    log: Path

    def terminate(self) -> None:
        """Begin to end it, without waiting."""


class ServerHandle(Handle, Process, Protocol):
    """A server, on any machine.

    bootstrap_port: of one that prefills, on its machine; None = it has none.
    """

    bootstrap_port: int | None

    @property
    def role(self) -> Role:
        """The stages of a request that it runs."""

    @property
    def key(self) -> str | None:
        """The key that it asks for; None = none."""

    async def check(self) -> None:
        """Check its arguments where it runs, before it is started.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
            EngineUnavailableError: its machine cannot be reached.
        """


class ServerReplica(NamedTuple):
    """A server to be. gpus: as in CUDA_VISIBLE_DEVICES; none: those of this process, or of its place."""

    name: str
    settings: ServerSettings
    gpus: Sequence[str] = ()


class Launcher(Protocol):
    """Makes the servers of one fleet, each in its place; it starts none.

    host: an address of this machine that its servers reach, and the ranks that send them weights: loopback
    where all of these run here. is_local: whether the servers do. router_host: where their router listens, on
    this machine: on loopback, unless players elsewhere send requests. key: of the servers that do not listen
    on loopback, and of such a router; None = all do.
    """

    host: str
    router_host: str
    is_local: bool
    key: str | None

    def servers(self, replicas: Sequence[ServerReplica]) -> tuple[ServerHandle, ...]:
        """The servers, in order."""


class LocalLauncher:
    """Runs servers on this machine, on its loopback address.

    gpus: those of each server, in order, as in CUDA_VISIBLE_DEVICES; left out, those of its replica.
    """

    host: str = HOST
    router_host: str = HOST
    is_local: bool = True
    key: str | None = None

    def __init__(self, gpus: Sequence[Sequence[str]] = ()) -> None:
        self._gpus = gpus

    def servers(self, replicas: Sequence[ServerReplica]) -> tuple[ServerProcess, ...]:
        """The servers, in order, each with a free port."""
        ports, gpus = free_ports(len(replicas)), self._gpus or [replica.gpus for replica in replicas]
        return tuple(
            ServerProcess(settings, name=name, port=port, gpus=own)
            for (name, settings, _), port, own in zip(replicas, ports, gpus, strict=True)
        )

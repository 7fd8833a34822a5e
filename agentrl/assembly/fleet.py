"""From the configuration to SGLang servers as one engine: started by the run, or running already."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from agentrl.assembly.addresses import Addresses
from agentrl.checkpoints.streaming import deliver_directory
from agentrl.engine.config import EngineConfig, ServedModel, ServerGroup
from agentrl.engine.served.config import control_headers
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import ExternalServer
from agentrl.engine.sglang.fleet import Fleet, Health, Process, Router
from agentrl.engine.sglang.launch import ServerProcess, ServerReplicas, Servers, ServerSettings, Value
from agentrl.engine.sglang.request import Decode
from agentrl.engine.sglang.transports import Transport
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError
from agentrl.gpus import own_gpus
from agentrl.types import JSON

End: TypeAlias = Callable[[], Awaitable[None]]

_ATTEMPTS = 10  # before as many failed, another server has taken over, or requests are held
_FULL_EVERY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The settings of a fleet.

    model: the folder of the model that is served first. folder: for logs, and for weights in transfer.
    vocab_size, decode: of its tokenizer. on_event: called with a sentence whenever a server starts or ends.
    trained: whether it receives new weights. dtype: of the servers' computation, by torch's name; None =
    SGLang's choice. releases: whether their memory is released between two batches. first_gpu: index among
    this process's GPUs; those before it are in other use.
    """

    model: Path
    config: EngineConfig
    folder: Path
    on_event: Callable[[str], None]
    vocab_size: int | None = None
    decode: Decode | None = None
    trained: bool = True
    dtype: str | None = None
    releases: bool = False
    first_gpu: int = 0

    async def start(self) -> Fleet:
        """Start the servers of the configuration; `close` of the fleet ends them.

        Raises:
            ConfigError: SGLang is not installed or has no such argument, there are too few GPUs, or a server
                does not start.
        """
        async with AsyncExitStack() as stack:
            starting = Servers(*self._groups(), on_event=self.on_event)
            try:
                servers = await stack.enter_async_context(starting)
            except EngineUnavailableError as error:
                raise ConfigError(str(error)) from error
            policy = self._policy(servers.url)
            end = stack.pop_all().aclose
        return self._fleet(servers.servers, servers.router, policy, end, {})

    async def commands(self) -> list[list[str]]:
        """The command line of a server of each group, checked against the installed SGLang; none is started.

        Raises:
            ConfigError: SGLang is not installed, or has no such argument.
        """
        return [await ServerProcess(self._settings(group)).command() for group in self.config.groups]

    async def join(self, url: str) -> Fleet:
        """Use servers that run already, at `url` or behind the router there; sends them the model's weights.

        Control requests have the key of the environment variable AGENTRL_CONTROL_KEY, where it is set.

        Raises:
            ConfigError: no server answers, or the configured transport cannot send weights to it.
        """
        headers = control_headers()
        policy = self._policy(url)
        try:
            first_wait_s = self.config.rollout_health_check_first_wait
            servers = [ExternalServer(server, first_wait_s) for server in await policy.servers()]
            fleet = self._fleet(servers, None, policy, _leave_running, headers)
        except EngineError as error:
            await policy.close()
            raise ConfigError(str(error)) from error
        try:
            await deliver_directory(self.model, fleet.sink, 0)
        except EngineError as error:
            await fleet.close()
            raise ConfigError(str(error)) from error
        return fleet

    def _groups(self) -> list[ServerReplicas]:
        groups, first = [], self.first_gpu
        for group in self.config.groups:
            number = group.num_engines * self.config.gpus_of(group)
            groups.append(ServerReplicas(self._settings(group), group.num_engines, own_gpus(first, number)))
            first += number
        return groups

    def _settings(self, group: ServerGroup) -> ServerSettings:
        config, gpus = self.config, self.config.gpus_of(group)
        own: dict[str, Value] = {"custom_weight_loader": [LOADER]} if self.trained else {}
        if self.dtype is not None:
            own["dtype"] = self.dtype
        if gpus > 1:
            own["tp_size"] = gpus
        if gpus and self.releases:
            own["enable_memory_saver"] = True
        if config.max_context_len is not None:
            own["context_length"] = config.max_context_len
        return ServerSettings(
            model=self.model,
            log_folder=self.folder,
            role=group.worker_type,
            device="cuda" if gpus else "cpu",
            arguments={**own, **_values(config.sglang), **_values(group.sglang)},
            python=Path(config.sglang_python or sys.executable),
            python_path=(LOADER_FOLDER,),
            first_wait_s=config.rollout_health_check_first_wait,
        )

    def _policy(self, url: str) -> SGLangPolicy:
        return SGLangPolicy(
            url,
            max_concurrency=self.config.max_slots,
            adaptive=self.config.adaptive_concurrency,
            attempts=_ATTEMPTS,
            vocab_size=self.vocab_size,
            decode=self.decode,
            resend_lost=True,
        )

    def _fleet(
        self,
        servers: Sequence[Process],
        router: Router | None,
        policy: SGLangPolicy,
        end: End,
        headers: Mapping[str, str],
    ) -> Fleet:
        config = self.config
        health = Health(config.rollout_health_check_interval, config.rollout_health_check_timeout)
        transport = _transport(self.model, config, self.folder)
        return Fleet(servers, router, policy, transport, end, health, self.on_event, headers).watch()


async def _leave_running() -> None:
    """Do nothing: the run has not started these servers, and does not end them."""


def _values(arguments: Mapping[str, JSON]) -> dict[str, Value]:
    try:
        return TypeAdapter(dict[str, Value]).validate_python(arguments)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise ConfigError(
            f"SGLang's argument `{name}` is a number, a text, true, false or a list of them."
        ) from None


def _transport(model: Path, config: EngineConfig, folder: Path) -> Transport:
    """The configured transport.

    A process group uses gloo, also for servers with GPUs: it copies through the CPU's memory. Its rendezvous
    is at a loopback address, so its members are all on this machine, where servers use the GPUs from the
    first on. With NCCL this process would send from the first, and NCCL refuses two ranks on one GPU.
    """
    written = folder / "weights"
    match config.update_weights_transport:
        case "tensor":
            return SharedMemory()
        case "distributed":
            return Distributed(backend="gloo")
        case "disk":
            return Disk(written, model=model)
        case "delta":
            return Disk(written, model=model, full_every=_FULL_EVERY, mirror=folder / "weights-whole")


@asynccontextmanager
async def served_models(
    config: EngineConfig, folder: Path, on_event: Callable[[str], None]
) -> AsyncIterator[Addresses]:
    """The addresses of the run's models, by name; a server that ends is restarted at the same address.

    folder: for a folder of logs for each model. on_event: called with a sentence whenever a server starts or
    ends.

    Raises:
        ConfigError: a folder holds no model; there are too few GPUs; SGLang is not installed, has no such
            argument, or does not start.
    """
    addresses: dict[str, str] = {}
    first = config.num_policy_gpus
    # Too few GPUs are reported before the first model is started.
    own_gpus(first, config.num_gpus - first)
    async with AsyncExitStack() as stack:
        for name, model in config.sglang_models.items():
            fleet = await model_plan(config, name, folder, on_event, first_gpu=first).start()
            stack.push_async_callback(fleet.close)
            addresses[name] = fleet.url
            first += model.num_engines * model.num_gpus_per_engine
        yield addresses


def model_plan(
    config: EngineConfig, name: str, folder: Path, on_event: Callable[[str], None], *, first_gpu: int = 0
) -> FleetPlan:
    """The servers of one of the run's models, by its name; the other arguments as in `served_models`.

    Raises:
        ConfigError: its folder holds no model.
    """
    model = config.sglang_models[name]
    if not (Path(model.hf_checkpoint) / "config.json").is_file():
        raise ConfigError(
            f"sglang_models.{name}: {model.hf_checkpoint} holds no Hugging Face model; mend hf_checkpoint."
        )
    return FleetPlan(
        model=Path(model.hf_checkpoint),
        config=_config_of(config, model),
        folder=folder / name,
        on_event=partial(_prefixed, on_event, name),
        trained=False,
        first_gpu=first_gpu,
    )


def _config_of(config: EngineConfig, model: ServedModel) -> EngineConfig:
    group = ServerGroup(
        num_engines=model.num_engines, num_gpus_per_engine=model.num_gpus_per_engine, sglang=model.sglang
    )
    # Settings of the policy's servers do not apply to these.
    return config.model_copy(update={"sglang_groups": [group], "sglang": {}, "max_context_len": None})


def _prefixed(on_event: Callable[[str], None], name: str, event: str) -> None:
    on_event(f"{name}: {event}")

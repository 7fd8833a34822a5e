"""From the configuration to SGLang servers as one engine: those that a run starts, or that run already."""

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
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import ExternalServer
from agentrl.engine.sglang.fleet import Fleet, Health, Process, Router
from agentrl.engine.sglang.launch import ServerReplicas, Servers, ServerSettings, Value
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
    """What a fleet is made of.

    model: a folder with the model that is served first. folder: for logs, and for weights on their way.
    vocab_size, decode: of its tokenizer. on_event: gets a sentence whenever a server starts or ends.
    trained: it will be given new weights. dtype: what servers compute in, by torch's name; None = as SGLang
    chooses. first_gpu: of this process's GPUs; those before it are others'.
    """

    model: Path
    config: EngineConfig
    folder: Path
    on_event: Callable[[str], None]
    vocab_size: int | None = None
    decode: Decode | None = None
    trained: bool = True
    dtype: str | None = None
    first_gpu: int = 0

    async def start(self) -> Fleet:
        """Start the servers that a run asks for; `close` of the fleet ends them.

        Raises:
            ConfigError: an argument that SGLang does not know, no SGLang, too few GPUs, or a server does not
                come up.
        """
        async with AsyncExitStack() as stack:
            starting = Servers(*self._groups(), on_event=self.on_event)
            try:
                servers = await stack.enter_async_context(starting)
            except EngineUnavailableError as error:
                raise ConfigError(str(error)) from error
            policy = self._policy(servers.url)
            end = stack.pop_all().aclose
        return self._fleet(servers.servers, servers.router, policy, end)

    async def join(self, url: str) -> Fleet:
        """Feed servers that run already, at `url` or behind the router there; first the model's weights.

        Raises:
            ConfigError: nobody is there, or weights cannot be brought there in the way that was asked for.
        """
        policy = self._policy(url)
        try:
            first_wait_s = self.config.rollout_health_check_first_wait
            servers = [ExternalServer(server, first_wait_s) for server in await policy.servers()]
            fleet = self._fleet(servers, None, policy, _nothing)
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
        ours: dict[str, Value] = {"custom_weight_loader": [LOADER]} if self.trained else {}
        if self.dtype is not None:
            ours["dtype"] = self.dtype
        if gpus > 1:
            ours["tp_size"] = gpus
        if config.max_context_len is not None:
            ours["context_length"] = config.max_context_len
        return ServerSettings(
            model=self.model,
            log_folder=self.folder,
            role=group.worker_type,
            device="cuda" if gpus else "cpu",
            arguments={**ours, **_values(config.sglang), **_values(group.sglang)},
            python=Path(config.sglang_python or sys.executable),
            python_path=(LOADER_FOLDER,),
            first_wait_s=config.rollout_health_check_first_wait,
        )

    def _policy(self, url: str) -> SGLangPolicy:
        return SGLangPolicy(
            url,
            max_concurrency=self.config.max_slots,
            attempts=_ATTEMPTS,
            vocab_size=self.vocab_size,
            decode=self.decode,
            resend_lost=True,
        )

    def _fleet(
        self, servers: Sequence[Process], router: Router | None, policy: SGLangPolicy, end: End
    ) -> Fleet:
        config = self.config
        health = Health(config.rollout_health_check_interval, config.rollout_health_check_timeout)
        transport = _transport(self.model, config, self.folder)
        return Fleet(servers, router, policy, transport, end, health, self.on_event).watch()


async def _nothing() -> None:
    """Servers that somebody else started go on."""


def _values(arguments: Mapping[str, JSON]) -> dict[str, Value]:
    try:
        return TypeAdapter(dict[str, Value]).validate_python(arguments)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise ConfigError(
            f"SGLang's argument `{name}` is a number, a text, true, false or a list of them."
        ) from None


def _transport(model: Path, config: EngineConfig, folder: Path) -> Transport:
    """The way that was asked for.

    A process group is of gloo, also for servers with GPUs: it reaches them through the CPU's memory. It meets
    at a loopback address, so its members are all on this machine, where servers take the GPUs from the first
    on. With NCCL this process would send from the first, and NCCL refuses two ranks on one GPU.
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
    """The addresses of the run's models, by name; one that dies is started again at the same one.

    folder: gets one for each model, with logs. on_event: gets a sentence whenever a server starts or ends.

    Raises:
        ConfigError: a folder holds no model; there are too few GPUs; SGLang is not installed, knows no such
            argument, or does not come up.
    """
    addresses: dict[str, str] = {}
    first = sum(group.num_engines * config.gpus_of(group) for group in config.groups)
    models = config.sglang_models.values()
    # Too few are told of before the first model is started.
    own_gpus(first, sum(model.num_engines * model.num_gpus_per_engine for model in models))
    async with AsyncExitStack() as stack:
        for name, model in config.sglang_models.items():
            if not (Path(model.hf_checkpoint) / "config.json").is_file():
                raise ConfigError(
                    f"sglang_models.{name}: {model.hf_checkpoint} holds no Hugging Face model; mend "
                    "hf_checkpoint."
                )
            plan = FleetPlan(
                model=Path(model.hf_checkpoint),
                config=_alone(config, model),
                folder=folder / name,
                on_event=partial(_of_model, on_event, name),
                trained=False,
                first_gpu=first,
            )
            fleet = await plan.start()
            stack.push_async_callback(fleet.close)
            addresses[name] = fleet.url
            first += model.num_engines * model.num_gpus_per_engine
        yield addresses


def _alone(config: EngineConfig, model: ServedModel) -> EngineConfig:
    group = ServerGroup(
        num_engines=model.num_engines, num_gpus_per_engine=model.num_gpus_per_engine, sglang=model.sglang
    )
    # What is said of the policy's servers is not said of these.
    return config.model_copy(update={"sglang_groups": [group], "sglang": {}, "max_context_len": None})


def _of_model(on_event: Callable[[str], None], name: str, said: str) -> None:
    on_event(f"{name}: {said}")

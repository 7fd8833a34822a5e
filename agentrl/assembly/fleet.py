"""From the configuration to SGLang servers as one engine: started by the run, or running already."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.cluster import fleet_of_model, title_of
from agentrl.assembly.config import RunConfig
from agentrl.assembly.places import ProcessPlaces
from agentrl.assembly.rollout import staleness_policy
from agentrl.engine.config import EngineConfig, ServedModel, ServerGroup
from agentrl.engine.served.config import control_headers
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.client import AdapterChoice
from agentrl.engine.sglang.connection import servers_at
from agentrl.engine.sglang.control import ExternalServer
from agentrl.engine.sglang.fleet import Fleet, Health
from agentrl.engine.sglang.launch import (
    Launcher,
    LocalLauncher,
    RouterProcess,
    ServerProcess,
    ServerReplicas,
    Servers,
    ServerSettings,
    Value,
)
from agentrl.engine.sglang.launch.launcher import ServerHandle
from agentrl.engine.sglang.launch.listener import HOST, free_ports
from agentrl.engine.sglang.launch.process import parts_of
from agentrl.engine.sglang.launch.router import router_of
from agentrl.engine.sglang.processes import Process, Router
from agentrl.engine.sglang.request import Decode
from agentrl.engine.sglang.transports import Transport
from agentrl.engine.sglang.transports.cuda_ipc import CudaIpc
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER, plugin_folder
from agentrl.engine.sglang.transports.lora import LoraAdapters
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError, ModelLoadError
from agentrl.http.guarded import sent_with
from agentrl.processes.interfaces import address_to
from agentrl.runtime.activity import current_activities
from agentrl.types import JSON
from agentrl.weights.hf.export import whole_model
from agentrl.weights.hf.folders import base_folder, check_has_config
from agentrl.weights.hf.streaming import deliver_directory

End: TypeAlias = Callable[[], Awaitable[None]]

_ATTEMPTS = 10  # before as many failed, another server has taken over, or requests are held
_FULL_EVERY = 16


class ServedAdapters(NamedTuple):
    """The adapters that servers take in place of weights. keep, is_pinned: see `AdapterChoice`.

    rank, scale: of each. targets: the matrices that have some, as SGLang names them.
    """

    rank: int
    scale: float
    targets: Sequence[str]
    keep: int
    is_pinned: bool

    @classmethod
    def of(cls, config: RunConfig) -> ServedAdapters | None:
        """Those of a run; None = its servers take whole weights."""
        trainer, engine = config.trainer, config.engine
        if trainer.lora_rank is None or engine.update_weights_transport != "lora":
            return None
        chosen = [name.strip() for name in trainer.lora_target_modules.split(",")]
        targets = ["all"] if chosen == ["all-linear"] else chosen
        # An episode that began under the oldest of these may still be in flight.
        keep = staleness_policy(config.rollout).bound + 1
        return cls(trainer.lora_rank, trainer.lora_scale, targets, keep, engine.pin_policy_version)

    def arguments(self, *, on_gpu: bool) -> dict[str, Value]:
        """SGLang's arguments for them."""
        own: dict[str, Value] = {
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "lora-target-modules": self.targets,
            # Those that stay, and the model without adapters.
            "max_loras_per_batch": self.keep + 1,
        }
        return own if on_gpu else {**own, "lora_backend": "torch_native"}

    @property
    def choice(self) -> AdapterChoice:
        """Which one a request names."""
        return AdapterChoice(self.keep, is_pinned=self.is_pinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The settings of a fleet.

    model: the folder of the model that is served first. folder: for logs, and for weights in transfer.
    vocab_size, decode: of its tokenizer. on_event: called with a sentence whenever a server starts or ends.
    trained: whether it receives new weights. releases: whether their memory is released between two batches.
    max_in_flight: see `ServerSettings`. arguments: SGLang's, below those of the configuration. dtype: of all
    versions that are sent.
    launcher: has a place for each server; None = on this machine, with the GPUs that this process can use.
    title: before the names of servers, in the status of the run. adapters: None = weights are sent.
    """

    model: Path
    config: EngineConfig
    folder: Path
    on_event: Callable[[str], None]
    vocab_size: int | None = None
    decode: Decode | None = None
    trained: bool = True
    releases: bool = False
    max_in_flight: int | None = None
    arguments: Mapping[str, Value] = field(default_factory=dict)
    dtype: str = "float32"
    launcher: Launcher | None = None
    title: str = ""
    adapters: ServedAdapters | None = None

    async def start(self) -> Fleet:
        """Start the servers of the configuration; `close` of the fleet ends them.

        SGLang loads a whole model: adapters are merged into their base model in a folder of the fleet's.

        Raises:
            ConfigError: SGLang is not installed or has no such argument, there are too few GPUs, or a server
                does not start.
        """
        whole = await asyncio.to_thread(whole_model, self.model, self.folder / "model")
        if whole != self.model:
            return await replace(self, model=whole).start()
        async with AsyncExitStack() as stack:
            launcher: Launcher = self.launcher or LocalLauncher()
            # An impossible choice is refused before any server is started.
            reach = _Reach(launcher.host, launcher.is_local)
            transport = self._transport(reach)
            plugins = await asyncio.to_thread(
                plugin_folder, self.folder / "plugin", adapters=self.adapters is not None
            )
            starting = Servers(
                *self._groups(plugins), on_event=self.on_event, launcher=launcher, entered=self._enter
            )
            try:
                servers = await stack.enter_async_context(starting)
            except EngineUnavailableError as error:
                raise ConfigError(str(error)) from error
            headers = _bearer(launcher.key)
            policy = self._policy(servers.url, headers)
            end = stack.pop_all().aclose
        return self._fleet(servers.servers, servers.router, policy, transport, end, headers)

    async def commands(self) -> dict[str, list[str]]:
        """The command line of a server of each group, checked against the installed SGLang; none is started.

        Of one that is spread, those on each machine. That of a router is checked, too.

        Raises:
            ConfigError: SGLang is not installed, or has no such argument.
        """
        if self.config.has_router:
            await RouterProcess(self._settings(self.config.groups[0])).command()
        commands: dict[str, list[str]] = {}
        for number, group in enumerate(self.config.groups, start=1):
            parts = parts_of(self._settings(group), HOST, free_ports(1)[0])
            for rank, part in enumerate(parts, start=1):
                machine = f", machine {rank} of {len(parts)}" if len(parts) > 1 else ""
                commands[f"group {number}{machine}"] = await ServerProcess(part).command()
        return commands

    async def join(self, *, trains: bool = True) -> Fleet:
        """Use servers that run already, at the addresses of the configuration or behind routers there.

        Several addresses get a router of the run's. Control requests have the key of the environment variable
        AGENTRL_CONTROL_KEY, where it is set. trains: sends them the model's weights.

        Raises:
            ConfigError: no server answers, the router does not start, or the configured transport cannot send
                weights to them.
        """
        headers = control_headers()
        async with AsyncExitStack() as stack:
            try:
                urls = await servers_at(self.config.addresses)
                router = await self._router_before(urls, stack) if self.config.has_router else None
            except EngineError as error:
                raise ConfigError(str(error)) from error
            first_wait_s = self.config.rollout_health_check_first_wait
            servers = [ExternalServer(server, first_wait_s) for server in urls]
            transport = self._transport(_reach_of(urls))
            url = self.config.addresses[0] if router is None else router.url
            policy = self._policy(url, {} if router is None else _bearer(router.key))
            end = stack.pop_all().aclose
        fleet = self._fleet(servers, router, policy, transport, end, headers)
        fleet.stays = True
        if not trains:
            return fleet
        try:
            await deliver_directory(self.model, fleet.sink, 0, dtype=self.dtype)
        except EngineError as error:
            await fleet.close()
            raise ConfigError(str(error)) from error
        return fleet

    async def _router_before(self, urls: Sequence[str], stack: AsyncExitStack) -> RouterProcess:
        """A router that sends to these servers; the stack ends it."""
        settings = self._settings(ServerGroup(num_gpus_per_engine=0))
        router = router_of(settings, self.launcher or LocalLauncher())
        stack.push_async_callback(router.stop)
        await router.start()
        for url in urls:
            await router.add(url)
        self.on_event(f"the router at {router.url} sends to {', '.join(urls)}")
        return router

    def _enter(self, server: ServerHandle, phase: str) -> None:
        """Show a phase of a server's start; from then on its fleet shows what it does."""
        if (activities := current_activities()) is not None:
            activities.enter(f"{self.title}{server.name}", phase, where=server.url)

    def _groups(self, plugins: Path) -> list[ServerReplicas]:
        groups = self.config.groups
        return [ServerReplicas(self._settings(group, plugins), group.num_engines) for group in groups]

    def _settings(self, group: ServerGroup, *python_path: Path) -> ServerSettings:
        config, gpus = self.config, self.config.gpus_of(group)
        own: dict[str, Value] = {"custom_weight_loader": [LOADER]} if self.trained else {}
        if self.adapters is not None:
            own |= self.adapters.arguments(on_gpu=gpus > 0)
        if gpus > 1:
            own["tp_size"] = gpus
        if gpus and self.releases:
            own["enable_memory_saver"] = True
        if config.max_context_len is not None:
            own["context_length"] = config.max_context_len
        return ServerSettings(
            model=self.model,
            log_folder=self.folder,
            role=group.role or "regular",
            device="cuda" if gpus else "cpu",
            arguments={**self.arguments, **own, **_values(config.arguments_of(group))},
            python=Path(config.sglang_python or sys.executable),
            python_path=(LOADER_FOLDER, *python_path),
            first_wait_s=config.rollout_health_check_first_wait,
            max_in_flight=self.max_in_flight,
            machines=config.machines_of(group),
            router=_values(config.router, "sglang-router"),
        )

    def _policy(self, url: str, headers: Mapping[str, str] = MappingProxyType({})) -> SGLangPolicy:
        policy = fleet_policy(self.config, url, headers, self.vocab_size, self.decode)
        policy.adapters = None if self.adapters is None else self.adapters.choice
        return policy

    def _transport(self, reach: _Reach) -> Transport:
        if self.adapters is not None:
            folder, (_, scale, _, keep, _) = self.folder / "adapters", self.adapters
            return LoraAdapters(folder, model=self.model, scale=scale, keep=keep)
        return _transport(self.model, self.config, self.folder, reach)

    def _fleet(
        self,
        servers: Sequence[Process],
        router: Router | None,
        policy: SGLangPolicy,
        transport: Transport,
        end: End,
        headers: Mapping[str, str],
    ) -> Fleet:
        config = self.config
        health = Health(config.rollout_health_check_interval, config.rollout_health_check_timeout)
        return Fleet(
            servers, router, policy, transport, end, health, self.on_event, headers, self.title
        ).watch()


def fleet_policy(
    config: EngineConfig,
    url: str,
    headers: Mapping[str, str],
    vocab_size: int | None,
    decode: Decode | None,
    *,
    num_clients: int = 1,
) -> SGLangPolicy:
    """The policy of servers that a fleet watches. num_clients: processes that share the slots (count)."""
    return SGLangPolicy(
        url,
        headers=headers,
        max_concurrency=-(-config.max_slots // num_clients),
        adaptive=config.adaptive_concurrency,
        num_clients=num_clients,
        attempts=_ATTEMPTS,
        vocab_size=vocab_size,
        decode=decode,
        resend_lost=True,
        is_routed=not config.addresses,
    )


def _bearer(key: str | None) -> dict[str, str]:
    """The header of requests to who asks for a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _values(arguments: Mapping[str, JSON], whose: str = "SGLang") -> dict[str, Value]:
    try:
        return TypeAdapter(dict[str, Value]).validate_python(arguments)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise ConfigError(
            f"{whose}'s argument `{name}` is a number, a text, true, false or a list of them."
        ) from None


class _Reach(NamedTuple):
    """host: an address of this machine that the servers reach, and those who send them weights; loopback =
    all of these run here. is_local: whether the servers do."""

    host: str
    is_local: bool


def _reach_of(urls: Sequence[str]) -> _Reach:
    """The way to servers that run already."""
    addresses = (address_to(urlsplit(url).hostname or "") for url in urls)
    elsewhere = next(filter(None, addresses), None)
    return _Reach(elsewhere or HOST, elsewhere is None)


def _transport(model: Path, config: EngineConfig, folder: Path, reach: _Reach) -> Transport:
    """The configured transport; left out, memory of this machine, or a process group where one is elsewhere.

    From a rank on a GPU to servers that can map it, memory is that of the card; else the host's.
    A process group uses gloo, also for servers with GPUs: it copies through the CPU's memory. With NCCL a
    rank would send from its GPU, which refuses two ranks on one GPU, and that may be a server's.

    Raises:
        ConfigError: shared memory is chosen, and a server is on another machine.
    """
    chosen = config.update_weights_transport
    if chosen == "lora":
        # Of servers that get no adapters.
        chosen = None
    if chosen == "tensor" and not reach.is_local:
        raise ConfigError(
            "update_weights_transport = tensor is shared memory, and there are servers on other machines; "
            "leave it out, or choose distributed."
        )
    written, model = folder / "weights", base_folder(model)
    match chosen or ("tensor" if reach.host == HOST else "distributed"):
        case "tensor":
            return CudaIpc()
        case "distributed":
            # The weights are read back through shared memory.
            return Distributed(host=reach.host, backend="gloo", check_loaded=reach.is_local)
        case "disk":
            return Disk(written, model=model)
        case "delta":
            return Disk(written, model=model, full_every=_FULL_EVERY, mirror=folder / "weights-whole")


@asynccontextmanager
async def served_models(
    config: EngineConfig, folder: Path, on_event: Callable[[str], None], places: ProcessPlaces
) -> AsyncIterator[Addresses]:
    """The addresses of the run's models, by name; a server that ends is restarted at the same address.

    folder: for a folder of logs for each model. on_event: called with a sentence whenever a server starts or
    ends. places: of all servers of the run.

    Raises:
        ConfigError: a folder holds no model; SGLang is not installed, has no such argument, or does not
            start.
    """
    addresses: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for name in config.sglang_models:
            plan = model_plan(config, name, folder, on_event)
            fleet = await replace(plan, launcher=places.launcher(fleet_of_model(name))).start()
            stack.push_async_callback(fleet.close)
            stack.enter_context(sent_with(fleet.url, fleet.policy.headers))
            addresses[name] = fleet.url
        yield addresses


def model_plan(config: EngineConfig, name: str, folder: Path, on_event: Callable[[str], None]) -> FleetPlan:
    """The servers of one of the run's models, by its name; the other arguments as in `served_models`.

    Raises:
        ConfigError: its folder holds no model.
    """
    model = config.sglang_models[name]
    try:
        check_has_config(Path(model.hf_checkpoint))
    except ModelLoadError as error:
        raise ConfigError(f"sglang_models.{name}: {error}") from None
    return FleetPlan(
        model=Path(model.hf_checkpoint),
        config=_config_of(config, model),
        folder=folder / name,
        on_event=partial(_prefixed, on_event, name),
        trained=False,
        title=title_of(fleet_of_model(name)),
    )


def _config_of(config: EngineConfig, model: ServedModel) -> EngineConfig:
    # Settings of the policy's servers do not apply to these.
    return config.model_copy(
        update={"sglang_groups": [model.group], "sglang": {}, "router": {}, "max_context_len": None}
    )


def _prefixed(on_event: Callable[[str], None], name: str, event: str) -> None:
    on_event(f"{name}: {event}")

"""From the configuration to SGLang servers of our own, as one engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agentrl.engine.config import EngineConfig
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.draft import Decode
from agentrl.engine.sglang.fleet import Fleet, Health
from agentrl.engine.sglang.launch import Servers, ServerSettings, Value
from agentrl.engine.sglang.transports import Transport
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import ConfigError, EngineUnavailableError

_ATTEMPTS = 10  # before as many failed, another server has taken over, or requests are held
_FULL_EVERY = 16


async def start_fleet(
    model: Path,
    config: EngineConfig,
    folder: Path,
    *,
    vocab_size: int,
    decode: Decode,
    say: Callable[[str], None],
) -> Fleet:
    """Start the servers that a run asks for; `close` of the fleet ends them.

    model: the folder that they load. folder: for their logs, and for weights on their way.

    Raises:
        ConfigError: an argument that SGLang does not know, no SGLang, or a server does not come up.
    """
    async with AsyncExitStack() as stack:
        gpus = [str(i) for i in range(config.rollout_num_engines * config.rollout_num_gpus_per_engine)]
        settings = _settings(model, config, folder)
        starting = Servers(settings, count=config.rollout_num_engines, gpus=gpus, say=say)
        try:
            servers = await stack.enter_async_context(starting)
        except EngineUnavailableError as error:
            raise ConfigError(str(error)) from error
        policy = SGLangPolicy(
            servers.url,
            max_concurrency=config.max_slots,
            attempts=_ATTEMPTS,
            vocab_size=vocab_size,
            decode=decode,
            asks_anew=True,
        )
        health = Health(config.rollout_health_check_interval, config.rollout_health_check_timeout)
        transport = _transport(model, config, folder)
        end = stack.pop_all().aclose
    return Fleet(servers.servers, servers.router, policy, transport, end, health, say).watch()


def _settings(model: Path, config: EngineConfig, folder: Path) -> ServerSettings:
    per_engine = config.rollout_num_gpus_per_engine
    ours: dict[str, Value] = {"custom_weight_loader": [LOADER]}
    if per_engine > 1:
        ours["tp_size"] = per_engine
    if config.max_context_len is not None:
        ours["context_length"] = config.max_context_len
    try:
        given = TypeAdapter(dict[str, Value]).validate_python(config.sglang)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise ConfigError(
            f"SGLang's argument `{name}` is a number, a text, true, false or a list of them."
        ) from None
    return ServerSettings(
        model=model,
        log_folder=folder,
        device="cuda" if per_engine else "cpu",
        arguments={**ours, **given},
        python=Path(config.sglang_python or sys.executable),
        python_path=(LOADER_FOLDER,),
        first_wait_s=config.rollout_health_check_first_wait,
    )


def _transport(model: Path, config: EngineConfig, folder: Path) -> Transport:
    written = folder / "weights"
    match config.update_weights_transport:
        case "tensor":
            return SharedMemory()
        case "distributed":
            return Distributed(backend="nccl" if config.rollout_num_gpus_per_engine else "gloo")
        case "disk":
            return Disk(written, model=model)
        case "delta":
            return Disk(written, model=model, full_every=_FULL_EVERY, mirror=folder / "weights-whole")

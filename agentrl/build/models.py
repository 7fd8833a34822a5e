"""Models that are served beside the policy: started before the worlds that ask them, never given weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from agentrl.build.addresses import Addresses
from agentrl.build.fleet import FleetPlan
from agentrl.engine.config import EngineConfig, ServedModel, ServerGroup
from agentrl.errors import ConfigError
from agentrl.gpus import own_gpus


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

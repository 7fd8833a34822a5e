"""The dry run of `agentrl train`: a run is validated as a whole, and nothing of it is started.

The order is that of a run: configuration, folder, environment, functions by path, prompts, model, trainer,
servers, memory, disk. All that is missing is raised in one list, else the first thing that is wrong. Nothing
is written, except the config and the tokenizer of a new model into a temporary folder.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from transformers import PreTrainedConfig

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.cards import SPARE, Serving, networks_of, serving_of
from agentrl.assembly.cluster import check_machines, cluster_facts, ranks_have_gpus
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import RunData, first_tasks
from agentrl.assembly.env import EnvFactory, run_env_factory
from agentrl.assembly.fit import longest_row_that_fits
from agentrl.assembly.functions import CALLBACK
from agentrl.assembly.hooks import EVAL_FUNCTION_PATH
from agentrl.assembly.load import listed_inactive, load_run
from agentrl.assembly.memory import BF16, FP32, TorchRank
from agentrl.assembly.model import model_source
from agentrl.assembly.places import (
    LocalPlaces,
    card_facts,
    is_for_gpus,
    planned_gpus,
    with_devices,
)
from agentrl.assembly.policy import build_renderer, dialect_of
from agentrl.assembly.rewards import misfits
from agentrl.assembly.servers import ServerCheck, check_servers
from agentrl.assembly.trainer import check_auxiliary_models, check_readable, check_trainable
from agentrl.config import effective_values
from agentrl.envs import AnyEnv
from agentrl.envs.boundary import as_multi_agent, call_joint_reset, closing
from agentrl.envs.graders.registry import CALL_SERVERS
from agentrl.envs.opponents import check_opponents
from agentrl.envs.registry import find
from agentrl.errors import ConfigError, ModelLoadError, StageError, UserError
from agentrl.processes.gpus import num_gpus, present_gpus
from agentrl.run import UNSERVED
from agentrl.run.dry_run_memory import (
    disk_shortage,
    is_elsewhere,
    memory_by_process,
    memory_shortage,
    parts_of,
)
from agentrl.run.dry_run_missing import missing_of
from agentrl.run.folder import RunFolder
from agentrl.run.held_out import own_sets
from agentrl.run.model_config import shape_facts
from agentrl.run.parts import algorithm_of, filters_of, scoring_of
from agentrl.run.pretraining import CriticData
from agentrl.run.replay import Replay
from agentrl.run.resuming import start_of
from agentrl.runtime.interrupts import run_until_signal
from agentrl.runtime.stage import stage
from agentrl.runtime.temporary import temporary_folder
from agentrl.trainer.config import ON_GPUS
from agentrl.trainer.megatron.model.shape import check_layout, shape_of
from agentrl.types import JSON, Task
from agentrl.types.seams import Renderer
from agentrl.weights.hf.folders import base_folder, has_config
from agentrl.weights.hf.source import ModelSource, long_ropes, open_config
from agentrl.weights.hf.tensors import TensorFiles, num_parameters

_MEASURED = 64
"""Prompts that are rendered and measured, and whose labels are graded."""
_NAMED = 3
_PATH = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a run would do, in sections of facts. Keys that end in `_bytes` are numbers of bytes.

    missing: what this machine lacks for it; the rest is valid. notes: settings without effect, warnings.
    """

    sections: Mapping[str, Mapping[str, JSON]]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, JSON]:
        """The sections by name, and `missing` and `notes`."""
        facts: dict[str, JSON] = {name: dict(section) for name, section in self.sections.items()}
        return {**facts, "missing": list(self.missing), "notes": list(self.notes)}


def dry_run(run: str | Path | None, settings: Mapping[str, JSON], *, resume: bool | int = False) -> DryRun:
    """Validate the run that `agentrl train` would begin or resume; the arguments are those of `start_of`.

    Raises:
        MissingPartsError: files or packages are missing; all of them are named.
        UserError: the first thing that is wrong, in one sentence.
    """
    config = load_run(run, settings)
    folder = RunFolder.of(config)
    if (run is not None and Path(run).is_dir()) or (resume is not False and folder.holds_run):
        # It writes nothing where a run resumes.
        config = start_of(run, settings, resume=resume).config
    else:
        config = with_devices(config, ON_GPUS if is_for_gpus(config) else {})
        folder.check_free(config)
    check_machines(config, os.environ)
    if absent := tuple(missing_of(config)):
        raise MissingPartsError(DryRun(_known_facts(config, folder), absent, tuple(_notes(config))))
    return run_until_signal(_validated(config, folder))


class MissingPartsError(UserError):
    """Files or packages are missing that decide about the rest. report: what could be told without them."""

    def __init__(self, report: DryRun) -> None:
        one, *more = report.missing
        numbered = [f"({number}) {what}" for number, what in enumerate(report.missing, start=1)]
        super().__init__(f"{len(numbered)} things are missing here: {' '.join(numbered)}" if more else one)
        self.report = report


def _notes(config: RunConfig) -> list[str]:
    return [*config.warnings, *listed_inactive(config)]


async def _validated(config: RunConfig, folder: RunFolder) -> DryRun:
    notes, addresses = _notes(config), dict.fromkeys(config.engine.sglang_models, UNSERVED)
    make_env = run_env_factory(config, addresses)
    check_opponents(env := make_env(), config.env.opponents)
    dialect = dialect_of(env, config.rendering)
    algorithm_of(config, env)
    filters_of(config.rollout)
    data = RunData.of(config, env, notes.append)
    await _try_functions(config, make_env, data, addresses)
    notes += [] if config.rollout.replay is not None else await _misfits(config, env, data)
    with temporary_folder("dry-run") as place:
        source = model_source(
            config.model,
            env,
            dialect,
            seed=config.run.seed,
            folder=place / "model",
            corpus=data.corpus(env),
        )
        Replay.of(config, vocab_size=source.vocab_size, on_event=notes.append)
        _check_model(source, config)
        prompts = await _prompts(config, make_env, data, build_renderer(source, dialect, config.rendering))
    serving = serving_of(config, source.config, env)
    servers = await check_servers(config, source.directory.absolute(), serving)
    memory = memory_by_process(config, source.config, env.limits.max_tokens)
    missing = [*servers.missing, *_missing_gpus(config, servers)]
    missing += _shortage(memory_shortage(memory, is_elsewhere=is_elsewhere(config)), missing)
    sections: dict[str, Mapping[str, JSON]] = {
        "run": _run_facts(config, folder),
        "environment": _environment_facts(config, env, type(dialect).__name__.lower()),
        "prompts": {**_counts(data), **prompts},
        "model": _model_facts(config, source.config, is_fresh=source.seed is not None),
        "memory": {name: parts_of(part) for name, part in memory.items()},
        "shared_gpus": {} if serving.card is None else serving.card.facts(),
        "servers": dict(servers.commands),
        "cluster": cluster_facts(config),
        "gpus": {**_gpu_facts(config, servers), **_longest_row(config, source.config, serving)},
        "cards": card_facts(config),
        "disk": _disk_facts(config, folder, source.config),
    }
    missing += _shortage(disk_shortage(config, sections["disk"]), missing)
    return DryRun(sections, tuple(missing), (*notes, *_sharing(config, servers)))


def _shortage(sentence: str | None, missing: Sequence[str]) -> list[str]:
    """What is missing besides: the sentence, where the run is for another machine, since this one lacks more.

    Raises:
        ConfigError: nothing else is missing, so the run is for this machine.
    """
    if sentence is not None and not missing:
        raise ConfigError(sentence)
    return [] if sentence is None else [sentence]


async def _try_functions(
    config: RunConfig, make_env: EnvFactory, data: RunData, addresses: Addresses
) -> None:
    """Try out graders and functions by path.

    Raises:
        UserError: one of them cannot be made or imported, or fails.
    """
    # A reward model or a judge may run on the other machine only.
    task = None if config.env.reward in CALL_SERVERS else data.first_task
    await scoring_of(config, make_env, task, addresses)
    sets = data.held_out or {}
    here = {name: held for name, held in sets.items() if held.own.reward not in CALL_SERVERS}
    await own_sets(config, here, addresses)
    CALLBACK.maybe(config.observe.callback)
    EVAL_FUNCTION_PATH.maybe(config.eval.eval_function_path)


async def _misfits(config: RunConfig, env: AnyEnv, data: RunData) -> list[str]:
    """Sentences about prompts of files whose labels the environment's own reward does not fit.

    Raises:
        ConfigError: the grader that is configured does not fit some of them.
    """
    held_out = (data.held_out or {}) if config.eval.eval_prompt_data is not None else {}
    tasks = [task for held in held_out.values() if not held.own.reward for task in held.tasks[:_MEASURED]]
    if data.source is not None and data.gives_prompts:
        tasks = [*first_tasks(data.source, _MEASURED), *tasks]
    name = config.env.reward
    found = await misfits(name, config.env.reward_kwargs, tasks, env)
    if not found:
        return []
    sentence = (
        f"{len(found)} of {len(tasks)} prompts do not fit the reward {name or f'of {env.id}'}: "
        f"{'; '.join(found[:_NAMED])}"
    )
    if name is None:
        return [f"{sentence}."]
    raise ConfigError(f"{sentence}. Name another reward, or mend the column in label_key.")


def _run_facts(config: RunConfig, folder: RunFolder) -> dict[str, JSON]:
    rollout, paths = config.rollout, _functions(config)
    facts: dict[str, JSON] = {
        "folder": str(folder.path),
        "iterations": rollout.num_rollout,
        "prompts_per_iteration": rollout.prompts,
        "episodes_per_prompt": rollout.n_samples_per_prompt,
        "optimizer_steps_per_iteration": rollout.num_steps_per_rollout * config.algorithm.ppo_epochs,
        "warm_start_steps": config.warm_start.warm_start_steps,
        "algorithm": config.algorithm.advantage_estimator.name,
        "trainer": config.trainer.trainer,
        "engine": config.engine.engine,
    }
    return {**facts, "functions": paths} if paths else facts


def _functions(config: RunConfig) -> dict[str, JSON]:
    """The settings that name a function by its path."""
    values = (item for section in effective_values(config).values() for item in section.items())
    return {name: value for name, value in values if isinstance(value, str) and _PATH.fullmatch(value)}


def _environment_facts(config: RunConfig, env: AnyEnv, dialect: str) -> dict[str, JSON]:
    world = as_multi_agent(env)
    tools = {schema.name for name in world.possible_agents for schema in world.tools_of(name)}
    return {
        "id": config.env.env,
        "agents": list(world.possible_agents),
        "dialect": dialect,
        "tools": [*sorted(tools)],
        "rewards": {reward.name: reward.weight for reward in env.rewards},
        "max_turns": env.limits.max_turns,
        "max_tokens": env.limits.max_tokens,
    }


def _counts(data: RunData) -> dict[str, JSON]:
    """Prompts of RL and of evaluations (count)."""
    held_out = None if data.held_out is None else sum(len(held.tasks) for held in data.held_out.values())
    counts: dict[str, JSON] = {"held_out": held_out}
    if data.source is None:
        return counts
    return {"training": data.source.num_tasks or "without an end", **counts}


async def _prompts(
    config: RunConfig, make_env: EnvFactory, data: RunData, renderer: Renderer
) -> dict[str, JSON]:
    """The first prompt as the model reads it, and the lengths of the first ones.

    Raises:
        ConfigError: an episode cannot begin, or no prompt leaves room for an answer.
    """
    tasks: Sequence[Task] = first_tasks(data.source, _MEASURED) if data.source is not None else ()
    tasks = tasks or [task for held in (data.held_out or {}).values() for task in held.tasks[:_MEASURED]]
    rendered = [await _rendered(make_env(), task, renderer, config.run.seed) for task in tasks]
    if not rendered:
        return {}
    lengths, limit = [len(ids) for ids in rendered], make_env().limits.max_tokens
    if limit is not None and min(lengths) >= limit:
        raise ConfigError(
            f"the shortest of {len(lengths)} prompts has {min(lengths)} tokens, and an episode may have "
            f"{limit}; raise rollout_max_context_len."
        )
    return {
        "measured": len(lengths),
        "shortest": min(lengths),
        "median": median(lengths),
        "longest": max(lengths),
        "first": renderer.decode(rendered[0]),
    }


async def _rendered(env: AnyEnv, task: Task, renderer: Renderer, seed: int) -> list[int]:
    world = as_multi_agent(env)
    try:
        async with closing(world), stage("reset", env.limits.reset_timeout_s):
            observations, _ = await call_joint_reset(world, task, seed=seed)
            name = next(iter(observations))
            tools = world.tools_of(name)
    except StageError as error:
        raise ConfigError(
            f"the episode of {task.id} cannot be played ({error.stage}: {error.detail}); mend the "
            "environment, or start what it needs."
        ) from error
    return renderer.render(observations[name], tools)


def _check_model(source: ModelSource, config: RunConfig) -> None:
    """Check that the trainer and the engine can open the model.

    Raises:
        UserError: they cannot, or a file of its weights is missing.
    """
    if config.engine.engine == "embedded" and config.rollout.replay is None:
        long_ropes(source.config)
    check_trainable(source, config)
    if source.seed is None and config.trainer.trainer == "megatron":
        check_readable(source.directory, config.layout)
    elif source.seed is None and not any(base_folder(source.directory).glob("*.bin")):
        TensorFiles(source.directory).close()
    check_auxiliary_models(source, config)
    CriticData.of(config, source)


def _model_facts(config: RunConfig, model: PreTrainedConfig, *, is_fresh: bool = False) -> dict[str, JSON]:
    directory = "a fresh model" if is_fresh else config.model.hf_checkpoint
    return {"directory": directory, **shape_facts(model, config)}


def _known_facts(config: RunConfig, folder: RunFolder) -> dict[str, Mapping[str, JSON]]:
    """What is known where something is missing: the model's size and memory are, from its config.json alone.

    Raises:
        UserError: what is there is wrong.
    """
    sections: dict[str, Mapping[str, JSON]] = {"run": _run_facts(config, folder)}
    directory = config.model.hf_checkpoint
    if directory is None or not has_config(Path(directory)):
        return sections
    model = open_config(Path(directory))
    if config.trainer.trainer == "megatron":
        check_layout(shape_of(model), config.layout)
    sections["model"] = _model_facts(config, model)
    # The environment may be what is missing, and its limit with it.
    limit = find(config.env.env).env_class.limits.max_tokens
    try:
        memory = memory_by_process(config, model, config.rollout.rollout_max_context_len or limit)
    except ModelLoadError:  # of the reference or the teacher
        return sections
    return {
        **sections,
        "memory": {name: parts_of(part) for name, part in memory.items()},
        "disk": _disk_facts(config, folder, model),
    }


def _gpu_facts(config: RunConfig, servers: ServerCheck) -> dict[str, JSON]:
    on_gpus = config.trainer.trainer == "megatron" or config.trainer.device == "cuda"
    ranks = config.layout.world_size if on_gpus else 0
    present: list[JSON] = [f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB" for gpu in present_gpus()]
    return {"of_the_trainer": ranks, "of_servers": servers.num_gpus, "present": present}


def _longest_row(config: RunConfig, model: PreTrainedConfig, serving: Serving) -> dict[str, JSON]:
    """How long a row of tokens may be, where the GPUs of the ranks are known."""
    sizes = [gpu.memory for gpu in present_gpus() if gpu.memory]
    if is_elsewhere(config) or not sizes or not (ranks_have_gpus(config) or config.trainer.device == "cuda"):
        return {}
    total, others, card = min(sizes), 0, serving.card
    if card is not None:
        others = card.server.runtime if card.takes_turns else card.server.total
    available = int(total * (1 - SPARE)) - others
    return {"longest_row_tokens": longest_row_that_fits(config, model, available, total)}


def _missing_gpus(config: RunConfig, servers: ServerCheck) -> Iterator[str]:
    if is_elsewhere(config):
        return
    if servers.num_gpus and not present_gpus():
        yield f"{servers.num_gpus} GPUs for its servers: this machine has none."
    if config.trainer.trainer == "megatron" and config.trainer.bf16 and not num_gpus():
        yield f"{config.layout.world_size} GPUs for its ranks: here they would compute on the CPU."
    if config.trainer.device == "cuda" and not num_gpus():
        yield f"{config.layout.world_size} GPUs for its ranks: this machine has none."


def _sharing(config: RunConfig, servers: ServerCheck) -> Iterator[str]:
    """Notes where servers and ranks have the same GPUs: why; on Ray that the servers' share is not set."""
    if config.cluster.cluster == "local":
        notice = LocalPlaces(planned_gpus(config), {}, config.trainer.colocate).notice
        yield from () if notice is None else (notice,)
    # Without Ray the run gives the servers what the ranks leave.
    shares = config.cluster.cluster == "ray" and config.trainer.colocate
    has_share = "mem_fraction_static" in {name.replace("-", "_") for name in config.engine.sglang}
    if config.trainer.trainer == "megatron" and servers.num_gpus and shares and not has_share:
        yield (
            "Servers and ranks have the same GPUs: set mem_fraction_static under [engine.sglang], else a "
            "server takes most of its GPU."
        )


def _written(config: RunConfig, model: PreTrainedConfig) -> tuple[int, int]:
    """The bytes of a checkpoint, and of a model that is saved, which may be adapters."""
    parameters, is_half = num_parameters(model), config.trainer.trainer == "megatron" and config.trainer.bf16
    if config.trainer.trainer == "torch":
        rank = TorchRank(networks_of(config, model), config.trainer)
        own = rank.learned if config.trainer.lora_rank else parameters
        return FP32 * rank.learned + rank.fixed.optimizer, FP32 * own
    number = BF16 if is_half else FP32
    networks = 1 + (config.algorithm.critic is not None)
    # Weights, two means, and with bf16 weights in fp32 as well.
    return networks * parameters * (16 - number), parameters * number


def _disk_facts(config: RunConfig, folder: RunFolder, model: PreTrainedConfig) -> dict[str, JSON]:
    """The checkpoints and models of the run, and the free space; the journal is not counted.

    Raises:
        ConfigError: the folder cannot be written.
    """
    place = next(path for path in (folder.path.absolute(), *folder.path.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK):
        raise ConfigError(
            f"output_dir = {config.run.output_dir!r}: {place} cannot be written; choose another --output-dir."
        )
    section, checkpoint, model_bytes = config.checkpoint, *_written(config, model)
    # One more while it is written, and the best one.
    num_checkpoints = section.save_total_limit + 1 + (config.best_metric is not None)
    models = 1 + config.warm_starts + (config.model.hf_checkpoint is None)
    needed = num_checkpoints * checkpoint + models * model_bytes
    free = shutil.disk_usage(place).free
    return {
        "folder": str(place),
        "checkpoints": num_checkpoints,
        "checkpoint_bytes": checkpoint,
        "needed_bytes": needed,
        "free_bytes": free,
    }

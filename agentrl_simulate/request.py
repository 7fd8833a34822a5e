"""From a run file, a model and flags to the simulations that are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import load_run
from agentrl.config import Section, by_section, merge, parse, read_toml, write_toml
from agentrl.errors import ConfigError
from agentrl.rollout.config import RolloutConfig
from agentrl.runtime.extras import TRAINING, require
from agentrl.types import JSON
from agentrl.weights.hf.folders import has_config
from agentrl_simulate.config import EpisodesSection, ModelFile, SimulateSection
from agentrl_simulate.fitting import fitted, recorded_workload
from agentrl_simulate.recorded import RecordedRun, read_recorded
from agentrl_simulate.sweep import Sweep
from agentrl_simulate.workload import GivenWorkload

SCHEDULING: Final = frozenset(
    {
        *("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout", "global_batch_size"),
        *("max_episode_retries", "group_timeout_s", "max_num_gen_batches", "over_sampling_batch_size"),
        *("staleness_policy", "staleness_window", "async_buffer_size", "update_weights_interval"),
        *("partial_rollout", "num_rollout_workers"),
    }
)
"""Settings of [rollout] that decide when, where groups are played and trained, besides max_staleness."""


class SimulationFlags(Section):
    """What is set by flags: the settings of the run that a simulation uses, and the model."""

    rollout: RolloutConfig = RolloutConfig()
    simulate: SimulateSection = SimulateSection()


class _Rollout(Section):
    """The settings of a run that a simulation uses."""

    rollout: RolloutConfig = RolloutConfig()


def requested(
    run: str | None, settings: Mapping[str, JSON], folders: Sequence[str] = (), model: str | None = None
) -> Sweep:
    """The parts of the simulations.

    run: file or folder of a run; None = the defaults. settings: flat, over those of the file and the model.
    folders: of finished runs, whose episodes are played and whose speeds are measured. model: a file with the
    table [simulate].

    Raises:
        ConfigError: one of them is wrong, or has no effect.
    """
    if folders and model is not None:
        raise ConfigError("--from measures what --model gives; leave one of the two out.")
    config = load_run(run, {})
    if config.rollout.replay is not None or config.rollout.debug_rollout_only:
        raise ConfigError(
            f"{run} does not both play and train, which is what is simulated; drop replay and "
            "debug_rollout_only."
        )
    own = by_section(SimulationFlags, settings)
    given = {"rollout": config.rollout.model_dump(mode="json", exclude_unset=True)}
    flags = {"rollout": own.get("rollout", {})}
    source = "the settings given" if run is None else f"{run} with the settings given"
    rollout = parse(_Rollout, merge(_Rollout, given, flags), source=source).rollout
    passes = config.algorithm.ppo_epochs
    recorded = [read_recorded(Path(folder)) for folder in folders]
    simulated = own.get("simulate", {})
    assert isinstance(simulated, dict), "the values of a section are a table"
    known = {} if recorded or model is not None else _predicted(config, simulated)
    section = _section(simulated, recorded, model, {name: value for name, (value, _) in known.items()})
    size, seed = rollout.n_samples_per_prompt, section.simulation_seed
    workload = recorded_workload(recorded, size, seed) if recorded else GivenWorkload(section, size, seed)
    return Sweep(rollout, section, workload, passes, {name: source for name, (_, source) in known.items()})


def _predicted(config: RunConfig, flags: Mapping[str, JSON]) -> dict[str, tuple[JSON, str]]:
    """What a run's model and layout say about the trainer, with by what; nothing that a flag says.

    Nothing where they say nothing: not of the Megatron trainer, or without the config of a model.
    """
    folder = config.model.hf_checkpoint
    if config.trainer.trainer != "megatron" or folder is None or not has_config(Path(folder)):
        return {}
    require("predicting the times of a trainer", *TRAINING)
    from agentrl_simulate.predicted import predicted

    given = {name: value for name, value in flags.items() if name in EpisodesSection.model_fields}
    episodes = parse(ModelFile, {"simulate": given}, source="the settings given").simulate
    values = predicted(config, Path(folder), episodes)
    return {name: (value, source) for name, value, source in values if name not in flags}


def save_model(section: SimulateSection, path: Path) -> None:
    """Write the table [simulate], so that it can be changed and given again.

    Raises:
        OSError: the disk does not take it.
    """
    write_toml(ModelFile(simulate=section), path)


def _section(
    flags: Mapping[str, JSON],
    recorded: Sequence[RecordedRun],
    model: str | None,
    known: Mapping[str, JSON],
) -> SimulateSection:
    drawn = sorted(set(flags) & set(EpisodesSection.model_fields))
    if recorded and drawn:
        raise ConfigError(
            f"`{drawn[0]}` has no effect with --from, whose episodes are played; leave it out, or write a "
            "model with --save-model and change it there."
        )
    values: dict[str, JSON] = {"simulate": {**known}}
    source = "the settings given"
    if recorded:
        values = {"simulate": fitted(recorded)}
    elif model is not None:
        values, source = read_toml(Path(model)), f"{model} with the settings given"
        parse(ModelFile, values, source=model)
    return parse(ModelFile, merge(ModelFile, values, {"simulate": {**flags}}), source=source).simulate

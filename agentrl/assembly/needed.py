"""What a run needs, as far as it is known before torch is imported: a refusal comes at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.assembly.functions import CALLBACK
from agentrl.assembly.load import load_run
from agentrl.assembly.trust import check_trusted
from agentrl.envs.registry import find
from agentrl.errors import ConfigError
from agentrl.runtime.extras import require, require_extras
from agentrl.types import JSON
from agentrl.weights.hf.folders import check_has_config

_PLAYERS_PER_CORE = 8
"""Processes that play on this machine, at most (count)."""
_NOTHING_TRAINED = (
    "nothing says what to train on; name a run file (`agentrl train examples/hop_search/run.toml`), or an "
    "environment (`agentrl train --env HopSearch-v0 --warm-start-steps 250`)."
)
_NOTHING_RESUMED = (
    "nothing says which run to resume; name its folder (`agentrl train runs/NAME --resume`). `agentrl runs "
    "list` lists them."
)


def checked_run(
    run: str | Path | None,
    settings: Mapping[str, JSON],
    kind: type[RunConfig] = RunConfig,
    *,
    resume: bool = False,
) -> RunConfig:
    """The configuration of a run, as `load_run` reads it, for which nothing is missing here.

    Raises:
        ConfigError: neither a run nor a setting is given; a setting is wrong; there are too few cores for the
            players; the callback is no such function; or see `check_trusted`.
        MissingExtraError: the settings, or the environment, need a package that is not installed.
        ModelLoadError: hf_checkpoint holds no model.
        UnknownEnvError: there is no such environment.
    """
    if run is None and not settings and kind is RunConfig:
        raise ConfigError(_NOTHING_RESUMED if resume else _NOTHING_TRAINED)
    if run is not None and Path(run).is_dir():
        # Before code that its settings name is imported.
        check_trusted(Path(run))
    config = load_run(run, settings, kind)
    _check_needs(config)
    return config


def _check_needs(config: RunConfig) -> None:
    cores = os.cpu_count() or 1
    if config.cluster.cluster == "local" and config.num_players > _PLAYERS_PER_CORE * cores:
        raise ConfigError(
            f"num_rollout_workers = {config.num_players} starts as many processes, and this machine has "
            f"{cores} cores; set at most {_PLAYERS_PER_CORE * cores}."
        )
    CALLBACK.maybe(config.observe.callback)
    if config.observe.use_wandb:
        require("use_wandb", "wandb")
    if config.observe.use_prometheus:
        require("use_prometheus", "prometheus_client")
    if config.model.hf_checkpoint is not None:
        check_has_config(Path(config.model.hf_checkpoint))
    env = config.env.env
    require_extras(f"`{env}`", *find(env).env_class.needs)

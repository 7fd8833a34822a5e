"""What a dry run lacks on this machine: extras, files of prompts, parts of models; all of it in one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from agentrl.assembly.config import RunConfig
from agentrl.assembly.trainer import check_readable
from agentrl.data.eval_sets import sets_of
from agentrl.data.files import SlicedPath
from agentrl.data.paths import weights_of
from agentrl.data.rows.opening import check_rows
from agentrl.envs.registry import find
from agentrl.errors import DataError, MissingExtraError, ModelLoadError
from agentrl.runtime.extras import require, require_extras
from agentrl.weights.hf.folders import base_folder, has_config
from agentrl.weights.hf.source import open_config, open_tokenizer
from agentrl.weights.hf.tensors import TensorFiles


def missing_of(config: RunConfig) -> Iterator[str]:
    """A sentence for each thing that the run needs and that is not here.

    Raises:
        UserError: the environment's name is unknown, or its module is broken.
    """
    for check in _checks(config):
        try:
            check()
        except (MissingExtraError, DataError, ModelLoadError) as error:
            yield str(error)


def _checks(config: RunConfig) -> Iterator[Callable[[], None]]:
    env, algorithm = config.env.env, config.algorithm
    yield partial(require_extras, f"`{env}`", *find(env).env_class.needs)
    if config.trainer.trainer == "megatron":
        yield partial(require, "trainer = megatron", "megatron")
    for path in _prompt_files(config):
        yield partial(_has_rows, path)
    if config.model.hf_checkpoint is not None:
        yield from _model_checks(config, Path(config.model.hf_checkpoint))
    if algorithm.ref_load is not None and algorithm.has_reference:
        yield partial(_has_config, Path(algorithm.ref_load))
    if algorithm.opd.teacher_load is not None and algorithm.use_opd:
        yield partial(_has_config, Path(algorithm.opd.teacher_load))


def _prompt_files(config: RunConfig) -> Iterator[str]:
    held_out = config.eval.eval_prompt_data if config.evaluates else None
    if config.data.prompt_data is not None and config.rollout.num_rollout:
        yield from weights_of(config.data.prompt_data)
    for own in sets_of(held_out).values() if held_out is not None else ():
        yield from weights_of(own.path)


def _model_checks(config: RunConfig, directory: Path) -> Iterator[Callable[[], None]]:
    yield partial(_has_config, directory)
    if not has_config(directory):
        return
    yield partial(_has_tokenizer, directory)
    if config.trainer.trainer == "megatron":
        yield partial(check_readable, directory, config.layout)
    elif not any(base_folder(directory).glob("*.bin")):
        yield partial(_has_weights, directory)


def _has_rows(path: str) -> None:
    check_rows(SlicedPath.of(path).path)


def _has_config(directory: Path) -> None:
    open_config(directory)


def _has_tokenizer(directory: Path) -> None:
    open_tokenizer(directory)


def _has_weights(directory: Path) -> None:
    TensorFiles(directory).close()

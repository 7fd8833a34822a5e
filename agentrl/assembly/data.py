"""Builds the prompts of a run, of its evaluations, and of its tokenizer from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from agentrl.assembly.config import RunConfig
from agentrl.data import (
    Bounded,
    Columns,
    DataSource,
    FileSource,
    Mixture,
    Skipped,
    TaskSource,
    check_data_source,
)
from agentrl.data.config import ColumnChoice
from agentrl.data.eval_sets import NO_SETTINGS, EvalSet, sets_of
from agentrl.data.paths import Paths, weights_of
from agentrl.data.report import without_answers
from agentrl.envs import AnyEnv, SingleTurnEnv, tasks_of
from agentrl.envs.base import corpus_of
from agentrl.errors import ConfigError
from agentrl.tools.names import Names
from agentrl.types import Message, Task
from agentrl.types.seams import Renderer

NOTHING_HELD_OUT = "Nothing is held out, so nothing is evaluated: eval_prompt_data names prompts for that."
_SOURCES = Names("source of prompts", "package.module:name", ConfigError)
_CORPUS, _LABELLED = 10_000, 64


class HeldOutSet(NamedTuple):
    """Held-out prompts, and what is set for them alone. tasks: the first ones.

    again: the set whose episodes it plays once more, in the same worlds and with the same draws, in another
    way; None = it has its own.
    """

    tasks: Sequence[Task]
    own: EvalSet = NO_SETTINGS
    again: str | None = None

    def num_prompts(self, name: str, n: int) -> int:
        """How many prompts are played: of data, at most all; of an environment's tasks, `n` worlds."""
        return min(n, len(self.tasks)) if self.own.path or self.seeded_by(name) else n

    def seeded_by(self, name: str) -> str:
        """The name of the set that seeds its episodes. name: its own."""
        return name if self.again is None else self.again


class RunData(NamedTuple):
    """The prompts of a run.

    source: of RL; None = a run without RL. held_out: the sets of evaluations by name, "" for a single one
    without a name; None = no evaluations.
    gives_prompts: whether they come from another source than the environment.
    """

    source: DataSource | None
    held_out: Mapping[str, HeldOutSet] | None
    gives_prompts: bool

    @classmethod
    def of(cls, config: RunConfig, env: AnyEnv, on_event: Callable[[str], None]) -> RunData:
        """Open all sources. on_event: called where nothing is held out, and where no row has an answer.

        Raises:
            UserError: there is no such source, split or file, a row is no prompt, or a warm start has no
                tasks.
        """
        steps = config.warm_start.warm_start_steps
        if config.warm_starts and not env.splits:
            raise ConfigError(
                f"warm_start_steps = {steps}: {env.id} has no tasks of its own, so nothing "
                "can be demonstrated; "
                "leave it out, or choose an environment with an expert."
            )
        source = training_source(config, env) if config.rollout.num_rollout else None
        held_out = held_out_tasks(config, env) if config.evaluates else None
        if held_out is None and config.evaluates:
            on_event(NOTHING_HELD_OUT)
        label_key, is_file = config.data.label_key, isinstance(source, FileSource | Mixture)
        if label_key is not None and source is not None and is_file:
            first = first_tasks(source, _LABELLED)
            if first and all(task.answer is None for task in first):
                on_event(f"Among the first {len(first)} rows {without_answers(label_key)}")
        return cls(source, held_out, config.data.gives_prompts)

    @property
    def first_task(self) -> Task | None:
        """The first task of RL, else of evaluations: functions are tried out on it; None = none."""
        tasks = first_tasks(self.source, 1) if self.source is not None else []
        held_out = next(iter((self.held_out or {}).values()), HeldOutSet(()))
        return next(iter([*tasks, *held_out.tasks[:1]]), None)

    def corpus(self, env: AnyEnv) -> Iterator[str]:
        """Text to train a fresh model's tokenizer: of the environment, and the first prompts of the data."""
        yield from corpus_of(env)
        if self.source is not None and self.gives_prompts:
            for task in first_tasks(self.source, _CORPUS):
                yield from (message.text for message in task.prompt)
                yield task.answer or ""


def training_source(config: RunConfig, env: AnyEnv) -> DataSource:
    """The source of RL's prompts: a custom one, files, or the environment's split.

    Raises:
        UserError: there is no such source, split or file, or a row is no prompt.
    """
    section, seed = config.data, config.run.seed
    if section.data_source_path is not None:
        return custom_source(section.data_source_path, seed=seed)
    if section.prompt_data is None:
        tasks = tasks_of(env, config.env.train_split)
        return TaskSource(tasks, seed=seed, shuffle=section.rollout_shuffle)
    shuffle, split = section.rollout_shuffle, config.env.train_split
    return file_source(section.prompt_data, section.columns, seed=seed, shuffle=shuffle, split=split)


def bounded(source: DataSource, config: RunConfig, env: AnyEnv, renderer: Renderer) -> DataSource:
    """The source without the prompts that are longer than `rollout_max_prompt_len`."""
    max_len = config.data.rollout_max_prompt_len
    return source if max_len is None else Bounded(source, most=max_len, length=prompt_length(env, renderer))


def prompt_length(env: AnyEnv, renderer: Renderer) -> Callable[[Task], int]:
    """A function that counts the tokens of a task's prompt, with the schemas of the environment's tools."""

    def length(task: Task) -> int:
        if isinstance(env, SingleTurnEnv):
            # An episode also has the tools of its row.
            env.task = task
        return len(renderer.render(task.prompt, env.tool_schemas))

    return length


def file_source(
    paths: Paths, columns: Columns, *, seed: int = 0, shuffle: bool = False, split: str
) -> DataSource:
    """A source over files of prompts; several files are mixed by their weights.

    Raises:
        UserError: a file cannot be read.
    """
    assert paths is not None
    open_file = partial(FileSource, columns=columns, seed=seed, shuffle=shuffle, split=split)
    weights = weights_of(paths)
    if not weights:
        raise ConfigError("prompt_data names no file; name one, or leave it out.")
    sources = [open_file(path) for path in weights]
    return sources[0] if len(sources) == 1 else Mixture(sources, [*weights.values()], seed=seed)


def custom_source(path: str, *, seed: int) -> DataSource:
    """The custom source at `package.module:name`, checked against the contract of sources.

    Raises:
        ConfigError: it cannot be imported, or violates the contract of sources.
    """
    imported = _SOURCES.imported(path)
    if not callable(imported):
        raise ConfigError(
            f"{path} is a {type(imported).__name__}; name a class, or a function that makes a source."
        )
    try:
        return check_data_source(cast("Callable[..., object]", imported), seed=seed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}.") from error


def first_tasks(source: DataSource, n: int) -> list[Task]:
    """The tasks of the first `n` numbers, at most of one epoch, without the skipped ones."""
    count = n if source.num_tasks is None else min(n, source.num_tasks)
    source = source.preview()
    tasks = (source.task(ordinal) for ordinal in range(count))
    return [task for task in tasks if not isinstance(task, Skipped)]


def eval_sets(
    paths: str | tuple[str, ...] | dict[str, str | EvalSet] | dict[str, float],
    choice: ColumnChoice,
    *,
    split: str,
    n: int,
) -> dict[str, HeldOutSet]:
    """Each set of prompts by its name, "" for a single one without a name. n: of a set that sets none.

    Raises:
        UserError: a file cannot be read.
    """
    sets = {}
    for name, own in sets_of(paths).items():
        source = file_source(own.path, own.columns(choice.columns), split=split)
        tasks = first_tasks(source, own.num_prompts or n)
        sets[name] = HeldOutSet([_led_by(own.system_prompt, task) for task in tasks], own)
    return sets


def _led_by(system_prompt: str | None, task: Task) -> Task:
    if system_prompt is None:
        return task
    return replace(task, prompt=(Message("system", system_prompt), *task.prompt))


def held_out_tasks(config: RunConfig, env: AnyEnv) -> Mapping[str, HeldOutSet] | None:
    """The sets of evaluations by name; None where a run with its own prompts has no held-out tasks.

    Raises:
        UserError: there is no such split or file, or a row is no prompt.
    """
    section = config.eval
    if section.eval_prompt_data is not None:
        return eval_sets(
            section.eval_prompt_data, config.data, split=section.eval_split, n=section.eval_episodes
        )
    if config.data.gives_prompts and not env.splits:
        return None
    return {"": HeldOutSet(tasks_of(env, section.eval_split))}

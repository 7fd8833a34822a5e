"""A run of `agentrl sft`, stage by stage: the conversations, the model, the steps over them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from agentrl.assembly.config import SftConfig
from agentrl.assembly.env import env_factory
from agentrl.assembly.model import drawn, model_source
from agentrl.assembly.policy import build_renderer, dialect_of
from agentrl.assembly.trainer import TrainerFactory, check_device, check_trainable
from agentrl.data.paths import paths_of
from agentrl.envs import AnyEnv, Chat
from agentrl.envs.base import corpus_of
from agentrl.envs.dialect import Dialect
from agentrl.errors import ConfigError, TrainerError
from agentrl.records import read_metrics
from agentrl.records.history import METRICS, record_sizes
from agentrl.run.checkpoints import RunState
from agentrl.run.imitation import held_out_loss, imitate, shuffled_batches
from agentrl.run.model_config import write_model_config
from agentrl.run.parts import Records
from agentrl.run.sft_data import Imitated, SftReader, check_keys, texts_of
from agentrl.types import Sample
from agentrl.types.seams import Renderer, StepReport, Trainer
from agentrl.weights.hf.source import ModelSource, open_source

BUILD, SFT, EVALUATION = "reading the conversations", "SFT", "evaluation"
EVAL_LOSS = "eval/loss"
_CORPUS = 10_000
_NOTHING_HELD_OUT = "Nothing is held out, so no loss is measured: eval_sft_data names conversations for that."


def data_paths(config: SftConfig) -> tuple[str, ...]:
    """The paths of sft_data.

    Raises:
        ConfigError: there are none.
    """
    if paths := paths_of(config.sft.sft_data):
        return paths
    raise ConfigError(
        "sft_data is missing: name a file of conversations, or the folder of a run whose episodes are "
        "imitated."
    )


@dataclass(slots=True)
class SftRun:
    """One run: its data, its trainer, and how far it is.

    fingerprint: of what is imitated. step: finished optimizer steps (count). losses: on held_out, by step.
    is_between: whether no step is in progress, so that the trainer's state is that of `step`; began: when the
    last one did (seconds of `time.perf_counter`). saved_step: the step of the last checkpoint.
    """

    config: SftConfig
    records: Records
    source: ModelSource
    trainer: Trainer
    imitated: Imitated
    fingerprint: str
    held_out: list[Sample]
    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    is_between: bool = True
    began: float = 0.0
    saved_step: int | None = None

    @classmethod
    async def build(
        cls, config: SftConfig, paths: tuple[str, ...], records: Records, trainers: TrainerFactory
    ) -> SftRun:
        """Read and render all data, then start the trainer.

        Raises:
            UserError: a path, the environment or the model is wrong, or nothing can be imitated.
            TrainerError: a process of the trainer does not start.
        """
        console, origin, held_out_paths = records.console, records.origin, paths_of(config.sft.eval_sft_data)
        with records.watch.stage(BUILD), console.stage(BUILD, 1) as bar:
            check_keys(config, (*paths, *held_out_paths))
            env = _env(config)
            dialect = _dialect(config, env)
            source = _source(config, env, dialect, records)
            reader = _reader(config, env, source, build_renderer(source, dialect, config.rendering))
            reader = replace(reader, progress=lambda number: bar.advance(0, read=number))
            imitated = await reader.read(paths, "sft_data")
            held_out = await reader.read(held_out_paths, "eval_sft_data") if held_out_paths else None
            check_device(config)
            check_trainable(source, config)
            fingerprint = imitated.fingerprint
            if origin is not None and origin.state.source != fingerprint:
                raise ConfigError(
                    "the conversations are not those that the run began with (the data, or a setting of it, "
                    "has changed): restore them, or start a new run."
                )
            source = await asyncio.to_thread(drawn, source, inline=config.run.inline)
            steps = _num_steps(config, imitated)
            trainer = await trainers.supervised(source, config.sft_trainer, steps)
            bar.advance()
        if config.observe.log_model_config:
            for line in write_model_config(source, config, records.folder.path):
                console.line(line)
        console.line(imitated.summary("sft_data"))
        console.line(_NOTHING_HELD_OUT if held_out is None else held_out.summary("eval_sft_data"))
        samples = [] if held_out is None else held_out.samples
        run = cls(config, records, source, trainer, imitated, fingerprint, samples)
        if origin is not None:
            await trainer.load_state(origin.trainer)
            run.step = run.saved_step = origin.state.step
            run.losses = dict(_losses_in(records.folder.path / METRICS))
        return run

    @property
    def steps(self) -> int:
        """Optimizer steps of the run (count)."""
        return _num_steps(self.config, self.imitated)

    async def train(self) -> None:
        """Take all steps; however they end, the weights are saved, and a checkpoint unless one is broken off.

        Raises:
            TrainerError: a process of the trainer failed.
        """
        try:
            await self._train()
        finally:
            if self.is_between:
                # One that has died is what stopped the run.
                with suppress(TrainerError):
                    await self._save()
            await self.records.checkpoints.written()
            await self.trainer.save(str(self.records.folder.checkpoint))

    async def _train(self) -> None:
        records = self.records
        reports = imitate(self.trainer, self._batches())
        with records.console.stage(SFT, self.steps) as bar, records.monitor.iterations(None, bar):
            bar.advance(self.step)
            await self._between()
            while self.step < self.steps and not records.are_enough:
                with records.watch.stage(SFT):
                    report = await anext(reports)
                self._record(report)
                bar.advance(1, **self._figures(report))
                await self._between()

    def _batches(self) -> Iterator[list[Sample]]:
        """The batches of the remaining steps; when one is drawn, its step is in progress."""
        units, size = self.imitated.units, self.config.sft.sft_batch_size
        order = shuffled_batches(len(units), size, seed=self.config.run.seed, total=self._total)
        for indices in islice(order, self.step, None):
            self.is_between, self.began = False, time.perf_counter()
            yield [sample for index in indices for sample in units[index]]

    def _record(self, report: StepReport) -> None:
        seconds = time.perf_counter() - self.began
        self.step += 1
        self.is_between = True
        trained = min(self.step * self.config.sft.sft_batch_size, self._total)
        self.records.log(
            self.step,
            {
                **report.metrics,
                "train/epoch": trained / len(self.imitated.units),
                "perf/step_time": seconds,
                "perf/actor_train_tok_per_s": report.num_tokens / max(seconds, 1e-9),
            },
        )

    @property
    def _total(self) -> int:
        """Conversations and episodes of all epochs (count)."""
        return self.config.sft.num_epoch * len(self.imitated.units)

    def _figures(self, report: StepReport) -> dict[str, float]:
        figures = {"loss": report.metrics["train/loss"]}
        if self.losses:
            figures["held out"] = self.losses[max(self.losses)]
        return figures

    async def _between(self) -> None:
        """What is due after a step, and before the first: an evaluation, and a checkpoint."""
        is_due = self.step % self.config.eval.eval_interval == 0 or self.step == self.steps
        # A run that resumes may have it.
        if self.held_out and is_due and self.step not in self.losses:
            with self.records.watch.stage(EVALUATION):
                size = self.config.sft.sft_batch_size
                loss = await held_out_loss(self.trainer, self.held_out, batch_size=size)
            self.losses[self.step] = loss
            self.records.log(self.step, {EVAL_LOSS: loss})
        if self.step and self.step % self.config.checkpoint.save_interval == 0:
            await self._save()

    async def _save(self) -> None:
        """Write a checkpoint of the last finished step, unless it has one."""
        if self.saved_step == self.step:
            return
        records = self.records
        state = RunState(
            attempt=records.attempt,
            step=self.step,
            version=0,
            source=self.fingerprint,
            next_ordinal=min(self.step * self.config.sft.sft_batch_size, self._total),
            elapsed_s=records.metrics.elapsed_s,
            records=record_sizes(records.folder.path),
            stages=records.watch.stages,
        )
        await records.checkpoints.save(self.trainer, state)
        self.saved_step = self.step


def _num_steps(config: SftConfig, imitated: Imitated) -> int:
    return math.ceil(config.sft.num_epoch * len(imitated.units) / config.sft.sft_batch_size)


def _env(config: SftConfig) -> AnyEnv | None:
    """The environment whose dialect, tools and limits RL has; None where none is named. It is not played."""
    if not config.has_env:
        return None
    limits = config.env.chosen(max_turns=None, max_tokens=config.rollout.rollout_max_context_len)
    # No model is served; its address is of no use to an environment that is not played.
    addresses = dict.fromkeys(config.engine.sglang_models, "http://localhost")
    section = config.env
    return env_factory(
        section.env,
        section.env_kwargs,
        limits=limits,
        tools=section,
        addresses=addresses,
        reward=section,
    )()


def _dialect(config: SftConfig, env: AnyEnv | None) -> Dialect:
    if env is not None:
        return dialect_of(env, config.rendering)
    if config.rendering.dialect == "inline":
        raise ConfigError("dialect = inline needs an environment, whose tags it has: name it with env.")
    return Chat()


def _source(config: SftConfig, env: AnyEnv | None, dialect: Dialect, records: Records) -> ModelSource:
    """The model that SFT begins with; of a resumed run, the one that it began with."""
    folder = records.folder
    if records.origin is not None:
        return open_source(config.model.hf_checkpoint or folder.model)
    corpus = _corpus(config, env)
    return model_source(config.model, env, dialect, seed=config.run.seed, folder=folder.model, corpus=corpus)


def _corpus(config: SftConfig, env: AnyEnv | None) -> Iterator[str]:
    """Text to train a fresh model's tokenizer: of the environment, and of the first conversations."""
    if env is not None:
        yield from corpus_of(env)
    yield from texts_of(config.sft, data_paths(config), _CORPUS)


def _reader(config: SftConfig, env: AnyEnv | None, source: ModelSource, renderer: Renderer) -> SftReader:
    own = config.rollout.rollout_max_context_len if env is None else env.limits.max_tokens
    model = source.config.get_text_config().to_dict().get("max_position_embeddings")
    bounds = [bound for bound in (own, model) if isinstance(bound, int)]
    tools = () if env is None else tuple(env.tool_schemas)
    return SftReader(config.sft, source, renderer, tools, min(bounds, default=None))


def _losses_in(metrics: Path) -> Iterator[tuple[int, float]]:
    """The held-out losses in metrics.jsonl, by step."""
    for row in read_metrics(metrics) if metrics.exists() else ():
        step, loss = row["step"], row.get(EVAL_LOSS)
        if step is not None and loss is not None:
            yield int(step), loss

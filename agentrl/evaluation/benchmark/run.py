"""Playing a suite: policy by policy, cell by cell; what is finished in the folder is not played again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.envs import find
from agentrl.envs.scoring import UNUSABLE
from agentrl.errors import ConfigError, DiskError, StageError, UserError
from agentrl.evaluation.benchmark.policies import PlayingOf, opened
from agentrl.evaluation.benchmark.report import Benchmark
from agentrl.evaluation.benchmark.results import RESULT, CellResult, as_json, rows_by_env, unplayed_row
from agentrl.evaluation.benchmark.suite import SUITE, EnvChoice, PolicyChoice, Suite
from agentrl.evaluation.broken_tools import BrokenTool
from agentrl.evaluation.config import EvalConfig, EvalSettings
from agentrl.evaluation.episodes import Evaluator, PlannedEpisode, planned
from agentrl.evaluation.folder import write_settings
from agentrl.evaluation.identity import (
    EvalIdentity,
    code_version,
    data_fingerprint,
    model_version,
    settings_of,
)
from agentrl.evaluation.record import EpisodeRecord
from agentrl.evaluation.statistics import paired_difference, pooled
from agentrl.evaluation.world import EvalWorld, broken_name
from agentrl.records.history import locked
from agentrl.runtime.collector import rare_collections
from agentrl.runtime.files import disk_errors
from agentrl.runtime.interrupts import run_until_signal
from agentrl.runtime.stage import stage
from agentrl.types import JSON, Limits
from agentrl.view.console import RunConsole

# One cell of a benchmark: an environment, a set of prompts and a policy, played episode by episode.
#
#     cells/HopSearch-v0--expert--9f2c61d07ab3e845/
#       config.toml, identity.json                     what its result depends on
#       trajectories/eval_benchmark_000000.jsonl.gz    every episode that has ended, with its verdict
#       eval_benchmark_000000.seconds                  how long the attempts took
#       result.json                                    scores and counts; written last
#
# A cell without a result goes on: the episodes of its journal are not played again.
_NAME = "benchmark"
_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell and its folder. row: the name of the environment's row. plan: its episodes, in order.

    again: the row whose episodes it plays once more with a tool broken; None = it has its own.
    """

    row: str
    policy: str
    identity: EvalIdentity
    plan: Sequence[PlannedEpisode]
    path: Path
    again: str | None = None

    @classmethod
    def of(
        cls, row: str, policy: str, identity: EvalIdentity, plan: Sequence[PlannedEpisode], root: Path
    ) -> Cell:
        """The cell in its folder below `root`."""
        safe = "--".join(_UNSAFE.sub("-", name).strip("-")[-40:] for name in (row, policy))
        return cls(row, policy, identity, plan, root / f"{safe}--{identity.digest}")

    def result(self) -> CellResult | None:
        """Its result; None = it is not finished.

        Raises:
            ConfigError: the file holds something else.
        """
        return CellResult.read(self.path)

    async def drop_failed(self) -> None:
        """Remove the failed episodes from its journal, and its result, so that they are played again.

        Raises:
            ConfigError: the journal is broken.
        """
        entries = await self._record.entries({planned.id for planned in self.plan})
        usable = [entry for entry in entries if entry.episode.ending not in UNUSABLE]
        if len(usable) < len(entries):
            (self.path / RESULT).unlink(missing_ok=True)
            await self._record.replace(usable)

    async def play(
        self,
        evaluator: Evaluator,
        config: EvalConfig,
        directory: str | None,
    ) -> CellResult:
        """Play the episodes that its journal lacks, then score and count all of them.

        evaluator: plays an episode. config: the settings of the cell. directory: of the model that plays.

        Raises:
            UserError: the policy cannot play the environment, or the disk has failed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        write_settings(config, self.path, directory)
        self.identity.write(self.path)
        evaluation = await evaluator.play_all(self.plan, self._record)
        result = CellResult.of((self.row, self.policy), self.identity, self.plan, evaluation)
        result.write(self.path)
        return result

    @property
    def _record(self) -> EpisodeRecord:
        return EpisodeRecord(self.path, _NAME)


def run_benchmark(
    suite: Suite, folder: Path, console: RunConsole, *, retry_failed: bool = False
) -> Benchmark:
    """Play what the folder lacks of a suite; write its table and its page after every cell.

    Any interruption leaves the folder such that the same call goes on from the last episode that has ended.

    retry_failed: play episodes again that have failed.

    Raises:
        ConfigError: the folder cannot be made.
        RunBusyError: another process works on it; nothing is written.
        DiskError: the disk is full, or the folder is read-only: now, or in mid-play.
    """
    with locked(folder), disk_errors(folder, _remedy(folder)):
        suite.write(folder / SUITE)
        try:
            with rare_collections():
                return run_until_signal(_Run(suite, folder, console, retry_failed).play())
        except (KeyboardInterrupt, SystemExit):
            console.line(f"Stopped. Go on with `agentrl benchmark {folder} --resume`.")
            raise


@dataclass(frozen=True, slots=True)
class _Pair:
    """An environment and a policy: its settings, its cells; or why there are none. world: None = likewise.

    unbroken: why there is no cell in which a tool is broken, by how it was to be.
    """

    env: EnvChoice
    policy: PolicyChoice
    config: EvalConfig
    world: EvalWorld | None = None
    cells: Sequence[Cell] = ()
    error: str = ""
    unbroken: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Run:
    """One attempt. rows: by the names of row and policy, in the order of the table. scores: of those that
    have a result, by prompt."""

    suite: Suite
    folder: Path
    console: RunConsole
    retry_failed: bool
    rows: dict[tuple[str, str], dict[str, JSON]] = field(default_factory=dict)
    scores: dict[tuple[str, str], Mapping[str, Sequence[float]]] = field(default_factory=dict)
    worlds: dict[tuple[str, bool], tuple[EvalWorld, Mapping[str, str]] | str] = field(default_factory=dict)

    async def play(self) -> Benchmark:
        """Play all cells that have no result."""
        by_policy = [await self._pairs(policy) for policy in self.suite.policies]
        _refuse_unbreakable([pair for pairs in by_policy for pair in pairs if pair.world is not None])
        for of_env in zip(*by_policy, strict=True):
            for pair in of_env:
                self._list(pair)
        cells = [cell for pairs in by_policy for pair in pairs for cell in pair.cells]
        with self.console.stage("benchmark", len(cells)) as bar:
            bar.advance(sum(map(self._is_done, cells)))
            for pairs in by_policy:
                pending = [pair for pair in pairs if not all(map(self._is_done, pair.cells))]
                if pending:
                    await self._play_policy(pairs, pending, bar.advance)
        return self._write()

    async def _pairs(self, policy: PolicyChoice) -> list[_Pair]:
        """The pairs of a policy with every environment, and the cells of each."""
        model = model_version(policy.target) if policy.kind == "directory" else policy.target
        pairs = []
        for env in self.suite.envs:
            # A long list of tasks takes a second, after which a cancellation takes effect.
            await asyncio.sleep(0)
            pairs.append(await self._pair(env, policy, model))
        return pairs

    async def _pair(self, env: EnvChoice, policy: PolicyChoice, model: str) -> _Pair:
        config = self.suite.config(env, policy)
        key = env.name, policy.kind != "endpoint"
        if key not in self.worlds:
            self.worlds[key] = await _built(env, config, counts_tokens=key[1])
        built = self.worlds[key]
        if isinstance(built, str):
            return _Pair(env, policy, config, error=built)
        world, unbroken = built
        settings, code = settings_of(config), code_version(find(env.id))
        cells = []
        for name, held in world.sets.items():
            section, tasks = config.of_set(held.own).eval, held.tasks
            n = held.num_prompts(name, section.n)
            plan = planned(
                tasks,
                n,
                samples=section.n_samples_per_eval_prompt,
                seed=section.seed,
                prompts=held.seeded_by(name),
            )
            data = data_fingerprint(tasks[:n])
            identity = EvalIdentity(env.id, name, policy.kind, settings, code, data, model)
            cell = Cell.of(_row(env, name), policy.name, identity, plan, self.folder / "cells")
            if held.again is not None:
                cell = replace(cell, again=_row(env, held.again))
            if self.retry_failed:
                await cell.drop_failed()
            cells.append(cell)
        return _Pair(env, policy, config, world, cells, unbroken=unbroken)

    def _list(self, pair: _Pair) -> None:
        """Add the rows of a pair to the table."""
        names = pair.env.name, pair.policy.name
        if pair.error:
            self.rows[names] = unplayed_row(*names, pair.error)
        for cell in pair.cells:
            result = cell.result()
            if result is None:
                self.rows[cell.row, cell.policy] = unplayed_row(cell.row, cell.policy, None)
            else:
                self._add(cell, result)
            for tool, error in {} if cell.again else pair.unbroken.items():
                row = _row(pair.env, broken_name(cell.identity.prompts, tool))
                self.rows[row, cell.policy] = {**unplayed_row(row, cell.policy, error), "again": cell.row}

    async def _play_policy(
        self, pairs: Sequence[_Pair], pending: Sequence[_Pair], advance: Callable[[int], None]
    ) -> None:
        """Open a policy and play its pending cells; where it cannot be opened, their rows have the reason.

        pairs: all of the policy, whose longest episodes the engine has to hold.
        """
        policy = pending[0].policy
        worlds = [pair.world for pair in pairs if pair.world is not None]
        limits = _longest([world.env.limits for world in worlds])
        async with AsyncExitStack() as stack:
            try:
                opening = opened(policy, pending[0].config, limits, worlds[0].env, on_event=self.console.line)
                playing_of = await stack.enter_async_context(opening)
            except UserError as error:
                for cell in (cell for pair in pending for cell in pair.cells):
                    self._fail(cell, str(error))
                return
            for pair in pending:
                for cell in pair.cells:
                    if not self._is_done(cell):
                        await self._play_cell(pair, cell, playing_of)
                        advance(1)
                        self._write()

    async def _play_cell(self, pair: _Pair, cell: Cell, playing_of: PlayingOf) -> None:
        assert pair.world is not None, "a pair with cells has a world"
        world, env = pair.world, pair.world.env
        config = pair.config.of_set(world.sets[cell.identity.prompts].own)
        opening = opened_opponents(config.eval.opponents, env, {}, OpponentSetup(config.rendering))
        try:
            # An error of an environment's own code is the row's sentence, too.
            async with stage("act", None), opening as opponents:
                playing = playing_of(config, env, opponents)
                with self.console.stage(f"{cell.row}, {cell.policy}", len(cell.plan)) as bar:
                    evaluator = world.evaluator(
                        playing.agents_of,
                        config,
                        prompts=cell.identity.prompts,
                        concurrency=playing.concurrency,
                        progress=bar.advance,
                    )
                    directory = pair.policy.target if pair.policy.kind == "directory" else None
                    with disk_errors(cell.path, _remedy(self.folder)):
                        self._add(cell, await cell.play(evaluator, pair.config, directory))
        except DiskError:
            # The other cells need the disk, too.
            raise
        except (UserError, StageError) as error:
            self._fail(cell, str(error))

    def _is_done(self, cell: Cell) -> bool:
        return self.rows[cell.row, cell.policy]["state"] == "done"

    def _add(self, cell: Cell, result: CellResult) -> None:
        prices = self.suite.prices.get(cell.policy)
        folder = str(cell.path.relative_to(self.folder))
        row = result.row(None if prices is None else prices.as_prices(), folder)
        self.rows[cell.row, cell.policy] = {**row, "again": cell.again}
        self.scores[cell.row, cell.policy] = pooled(result.units)

    def _fail(self, cell: Cell, error: str) -> None:
        self.rows[cell.row, cell.policy] = unplayed_row(cell.row, cell.policy, error)

    def _write(self) -> Benchmark:
        for (_, policy), row in self.rows.items():
            if (again := row.get("again")) is not None:
                first, second = (self.scores.get((str(name), policy), {}) for name in (again, row["env"]))
                row["difference"] = as_json(paired_difference(first, second))
        by_env = rows_by_env(list(self.rows.values()))
        benchmark = Benchmark(self.folder, tuple(row for rows in by_env.values() for row in rows))
        benchmark.write()
        return benchmark


def _refuse_unbreakable(pairs: Sequence[_Pair]) -> None:
    """Raise ConfigError for a tool that can be broken in no environment, before any is played."""
    for tool, error in {tool: error for pair in pairs for tool, error in pair.unbroken.items()}.items():
        asked = [
            pair
            for pair in pairs
            if tool in (BrokenTool.read(text).name for text in pair.config.eval.break_tool)
        ]
        if all(tool in pair.unbroken for pair in asked):
            raise ConfigError(f"no environment here can be played with {tool}; the last one said: {error}")


def _row(env: EnvChoice, prompts: str) -> str:
    """The name of the row of a set of prompts, "" = the only one."""
    return f"{env.name}/{prompts}" if prompts else env.name


def _remedy(folder: Path) -> str:
    return f"make room there, then go on with `agentrl benchmark {folder} --resume`"


async def _built(
    env: EnvChoice, config: EvalConfig, *, counts_tokens: bool
) -> tuple[EvalWorld, Mapping[str, str]] | str:
    """The environment with its prompts, or why it cannot be built, in one sentence.

    An environment without a tool that is to be broken is played as it is: the sentences are by these tools.
    """
    section = config.eval
    plain = config.model_copy(
        update={"eval": section.model_copy(update=EvalSettings(break_tool=()).model_dump(exclude_unset=True))}
    )
    try:
        async with stage("build", None):
            world = await EvalWorld.build(env.id, plain, {}, counts_tokens=counts_tokens)
            built = world.with_breakable([*map(BrokenTool.read, section.break_tool)])
            empty = [name for name, held in world.sets.items() if not held.tasks]
    except (UserError, StageError) as error:
        return str(error)
    if empty:
        return f"{env.id} has no tasks in split `{section.split}`."
    return built


def _longest(limits: Sequence[Limits]) -> Limits:
    """Limits with the most tokens of an episode."""
    bounds = [each.max_tokens for each in limits]
    return replace(limits[0], max_tokens=None if None in bounds else max(b for b in bounds if b is not None))

"""One cell of a benchmark: an environment, a set of prompts and a policy, played episode by episode.

    cells/HopSearch-v0--expert--9f2c61d07ab3e845/
      config.toml, identity.json                     what its result depends on
      trajectories/eval_benchmark_000000.jsonl.gz    every episode with its verdict, written when it has ended
      result.json                                    scores and counts; written last

A cell without a result goes on: the episodes of its journal are not played again.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.benchmark.identity import CellIdentity
from agentrl.benchmark.results import RESULT, CellResult, write_text
from agentrl.envs import Reward, Scorer
from agentrl.envs.scoring import UNUSABLE, Marked
from agentrl.errors import ConfigError, all_of
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.episodes import Evaluation, Evaluator, PlannedEpisode
from agentrl.evaluation.folder import write_settings
from agentrl.evaluation.report import summarize
from agentrl.observe import Entry, Journal, Outcome, read_journal

_NAME = "benchmark"
_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell and its folder. row: the name of the environment's row. plan: its episodes, in order."""

    row: str
    policy: str
    identity: CellIdentity
    plan: Sequence[PlannedEpisode]
    path: Path

    @classmethod
    def of(
        cls, row: str, policy: str, identity: CellIdentity, plan: Sequence[PlannedEpisode], root: Path
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
        entries = self._entries()
        usable = [entry for entry in entries if entry.episode.ending not in UNUSABLE]
        if len(usable) < len(entries):
            (self.path / RESULT).unlink(missing_ok=True)
            await self._rewrite(usable)

    async def play(
        self,
        evaluator: Evaluator,
        config: EvalConfig,
        directory: str | None,
        progress: Callable[[int], None],
    ) -> CellResult:
        """Play the episodes that its journal lacks, then score and count all of them.

        evaluator: plays an episode. config: the settings of the cell. directory: of the model that plays.
        progress: called with the number of episodes that are new in the journal, those of an earlier attempt
        first.

        Raises:
            UserError: the policy cannot play the environment, or the disk has failed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        write_settings(config, self.path, directory)
        write_text(self.path / "identity.json", json.dumps(self.identity._asdict(), default=str, indent=1))
        started = time.perf_counter()
        marked = {entry.episode.id: _marked(entry, evaluator.scorer) for entry in self._entries()}
        progress(len(marked))
        missing = [planned for planned in self.plan if planned.id not in marked]
        async with Journal(self.path) as journal:
            recorder = _Recorder(evaluator, journal, asyncio.Semaphore(evaluator.concurrency), progress)
            played = await all_of([recorder.play(planned) for planned in missing])
        marked |= {result.episode.id: result for result in played}
        scored = await evaluator.scorer.judge_all([marked[planned.id] for planned in self.plan])
        seconds = time.perf_counter() - started
        report = summarize(scored.episodes, scored.verdicts, evaluator.setting, seconds=seconds)
        evaluation = Evaluation(evaluator.setting.breakdown, report, scored.episodes, scored.verdicts)
        if len(_own_rewards(evaluator.scorer)) < len(evaluator.scorer.rewards):
            await self._rewrite(list(evaluation.entries()))
        result = CellResult.of((self.row, self.policy), self.identity, self.plan, evaluation)
        result.write(self.path)
        return result

    def _entries(self) -> list[Entry]:
        """The episodes of its journal that are in its plan."""
        ids = {planned.id for planned in self.plan}
        files = sorted((self.path / "trajectories").glob("*.jsonl.gz"))
        try:
            entries = [entry for file in files for entry in read_journal(file)]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the journal of {self.path} cannot be read ({error}); restore it, or remove that folder."
            ) from None
        return [entry for entry in entries if entry.episode.id in ids]

    async def _rewrite(self, entries: Sequence[Entry]) -> None:
        """Replace its journal, whole or not at all."""
        folder, coming = self.path / "trajectories", self.path / "coming"
        shutil.rmtree(coming, ignore_errors=True)
        async with Journal(coming) as journal:
            path = await journal.write_eval(_NAME, 0, entries)
        if entries:
            path.replace(folder / path.name)
        else:
            (folder / path.name).unlink(missing_ok=True)
        shutil.rmtree(coming)


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Plays episodes, a limited number at once, and writes each to the journal as soon as it has ended."""

    evaluator: Evaluator
    journal: Journal
    slots: asyncio.Semaphore
    progress: Callable[[int], None]

    async def play(self, planned: PlannedEpisode) -> Marked:
        async with self.slots:
            marked = await self.evaluator.play(planned)
            await self.journal.write_eval(_NAME, 0, [await _entry(marked, self.evaluator.scorer)])
        self.progress(1)
        return marked


async def _entry(marked: Marked, scorer: Scorer) -> Entry:
    """The entry of an episode, with verdicts that rewards of groups are not yet part of."""
    own = replace(scorer, rewards=_own_rewards(scorer))
    verdicts = await own.judge([marked]) if marked.is_usable else []
    return Entry(marked.episode, tuple(verdicts), Outcome.EVALUATED)


def _marked(entry: Entry, scorer: Scorer) -> Marked:
    """The inverse of `_entry`: the results of the episode's own rewards."""
    names = [reward.name for reward in _own_rewards(scorer)]
    return Marked(entry.episode, {v.agent: {name: v.parts[name] for name in names} for v in entry.verdicts})


def _own_rewards(scorer: Scorer) -> tuple[Reward, ...]:
    return tuple(reward for reward in scorer.rewards if isinstance(reward, Reward))

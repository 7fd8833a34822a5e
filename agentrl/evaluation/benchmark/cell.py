"""One cell of a benchmark: an environment, a set of prompts and a policy, played episode by episode.

    cells/HopSearch-v0--expert--9f2c61d07ab3e845/
      config.toml, identity.json                     what its result depends on
      trajectories/eval_benchmark_000000.jsonl.gz    every episode with its verdict, written when it has ended
      eval_benchmark_000000.seconds                  how long the attempts took
      result.json                                    scores and counts; written last

A cell without a result goes on: the episodes of its journal are not played again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.envs.scoring import UNUSABLE
from agentrl.evaluation.benchmark.results import RESULT, CellResult
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.episodes import Evaluator, PlannedEpisode
from agentrl.evaluation.folder import write_settings
from agentrl.evaluation.identity import EvalIdentity
from agentrl.evaluation.record import EpisodeRecord

_NAME = "benchmark"
_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell and its folder. row: the name of the environment's row. plan: its episodes, in order."""

    row: str
    policy: str
    identity: EvalIdentity
    plan: Sequence[PlannedEpisode]
    path: Path

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

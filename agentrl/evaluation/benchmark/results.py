"""The result of a cell, as a file; and its row of the table, which the result and the prices give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from pydantic import ValidationError

from agentrl.config import Section
from agentrl.engine.chat.settings import Prices
from agentrl.envs.scoring import UNUSABLE
from agentrl.errors import ConfigError
from agentrl.evaluation.episodes import Evaluation, PlannedEpisode, first_of
from agentrl.evaluation.identity import EvalIdentity, task_digest
from agentrl.evaluation.report import policy_tokens_of, scores_of
from agentrl.evaluation.statistics import Estimate, ks_of, mean_of, pass_of, pooled, units_of
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import read_file
from agentrl.types import JSON, Ending, Episode, Usage

RESULT = "result.json"
VIOLATIONS = ("malformed_calls", "unknown_tools", "rejected_calls")
"""Counts of calls that break the rules of tools."""
INVALID_MOVES = "invalid_moves"


class EpisodeResult(Section):
    """One episode. score: None = it failed. failure: stage and kind of a failed one."""

    id: str
    task: str
    """Id of the task, and a hash of its content."""
    score: float | None
    turns: int
    tokens: int
    """Tokens that the policy sampled (count)."""
    ending: str
    failure: str | None = None


class CellResult(Section):
    """A finished cell. planned: episodes (count). report: of `agentrl eval`, as JSON."""

    format: Literal[1] = 1
    env: str
    """The name of the environment's row, with /NAME of a set of prompts."""
    policy: str
    identity: dict[str, JSON]
    planned: int
    samples: int
    """Episodes of each task (count)."""
    episodes: tuple[EpisodeResult, ...]
    prompt_tokens: int
    """Tokens that the model read over all turns of all episodes, failed ones included (count)."""
    completion_tokens: int
    """Tokens that it wrote (count)."""
    cached_tokens: int
    """Tokens of the prompts that came from a cache (count)."""
    report: dict[str, JSON]
    first_failure: str | None = None
    """Of the first episode that failed: stage, kind and detail."""

    @classmethod
    def of(
        cls,
        cell: tuple[str, str],
        identity: EvalIdentity,
        plan: Sequence[PlannedEpisode],
        evaluation: Evaluation,
    ) -> CellResult:
        """The result of all episodes of a plan, in its order. cell: names of the row and of the policy."""
        episodes = evaluation.episodes
        scores = scores_of(episodes, evaluation.verdicts)
        usage = sum(map(usage_of, episodes), Usage())
        failed = next((episode.failure for episode in episodes if episode.failure is not None), None)
        return cls(
            env=cell[0],
            policy=cell[1],
            identity=identity.as_json(),
            planned=len(plan),
            samples=1 + max((planned.sample for planned in plan), default=0),
            episodes=tuple(_episode(episode, scores.get(episode.id)) for episode in episodes),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            report=evaluation.report.as_json(),
            first_failure=None if failed is None else f"{failed.stage} {failed.kind}: {failed.detail}",
        )

    @classmethod
    def read(cls, folder: Path) -> CellResult | None:
        """The result in the folder of a cell; None = it is not finished.

        Raises:
            ConfigError: the file holds something else.
        """
        path = folder / RESULT
        try:
            return cls.model_validate_json(read_file(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise ConfigError(
                f"{path} holds no result ({reason}); remove that folder, or restore it."
            ) from None

    def write(self, folder: Path) -> None:
        """Write the file, whole or not at all."""
        write_text(folder / RESULT, self.model_dump_json(indent=1) + "\n")

    @property
    def by_task(self) -> dict[str, list[float]]:
        """The scores of the episodes of each task, in every world."""
        scores: defaultdict[str, list[float]] = defaultdict(list)
        for episode in self.episodes:
            if episode.score is not None:
                scores[episode.task].append(episode.score)
        return dict(scores)

    @property
    def units(self) -> dict[str, dict[str, list[float]]]:
        """The scores by what intervals are computed over, see `units_of`."""
        scored = ((e.task, first_of(e.id), e.score) for e in self.episodes)
        return units_of((task, prompt, score) for task, prompt, score in scored if score is not None)

    def row(self, prices: Prices | None, folder: str) -> dict[str, JSON]:
        """The row of the table. prices: None = no cost. folder: of the cell, below that of the benchmark."""
        report = cast(dict[str, dict[str, int]], self.report)
        usage = Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)
        cost = None if prices is None else prices.cost(usage)
        units, counts = self.units, report["counts"]
        clusters = [*pooled(units).values()]
        num_scored = sum(map(len, clusters))
        pass_at = {str(k): pass_of(units, k) for k in ks_of(self.samples)} if self.samples > 1 else {}
        violations = {name: counts[name] for name in VIOLATIONS if counts.get(name)}
        return {
            "env": self.env,
            "policy": self.policy,
            "state": "done",
            "error": None,
            "planned": self.planned,
            "scored": num_scored,
            "tasks": len(self.by_task),
            "samples": self.samples,
            "mean": as_json(mean_of(clusters)),
            "pass_at": {k: as_json(estimate) for k, estimate in pass_at.items()},
            "turns": self.report["turns"],
            "tokens": self.report["policy_tokens"],
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "cost": cost,
            "cost_per_episode": None if cost is None else cost / max(self.planned, 1),
            "violations": cast(JSON, violations),
            "invalid_moves": counts.get(INVALID_MOVES, 0),
            "failures": self.report["failures"],
            "first_failure": self.first_failure,
            "endings": self.report["endings"],
            "by": self.report["by"],
            "parts": self.report["parts"],
            "folder": folder,
        }


def unplayed_row(env: str, policy: str, error: str | None) -> dict[str, JSON]:
    """The row of a cell without a result. error: why it cannot be played; None = it was not played yet."""
    state = "waiting" if error is None else "error"
    return {"env": env, "policy": policy, "state": state, "error": error, "mean": None, "scored": 0}


def as_json(estimate: Estimate | None) -> JSON:
    """An estimate as a table; None where nothing was measured."""
    return None if estimate is None else dict(estimate._asdict())


def usage_of(episode: Episode) -> Usage:
    """The tokens of an episode as its endpoint counted them; without one, those that the engine received.

    The prompt of a turn is the complete prefix before it, so the tokens of a turn count in every later one.
    """
    if episode.usage is not None:
        return episode.usage
    prompt = completion = cached = 0
    for trajectory in episode.trajectories:
        prefix = 0
        for tokens in (turn.tokens for turn in trajectory.turns if trajectory.trainable):
            if tokens is not None and len(tokens.completion.token_ids):
                prefix += len(tokens.world_ids)
                prompt += prefix
                completion += len(tokens.completion.token_ids)
                cached += tokens.completion.cached_tokens
                prefix += len(tokens.completion.token_ids)
    return Usage(prompt, completion, cached)


def _episode(episode: Episode, score: float | None) -> EpisodeResult:
    failure = episode.failure.name if episode.failure else str(Ending.ABORTED)
    return EpisodeResult(
        id=episode.id,
        task=f"{episode.task.id} {task_digest(episode.task)}",
        score=score,
        turns=len(episode.turns),
        tokens=policy_tokens_of(episode),
        ending=str(episode.ending),
        failure=failure if episode.ending in UNUSABLE else None,
    )


def rows_by_env(rows: Sequence[Mapping[str, JSON]]) -> dict[str, list[Mapping[str, JSON]]]:
    """The rows of each environment, in the order of first mention."""
    by_env: defaultdict[str, list[Mapping[str, JSON]]] = defaultdict(list)
    for row in rows:
        by_env[str(row["env"])].append(row)
    return dict(by_env)

"""Every episode of a run on disk, with its verdict and what became of it.

The files of a run, under its folder:

    trajectories/step_000012.jsonl       the episodes of training step 12
    trajectories/eval_test_000012.jsonl  those of the evaluation `test` after step 12
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypedDict, cast

from agentrl.observe import lines
from agentrl.observe.episode_json import (
    EpisodeJSON,
    VerdictJSON,
    episode_from_json,
    episode_to_json,
    verdict_from_json,
    verdict_to_json,
)
from agentrl.types import Ending, Episode, Verdict


class Outcome(StrEnum):
    """What became of an episode."""

    TRAINED = "trained"
    DROPPED = "dropped"
    EVALUATED = "evaluated"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal. verdict None = never scored; reason: why it was dropped.

    Raises:
        ValueError: the verdict belongs to another episode, a drop has no reason (or another
            outcome has one), or a failed or unscored episode is said to be trained on.
    """

    episode: Episode
    verdict: Verdict | None
    outcome: Outcome
    reason: str = ""

    def __post_init__(self) -> None:
        episode, verdict = self.episode, self.verdict
        if verdict is not None and verdict.episode_id != episode.id:
            raise ValueError(f"the verdict of {verdict.episode_id} does not belong to episode {episode.id}")
        if (self.outcome is Outcome.DROPPED) != bool(self.reason):
            raise ValueError(f"episode {episode.id}: a reason stands exactly beside `dropped`")
        if self.outcome is Outcome.TRAINED and (verdict is None or episode.ending is Ending.FAILED):
            raise ValueError(f"episode {episode.id} failed or has no verdict; it cannot be trained on")


class EntryJSON(TypedDict):
    """An Entry."""

    outcome: str
    reason: str
    verdict: VerdictJSON | None
    episode: EpisodeJSON


class Journal:
    """Writes the episodes of one run. A step that was interrupted leaves whole lines only."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "trajectories"
        self._folder.mkdir(parents=True, exist_ok=True)

    def write_step(self, step: int, entries: Iterable[Entry]) -> Path:
        """Add episodes of a training step and return their file.

        Raises:
            OSError: the file cannot be written.
        """
        return self._write(f"step_{step:06d}.jsonl", entries)

    def write_eval(self, name: str, step: int, entries: Iterable[Entry]) -> Path:
        """Add episodes of the evaluation `name` after `step` and return their file.

        Raises:
            OSError: the file cannot be written.
        """
        safe = re.sub(r"[^A-Za-z0-9.-]+", "-", name)
        return self._write(f"eval_{safe}_{step:06d}.jsonl", entries)

    def _write(self, name: str, entries: Iterable[Entry]) -> Path:
        path = self._folder / name
        lines.append(path, (lines.to_line(_entry_to_json(entry)) for entry in entries))
        return path


def read_journal(path: Path) -> Iterator[Entry]:
    """The entries of one file, in order; a torn last line is passed over.

    Raises:
        ValueError: a line is not an entry.
    """
    for found in lines.read(path):
        # The file is ours; a foreign one fails below by a missing key.
        yield _entry_from_json(cast(EntryJSON, found))


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The books of a run: played = trained + the sum of dropped. problems: sentences, empty if sound."""

    played: int
    trained: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    evaluated: int = 0
    problems: tuple[str, ...] = ()


def reconcile(run_dir: Path, *, played: int | None = None) -> Reconciliation:
    """Count the journal of a run and check that every episode stands in it exactly once.

    Training ids are unique over the run, evaluation ids within their file.
    played: how many training episodes the run says it played; None = trust the journal.
    """
    problems: list[str] = []
    dropped: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    trained = evaluated = 0
    for path in sorted((run_dir / "trajectories").glob("*.jsonl")):
        is_eval = path.name.startswith("eval_")
        rows = [_row(found) for found in lines.read(path)]
        evaluated += len(rows) if is_eval else 0
        ids = Counter(id for id, _, _ in rows)
        problems += [f"{path.name} holds episode {id} {n} times." for id, n in ids.items() if n > 1]
        wrong = [id for id, outcome, _ in rows if (outcome == Outcome.EVALUATED) != is_eval]
        problems += [f"{path.name}: episode {id} has the wrong outcome for this file." for id in wrong]
        if not is_eval:
            problems += [f"episode {id} stands in {path.name} and in an earlier file." for id in ids & seen]
            seen += ids
            trained += sum(outcome == Outcome.TRAINED for _, outcome, _ in rows)
            dropped.update(reason for _, outcome, reason in rows if outcome == Outcome.DROPPED)
    if played is not None and played != len(seen):
        problems.append(f"the run played {played} episodes, its journal holds {len(seen)}.")
    return Reconciliation(len(seen), trained, dict(dropped), evaluated, tuple(problems))


def _row(found: object) -> tuple[str, str, str]:
    entry = cast(EntryJSON, found)
    return entry["episode"]["id"], entry["outcome"], entry["reason"]


def _entry_to_json(entry: Entry) -> EntryJSON:
    return {
        "outcome": entry.outcome.value,
        "reason": entry.reason,
        "verdict": None if entry.verdict is None else verdict_to_json(entry.verdict),
        "episode": episode_to_json(entry.episode),
    }


def _entry_from_json(found: EntryJSON) -> Entry:
    verdict = found["verdict"]
    return Entry(
        episode_from_json(found["episode"]),
        None if verdict is None else verdict_from_json(verdict),
        Outcome(found["outcome"]),
        found["reason"],
    )

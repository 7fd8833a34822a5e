"""The journal of a run: every episode, with its verdicts and its outcome.

The files of a run, under its folder:

    trajectories/step_000012.jsonl.gz       the episodes of training step 12
    trajectories/eval_test_000012.jsonl.gz  those of the evaluation `test` after step 12

Each is lines under gzip (see `members`) and can be read while it grows: with `zcat`, with
`pandas.read_json(path, lines=True)`, with `read_journal`. A line is an `Entry` as JSON, fields at their
defaults left out. One entry, shortened:

    {"outcome": "trained", "verdicts": [{"episode_id": "g3-0", "scorer": "env", "total": 1.0, "parts": {"env":
     1.0}}], "episode": {"id": "g3-0", "env_id": "HopSearch-v0", "task": {"id": "rl/3", "prompt": [
       {"role": "user", "content": "Where was P born?"}], "answer": "Torek"}, "seed": 7,
     "limits": {"max_turns": 5}, "trajectories": [{"turns": [{"observation": [...],
       "action": {"role": "assistant", "tool_calls": [{"name": "search", "arguments": {"query": "P"}}]},
       "tokens": {"world_ids": [4, 9], "completion": {"token_ids": [12, 3], "logprobs": [-0.1, -2.5],
         "versions": [8, 8], "finish": "stop", "matched": 3}}}]}],
     "step_rewards": [null, 1.0], "ending": "completed", "tools": {"search": {"calls": 1}}, "seconds": 0.2}}

Author and mask need no arrays of their own: `world_ids` are the world's and have mask 0, a completion's
`token_ids` are the policy's. A logprob has just the digits that restore the same float32. An entry that was
credited has `"advantages": {"agent": [0.7]}`, since only the run knew them: critics and whitening leave no
other trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import RecordError
from agentrl.records import lines, members
from agentrl.types import JSON, Ending, Episode, FloatArray, Verdict


class Outcome(StrEnum):
    """The outcome of an episode: trained on, dropped, recorded by a run that only plays, or evaluated."""

    TRAINED = "trained"
    DROPPED = "dropped"
    RECORDED = "recorded"
    EVALUATED = "evaluated"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal: an episode, its verdicts and its outcome.

    verdicts: one for each agent of the episode, in their order; none = never scored.
    outcome: what has become of the episode. reason: why it was dropped; "" = it was not.
    in_batch: false for a group that was dropped before its batch was complete: by the dynamic sampling
        filter, or of an over-sampled batch.
    start_version, end_version: see `Group`, if its group was complete.
    advantages: by agent, of the tokens that it sampled, in their order; a single one where all are equal. A
        record of the training that wrote the entry: a replay computes its own.

    Raises:
        ValueError: a verdict belongs to another episode, a drop has no reason (or another
            outcome has one), an episode of no batch has another outcome than `dropped`, or a failed or
            unscored one is `trained` or `recorded`.
    """

    episode: Episode
    verdicts: tuple[Verdict, ...]
    outcome: Outcome
    reason: str = ""
    in_batch: bool = True
    start_version: int = 0
    end_version: int | None = None
    advantages: Mapping[str, FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        episode = self.episode
        if foreign := {verdict.episode_id for verdict in self.verdicts} - {episode.id}:
            raise ValueError(f"verdicts of {sorted(foreign)} do not belong to episode {episode.id}")
        if (self.outcome is Outcome.DROPPED) != bool(self.reason):
            raise ValueError(
                f"episode {episode.id}: a reason belongs to the outcome `dropped`, and to no other"
            )
        if not self.in_batch and self.outcome is not Outcome.DROPPED:
            raise ValueError(f"episode {episode.id} was in no batch: it is `dropped`, not `{self.outcome}`")
        is_usable = bool(self.verdicts) and episode.ending is not Ending.FAILED
        if self.outcome in (Outcome.TRAINED, Outcome.RECORDED) and not is_usable:
            raise ValueError(f"episode {episode.id} failed or has no verdict; it cannot be trained on")

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the first agent; with one agent, the only verdict."""
        return self.verdicts[0] if self.verdicts else None


_ENTRIES = TypeAdapter(Entry)
SUFFIX: Final = ".jsonl.gz"


def to_line(entry: Entry) -> bytes:
    """One line, the newline included; a task's metadata may hold values that are no JSON."""
    return lines.to_line(_ENTRIES.dump_python(entry, exclude_defaults=True, warnings="none"))


def read_journal(path: str | PathLike[str]) -> Iterator[Entry]:
    """The entries of one file, in order; an incomplete last member is skipped.

    path: of a file such as `runs/first/trajectories/step_000012.jsonl.gz`. Entries are read one by one, as
    they are asked for.

    Raises:
        OSError: the file cannot be read.
        RecordError: it is a link, or broken before its last member; or a line is not an entry.
    """
    file = Path(path)
    return (entry_of(row, file) for row in members.read(file))


def find_entries(path: str | PathLike[str], id: str) -> Iterator[Entry]:
    """The entries of the episode with this id in one file: no other line becomes an `Entry`.

    Raises:
        OSError, RecordError: as for `read_journal`.
    """
    file = Path(path)
    return (entry_of(row, file) for row in members.read(file) if _id_of(row) == id)


def entry_of(row: Mapping[str, object], place: object) -> Entry:
    """The entry whose fields a row holds. place: of the row, for the sentence.

    Raises:
        RecordError: it is none.
    """
    try:
        return _ENTRIES.validate_python(row)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, problem["loc"]))
        raise RecordError(f"{place} holds no entry of a journal: {name}: {problem['msg']}") from None
    except (ArithmeticError, LookupError, TypeError, RecursionError) as error:
        # Of a constructor that was given other JSON than was written: pydantic passes these on.
        raise RecordError(f"{place} holds no entry of a journal: {error!r}") from None


def _id_of(row: dict[str, JSON]) -> JSON:
    episode = row.get("episode")
    return episode.get("id") if isinstance(episode, dict) else None


class EpisodeOutcome(NamedTuple):
    """An entry without its episode: the episode's id, its outcome, and the reason of a dropped one."""

    id: str
    outcome: str
    reason: str


def read_outcomes(path: Path) -> Iterator[EpisodeOutcome]:
    """The outcomes of one file, in order: many times as fast as `read_journal`.

    Raises:
        OSError, RecordError: as for `read_journal`.
    """
    for entry in members.read(path):
        id, outcome = _id_of(entry), entry.get("outcome")
        if not isinstance(id, str) or not isinstance(outcome, str):
            raise RecordError(f"{path} holds no entries of a journal")
        yield EpisodeOutcome(id, outcome, str(entry.get("reason", "")))


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The counts of a journal: played = trained + recorded + the sum of dropped.

    dropped: by reason. problems: a sentence each; none where the journal is consistent.
    """

    played: int
    trained: int
    recorded: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    evaluated: int = 0
    problems: tuple[str, ...] = ()


def reconcile(run_dir: Path, *, played: int | None = None) -> Reconciliation:
    """Count the journal of a run and check that it holds every episode exactly once.

    Training ids are unique over the run, evaluation ids within their file.

    run_dir: the run's folder. played: the number of training episodes that the run reports; None = the
    journal's own number.
    """
    problems: list[str] = []
    dropped: Counter[str] = Counter()
    training_ids: Counter[str] = Counter()
    trained = recorded = evaluated = 0
    for path in sorted((run_dir / "trajectories").glob(f"*{SUFFIX}")):
        is_eval = path.name.startswith("eval_")
        rows = list(read_outcomes(path))
        evaluated += len(rows) if is_eval else 0
        ids = Counter(id for id, _, _ in rows)
        problems += [f"{path.name} holds episode {id} {n} times." for id, n in ids.items() if n > 1]
        wrong = [id for id, outcome, _ in rows if (outcome == Outcome.EVALUATED) != is_eval]
        problems += [f"{path.name}: episode {id} has the wrong outcome for this file." for id in wrong]
        if not is_eval:
            problems += [
                f"episode {id} stands in {path.name} and in an earlier file." for id in ids & training_ids
            ]
            training_ids += ids
            trained += sum(outcome == Outcome.TRAINED for _, outcome, _ in rows)
            recorded += sum(outcome == Outcome.RECORDED for _, outcome, _ in rows)
            dropped.update(reason for _, outcome, reason in rows if outcome == Outcome.DROPPED)
    if played is not None and played != len(training_ids):
        problems.append(f"the run played {played} episodes, its journal holds {len(training_ids)}.")
    return Reconciliation(len(training_ids), trained, recorded, dict(dropped), evaluated, tuple(problems))

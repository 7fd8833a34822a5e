"""Every prompt of a run, once: trained, recorded, dropped with a reason, or skipped by the data source.

The lineage is `trajectories/`: what led to the present weights. What a restart undid is in `rolled_back/` and
is counted separately. Groups beyond the last checkpoint are of steps that a resumed run plays again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.records import EpisodeOutcome, Outcome, Reconciliation, read_metrics, read_outcomes, reconcile
from agentrl.records.history import JOURNAL, METRICS, ROLLED_BACK
from agentrl.run.checkpoints import Checkpoints
from agentrl.run.journal_entries import BROKEN_GROUP, GREEDY_BASELINE, REMOVED, ordinal_of
from agentrl.types import JSON

_SHOWN = 5
_USED = (Outcome.TRAINED, Outcome.RECORDED)


@dataclass(frozen=True, slots=True)
class Audit:
    """The prompts of a run, by what became of them (counts).

    started: prompts before the frontier of the last checkpoint. saved: those of them whose groups were in
    flight or waiting, which a resumed run plays again. ahead: prompts in the journal beyond the checkpoint.
    episodes: the same of episodes. recorded: prompts of a run that only plays. rolled_back: training episodes
    that restarts undid, by attempt. problems: sentences, empty if every prompt is accounted for once.
    """

    started: int
    trained: int
    recorded: int
    dropped: Mapping[str, int]
    skipped: int
    saved: int
    ahead: int
    episodes: Reconciliation
    rolled_back: Mapping[str, int]
    problems: Sequence[str]

    def as_json(self) -> dict[str, JSON]:
        """Plain values, in the order of the fields."""
        return asdict(self)


def audit(folder: Path) -> Audit:
    """Account for every prompt of the run in a folder.

    Raises:
        OSError, ValueError: a file of the journal is missing or broken.
    """
    outcomes: defaultdict[int, list[EpisodeOutcome]] = defaultdict(list)
    problems: list[str] = []
    for outcome in _training_outcomes(folder / JOURNAL):
        ordinal = ordinal_of(outcome.id)
        if ordinal is None:
            problems.append(f"episode {outcome.id} belongs to no prompt.")
        else:
            outcomes[ordinal].append(outcome)
    checkpoint = Checkpoints(folder / "checkpoints", keep=1).newest()
    state = None if checkpoint is None else checkpoint.state
    frontier = max(outcomes, default=-1) + 1 if state is None else state.next_ordinal
    saved = frozenset(() if state is None else state.pending)
    done = outcomes.keys() & set(range(frontier)) - saved
    fates = Counter(_fate(outcomes[ordinal]) for ordinal in sorted(done))
    missing = [ordinal for ordinal in range(frontier) if ordinal not in outcomes and ordinal not in saved]
    skipped = _num_skipped(folder / METRICS) + (0 if state is None else sum(state.skipped.values()))
    if len(missing) != skipped:
        problems.append(
            f"{len(missing)} prompts were started and stand nowhere (the first: {missing[:_SHOWN]}), and the "
            f"data source skipped {skipped}."
        )
    for n, group in outcomes.items():
        fate, _ = _fate(group)
        if fate in _USED and not _is_complete(group, fate):
            problems.append(f"prompt {n} was {fate} in part.")
    episodes = reconcile(folder)
    trained, recorded = (fates.pop((outcome, ""), 0) for outcome in _USED)
    dropped = {reason: number for (_, reason), number in fates.items()}
    return Audit(
        started=frontier,
        trained=trained,
        recorded=recorded,
        dropped=dropped,
        skipped=skipped,
        saved=len(saved),
        ahead=len(outcomes.keys() - done),
        episodes=episodes,
        rolled_back=_rolled_back(folder),
        problems=(*problems, *episodes.problems),
    )


def _rolled_back(folder: Path) -> dict[str, int]:
    """The training episodes that restarts undid, by attempt (count)."""
    return {
        path.name: sum(1 for _ in _training_outcomes(path / JOURNAL))
        for path in sorted((folder / ROLLED_BACK).glob("attempt_*"))
    }


def _training_outcomes(journal: Path) -> Iterator[EpisodeOutcome]:
    for path in sorted(journal.glob("step_*")):
        yield from read_outcomes(path)


def _fate(group: Sequence[EpisodeOutcome]) -> tuple[Outcome, str]:
    """The outcome of a group, and the reason of a dropped one."""
    for outcome in _USED:
        if any(episode.outcome == outcome for episode in group):
            return outcome, ""
    reasons = [e.reason for e in group if e.reason != GREEDY_BASELINE] or [GREEDY_BASELINE]
    return Outcome.DROPPED, BROKEN_GROUP if BROKEN_GROUP in reasons else reasons[-1]


def _is_complete(group: Sequence[EpisodeOutcome], outcome: Outcome) -> bool:
    """Whether each sibling has this outcome once, was taken out of the loss, or is a greedy baseline; failed
    attempts do not count."""
    siblings = {episode.id.partition("-retry")[0] for episode in group}
    ended = [e for e in group if e.outcome == outcome or e.reason.startswith((REMOVED, GREEDY_BASELINE))]
    return len(ended) == len(siblings)


def _num_skipped(metrics: Path) -> int:
    rows = read_metrics(metrics) if metrics.exists() else []
    skipped = [row[name] or 0 for row in rows for name in row if name.startswith("rollout/skipped/")]
    return round(sum(skipped))

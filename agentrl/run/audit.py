"""Every prompt of a run, once: trained, dropped with a reason, or skipped by the data source.

The lineage is `trajectories/`: what led to the present weights. What a restart undid is in `rolled_back/` and
is counted separately. Groups beyond the last checkpoint are of steps that a resumed run plays again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.observe import EpisodeOutcome, Outcome, Reconciliation, read_metrics, read_outcomes, reconcile
from agentrl.observe.history import JOURNAL, METRICS, ROLLED_BACK
from agentrl.run.checkpoints import Checkpoints
from agentrl.run.journal_entries import BROKEN_GROUP, REMOVED
from agentrl.types import JSON

_GROUP = re.compile(r"g(\d+)-")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Audit:
    """The prompts of a run, by what became of them (counts).

    started: prompts before the frontier of the last checkpoint. ahead: prompts of groups beyond it. episodes:
    the same of episodes. rolled_back: training episodes that restarts undid, by attempt. problems: sentences,
    empty if every prompt is accounted for once.
    """

    started: int
    trained: int
    dropped: Mapping[str, int]
    skipped: int
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
        match = _GROUP.match(outcome.id)
        if match is None:
            problems.append(f"episode {outcome.id} belongs to no prompt.")
        else:
            outcomes[int(match[1])].append(outcome)
    checkpoint = Checkpoints(folder / "checkpoints", keep=1).newest()
    frontier = max(outcomes, default=-1) + 1 if checkpoint is None else checkpoint.state.next_ordinal
    fates = Counter(_fate(outcomes[ordinal]) for ordinal in outcomes if ordinal < frontier)
    missing = [ordinal for ordinal in range(frontier) if ordinal not in outcomes]
    skipped = _num_skipped(folder / METRICS)
    if len(missing) != skipped:
        problems.append(
            f"{len(missing)} prompts were started and stand nowhere (the first: {missing[:_SHOWN]}), and the "
            f"data source skipped {skipped}."
        )
    both = [n for n, group in outcomes.items() if _fate(group) == "" and not _is_trained_whole(group)]
    problems += [f"prompt {n} was trained in part." for n in both]
    episodes = reconcile(folder)
    rolled_back = {
        path.name: sum(1 for _ in _training_outcomes(path / JOURNAL))
        for path in sorted((folder / ROLLED_BACK).glob("attempt_*"))
    }
    trained = fates.pop("", 0)
    ahead = sum(ordinal >= frontier for ordinal in outcomes)
    found = (*problems, *episodes.problems)
    return Audit(frontier, trained, dict(fates), skipped, ahead, episodes, rolled_back, found)


def _training_outcomes(journal: Path) -> Iterator[EpisodeOutcome]:
    for path in sorted(journal.glob("step_*")):
        yield from read_outcomes(path)


def _fate(group: Sequence[EpisodeOutcome]) -> str:
    """Why a group was dropped; "" = it was trained."""
    if any(outcome.outcome == Outcome.TRAINED for outcome in group):
        return ""
    reasons = [outcome.reason for outcome in group]
    return BROKEN_GROUP if BROKEN_GROUP in reasons else reasons[-1]


def _is_trained_whole(group: Sequence[EpisodeOutcome]) -> bool:
    """Whether each sibling was trained once or taken out of the loss; failed attempts do not count."""
    siblings = {outcome.id.partition("-retry")[0] for outcome in group}
    ended = [o for o in group if o.outcome == Outcome.TRAINED or o.reason.startswith(REMOVED)]
    return len(ended) == len(siblings)


def _num_skipped(metrics: Path) -> int:
    rows = read_metrics(metrics) if metrics.exists() else []
    skipped = [row[name] or 0 for row in rows for name in row if name.startswith("rollout/skipped/")]
    return round(sum(skipped))

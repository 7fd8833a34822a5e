"""The records of a run: metrics of every step and every episode, as JSON lines."""

from agentrl.records.journal import (
    Entry,
    EpisodeOutcome,
    Outcome,
    Reconciliation,
    find_entries,
    read_journal,
    read_outcomes,
    reconcile,
)
from agentrl.records.metrics import (
    Earlier,
    JsonlTracker,
    MetricLog,
    Record,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    read_metrics,
)
from agentrl.records.writer import Journal

__all__ = [
    "Earlier",
    "Entry",
    "EpisodeOutcome",
    "Journal",
    "JsonlTracker",
    "MetricLog",
    "Outcome",
    "Reconciliation",
    "Record",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "find_entries",
    "read_journal",
    "read_metrics",
    "read_outcomes",
    "reconcile",
]

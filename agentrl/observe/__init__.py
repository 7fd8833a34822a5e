"""The records of a run: metrics of every step and every episode, as JSON lines."""

from agentrl.observe.journal import Entry, Outcome, Reconciliation, read_journal, reconcile
from agentrl.observe.metrics import JsonlTracker, MetricLog, Record, TensorBoardTracker, Tracker, read_metrics
from agentrl.observe.writer import Journal

__all__ = [
    "Entry",
    "Journal",
    "JsonlTracker",
    "MetricLog",
    "Outcome",
    "Reconciliation",
    "Record",
    "TensorBoardTracker",
    "Tracker",
    "read_journal",
    "read_metrics",
    "reconcile",
]

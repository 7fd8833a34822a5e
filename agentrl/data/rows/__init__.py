"""Rows of files as JSON objects, addressed by number."""

from agentrl.data.rows.base import Chained, Row, Rows, Sliced
from agentrl.data.rows.opening import open_rows

__all__ = ["Chained", "Row", "Rows", "Sliced", "open_rows"]

"""Spreadsheet: formulas to mend and to fill in, and questions about a table."""

from envs_contrib.spreadsheet.env import Spreadsheet

__all__ = ["Spreadsheet"]

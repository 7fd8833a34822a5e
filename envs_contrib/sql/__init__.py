"""Sql: questions about seeded SQLite databases, answered with read-only queries."""

from envs_contrib.sql.env import Sql

__all__ = ["Sql"]

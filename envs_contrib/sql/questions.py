"""Questions about a database, of nine kinds, each with the query that answers it.

where, join, distinct, average     one value
group                              one name
having, nested, missing            rows in any order
order                              rows in their order
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from typing import NamedTuple

from envs_contrib.sql.answers import Rows
from envs_contrib.sql.database import YEARS, Database, database

MOST_ROWS = 10
_EACH = 3
_TRIES = 12


class Question(NamedTuple):
    """rows: the answer. is_ordered: whether the order of its rows counts."""

    kind: str
    text: str
    sql: str
    rows: Rows
    is_ordered: bool


class _Draft(NamedTuple):
    text: str
    sql: str
    is_ordered: bool = False


_Maker = Callable[[random.Random, Database], _Draft]


def _group_parts(world: Database) -> tuple[str, str]:
    """SQL for the group of an item `i`: the expression, and the join that it needs."""
    d = world.domain
    if not world.has_group_table:
        return f"i.{d.group}", ""
    return "g.name", f" JOIN {d.groups} g ON g.id = i.{d.group}_id"


def _where(rng: random.Random, world: Database) -> _Draft:
    d, place = world.domain, rng.choice(world.people).place
    text = f"How many {d.people} have the {d.place} {place}?"
    return _Draft(text, f"SELECT COUNT(*) FROM {d.people} WHERE {d.place} = '{place}'")


def _join(rng: random.Random, world: Database) -> _Draft:
    d, name = world.domain, rng.choice(world.people).name
    text = f"What is the sum of {d.amount} over all {d.events} of the {d.person} {name}?"
    sql = (
        f"SELECT SUM(e.{d.amount}) FROM {d.events} e JOIN {d.people} p ON p.id = e.{d.person}_id "
        f"WHERE p.name = '{name}'"
    )
    return _Draft(text, sql)


def _distinct(rng: random.Random, world: Database) -> _Draft:
    d, place, year = world.domain, rng.choice(world.people).place, rng.choice(YEARS)
    text = (
        f"How many different {d.items} are in the {d.events} of the year {year} by {d.people} with the "
        f"{d.place} {place}?"
    )
    sql = (
        f"SELECT COUNT(DISTINCT e.{d.item}_id) FROM {d.events} e JOIN {d.people} p ON p.id = e.{d.person}_id "
        f"WHERE p.{d.place} = '{place}' AND e.year = {year}"
    )
    return _Draft(text, sql)


def _average(rng: random.Random, world: Database) -> _Draft:
    d, group = world.domain, rng.choice(world.items).group
    expression, join = _group_parts(world)
    text = f"What is the average of {d.value} over all {d.items} of the {d.group} {group}, to two decimals?"
    return _Draft(
        text, f"SELECT ROUND(AVG(i.{d.value}), 2) FROM {d.items} i{join} WHERE {expression} = '{group}'"
    )


def _group(rng: random.Random, world: Database) -> _Draft:
    d, year = world.domain, rng.choice(YEARS)
    expression, join = _group_parts(world)
    text = f"Which {d.group} of {d.items} has the largest sum of {d.amount} in the {d.events} of {year}?"
    # A rank keeps all groups where several are first; such a question is left out.
    sql = (
        f"SELECT name FROM (SELECT {expression} AS name, "
        f"RANK() OVER (ORDER BY SUM(e.{d.amount}) DESC) AS place "
        f"FROM {d.events} e JOIN {d.items} i ON i.id = e.{d.item}_id{join} WHERE e.year = {year} "
        f"GROUP BY {expression}) WHERE place = 1"
    )
    return _Draft(text, sql)


def _having(rng: random.Random, world: Database) -> _Draft:
    d, least = world.domain, rng.randint(6, 10)
    text = f"Which {d.people} have at least {least} {d.events}? List their names."
    sql = (
        f"SELECT p.name FROM {d.people} p JOIN {d.events} e ON e.{d.person}_id = p.id GROUP BY p.id "
        f"HAVING COUNT(*) >= {least}"
    )
    return _Draft(text, sql)


def _nested(rng: random.Random, world: Database) -> _Draft:
    d, group = world.domain, rng.choice(world.items).group
    expression, join = _group_parts(world)
    rest = f"FROM {d.items} i{join} WHERE {expression} = '{group}'"
    text = (
        f"Which {d.items} of the {d.group} {group} have more {d.value} than the average of that {d.group}? "
        "List their names."
    )
    sql = f"SELECT i.name {rest} AND i.{d.value} > (SELECT AVG(i.{d.value}) {rest})"
    return _Draft(text, sql)


def _missing(rng: random.Random, world: Database) -> _Draft:
    d, place, year = world.domain, rng.choice(world.people).place, rng.choice(YEARS)
    text = f"Which {d.people} with the {d.place} {place} have no {d.events} in {year}? List their names."
    sql = (
        f"SELECT p.name FROM {d.people} p WHERE p.{d.place} = '{place}' AND NOT EXISTS "
        f"(SELECT 1 FROM {d.events} e WHERE e.{d.person}_id = p.id AND e.year = {year})"
    )
    return _Draft(text, sql)


def _order(rng: random.Random, world: Database) -> _Draft:
    d, year = world.domain, rng.choice(YEARS)
    text = (
        f"Which three {d.items} have the largest sums of {d.amount} in the {d.events} of {year}? List each "
        "name with its sum, the largest first."
    )
    # A question whose sums are equal has no one order, and is left out.
    sql = (
        f"SELECT name, total FROM (SELECT i.name AS name, SUM(e.{d.amount}) AS total, "
        f"RANK() OVER (ORDER BY SUM(e.{d.amount}) DESC) AS place FROM {d.events} e "
        f"JOIN {d.items} i ON i.id = e.{d.item}_id WHERE e.year = {year} GROUP BY i.id) "
        "WHERE place <= 3 ORDER BY total DESC"
    )
    return _Draft(text, sql, is_ordered=True)


MAKERS: Mapping[str, _Maker] = {
    "where": _where,
    "join": _join,
    "distinct": _distinct,
    "average": _average,
    "group": _group,
    "having": _having,
    "nested": _nested,
    "missing": _missing,
    "order": _order,
}
_NUM_ROWS: Mapping[str, Sequence[int]] = {"group": (1,), "order": (3,)}


@lru_cache(maxsize=256)
def questions(seed: str) -> tuple[Question, ...]:
    """The questions about the database of a seed: up to three of each kind, no two with the same text."""
    rng, world = random.Random(f"questions {seed}"), database(seed)
    by_text: dict[str, Question] = {}
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(world.script)
        for kind in MAKERS:
            drafts = (MAKERS[kind](rng, world) for _ in range(_TRIES))
            answered = (_answered(kind, draft, connection) for draft in drafts)
            fitting = {question.text: question for question in answered if _is_fitting(question)}
            by_text |= dict(list(fitting.items())[:_EACH])
    return tuple(by_text.values())


def _answered(kind: str, draft: _Draft, connection: sqlite3.Connection) -> Question:
    rows = [list(row) for row in connection.execute(draft.sql)]
    return Question(kind, draft.text, draft.sql, rows, draft.is_ordered)


def _is_fitting(question: Question) -> bool:
    """Whether there are a few rows, and no cell is empty, trivial or a word of the question."""
    words = set(re.findall(r"[\w.]+", question.text.lower()))
    cells = [cell for row in question.rows for cell in row]
    has_rows = len(question.rows) in _NUM_ROWS.get(question.kind, range(1, MOST_ROWS + 1))
    has_order = not question.is_ordered or len({row[-1] for row in question.rows}) == len(question.rows)
    return (has_rows and has_order) and all(
        cell is not None and cell not in (0, 1) and not set(str(cell).lower().split()) <= words
        for cell in cells
    )

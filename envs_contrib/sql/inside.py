"""Code of the database that runs inside the sandbox: it is built there, and queried read-only.

It imports the standard library only. Queries are a model's: they get a connection that cannot write, an
authorizer that allows reading and known functions, SQLite's own limits, and bounds on steps, seconds, rows
and characters. What these miss, such as a statement that takes forever to be parsed, the limits of the
sandbox end.
"""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing

FILE = "/tmp/database.sqlite"
MOST_ROWS = 50
MOST_CELL_CHARS = 200
MOST_CHARS = 6000
MOST_SQL_CHARS = 5000
MOST_STEPS = 5_000_000
MOST_SECONDS = 2.0
_STEPS_A_CHECK = 10_000

FUNCTIONS = frozenset(
    {
        *("abs", "avg", "coalesce", "count", "group_concat", "ifnull", "iif", "instr", "length"),
        *("like", "glob", "lower", "ltrim", "max", "min", "nullif", "round", "rtrim", "sign", "substr"),
        *("substring", "sum", "total", "trim", "typeof", "upper"),
        *("row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile", "lag", "lead"),
        *("first_value", "last_value", "nth_value"),
    }
)
"""The functions that a query may call: none of them reads a file, draws a number or makes a large value."""
_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MOST_SQL_CHARS * 4,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


def build(script: str) -> None:
    """Write the database. script: statements that create and fill its tables."""
    with closing(sqlite3.connect(FILE)) as database:
        database.executescript(script)


def query(sql: str) -> None:
    """Print a JSON object: columns, rows, and whether there are more rows; or the error."""
    try:
        with closing(_opened()) as database:
            reply = _result(database.execute(sql))
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        reply = {"error": str(error)[:MOST_CELL_CHARS]}
    print(json.dumps(reply))


def _opened() -> sqlite3.Connection:
    """A connection that can only read, with all bounds on what a statement may do."""
    database = sqlite3.connect(f"file:{FILE}?mode=ro", uri=True, isolation_level=None)
    for limit, number in _LIMITS.items():
        database.setlimit(limit, number)
    database.text_factory = _decoded
    database.set_authorizer(_authorize)
    deadline, rest = time.monotonic() + MOST_SECONDS, MOST_STEPS // _STEPS_A_CHECK

    def is_over() -> int:
        nonlocal rest
        rest -= 1
        return int(rest < 0 or time.monotonic() > deadline)

    database.set_progress_handler(is_over, _STEPS_A_CHECK)
    return database


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _authorize(
    action: int, first: str | None, second: str | None, database: str | None, source: str | None
) -> int:
    """Allow reading, and the functions of the table; `second` is the name of a function."""
    del first, database, source
    is_allowed = action in _ACTIONS or (action == sqlite3.SQLITE_FUNCTION and second in FUNCTIONS)
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _result(cursor: sqlite3.Cursor) -> dict[str, object]:
    if cursor.description is None:
        return {"error": "this is no query; write one SELECT statement"}
    rows: list[list[object]] = []
    num_chars = 0
    for row in cursor:
        cells = [_cell(value) for value in row]
        num_chars += sum(len(str(cell)) for cell in cells)
        if len(rows) == MOST_ROWS or num_chars > MOST_CHARS:
            return {"columns": _names(cursor), "rows": rows, "more": True}
        rows.append(cells)
    return {"columns": _names(cursor), "rows": rows, "more": False}


def _names(cursor: sqlite3.Cursor) -> list[str]:
    return [str(column[0])[:MOST_CELL_CHARS] for column in cursor.description]


def _cell(value: object) -> object:
    if isinstance(value, bytes):
        return value[: MOST_CELL_CHARS // 2].hex()
    return value[:MOST_CELL_CHARS] if isinstance(value, str) else value

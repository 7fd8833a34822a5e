"""The environment: two tools over a database in the sandbox, and the comparison of the answer."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from agentrl import Limits, Message, Script, Task, ToolEnv, ToolRejected, UserError, call, say, tool
from agentrl.tools import JSON, PythonInterpreter, PythonTool, inline
from envs_contrib.sql import inside
from envs_contrib.sql.answers import Rows, as_text, is_right
from envs_contrib.sql.database import database
from envs_contrib.sql.questions import Question, questions

NUM_DATABASES: Mapping[str, int] = {"train": 24, "test": 6}
"""Databases of each split; no database is in two splits."""
CONCURRENT_QUERIES = 2 * (os.cpu_count() or 1)
_FORM = "Answer with the value alone; of several rows write one a line, with ` | ` between its cells."
_INSIDE = Path(inside.__file__).read_text(encoding="utf-8")


class _Reply(BaseModel):
    """What `inside.query` prints."""

    columns: list[str] = []
    rows: list[list[str | int | float | None]] = []
    more: bool = False
    error: str | None = None


_REPLY = TypeAdapter(_Reply)


class Sql(ToolEnv):
    """Questions about a seeded SQLite database, answered with read-only queries.

    Domain, tables, names and rows are drawn from the seed. The answer is a value, or rows; they are compared
    with the result of the right query, in any order where the question has none. Queries run in the sandbox.

    seed: of all databases and questions.
    """

    group = "code"
    needs = ("sandbox",)
    breakdown = "kind"
    limits = Limits(max_turns=8, max_tokens=4096)

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self._world = ""
        self._interpreter: PythonInterpreter | None = None

    @tool(inline=True)
    def schema(self) -> str:
        """Show the tables with their columns and their numbers of rows."""
        return database(self._world).described()

    @tool(max_concurrency=CONCURRENT_QUERIES)
    async def query(self, sql: str) -> str:
        """Run one SELECT statement of SQLite and return its rows.

        Args:
            sql: the statement
        """
        text = sql.encode("utf-8", "replace").decode()
        if len(text) > inside.MOST_SQL_CHARS:
            raise ToolRejected(
                f"the statement is too long; write at most {inside.MOST_SQL_CHARS:,} characters."
            )
        if self._interpreter is None:
            self._interpreter = _sandbox().interpreter(f"{_INSIDE}\nbuild({database(self._world).script!r})")
        result = await self._interpreter.run(f"query({text!r})")
        if result.outcome != "done":
            # It raises nothing but a MemoryError, where the kernel's limit of one process comes first.
            kind = "memory" if result.outcome == "error" else result.outcome
            raise ToolRejected("the query was stopped: it takes too much time or memory.", kind)
        return _table(_REPLY.validate_json(result.output))

    tools = (schema, query)

    def tasks(self, split: str) -> Sequence[Task]:
        """The questions about all databases of a split: train or test.

        Raises:
            UserError: no such split.
        """
        if split not in NUM_DATABASES:
            raise UserError(f"Sql has no split `{split}`; it has {', '.join(NUM_DATABASES)}.")
        return _tasks(self.seed, split)

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Begin a question; its database is built with the first query."""
        self._world = str(task.metadata.get("database", ""))
        return await super().reset(task, seed=seed)

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """1.0 where the answer has the rows of the right query."""
        return float(is_right(answer, _rows(task), is_ordered=bool(task.metadata.get("ordered"))))

    async def close(self) -> None:
        """End the interpreter that holds the database."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            await interpreter.close()
        await super().close()

    def expert(self, task: Task) -> Script:
        """Looks at the schema, runs the right query, and answers with its rows."""
        yield call("schema")
        table = yield call("query", sql=str(task.metadata["sql"]))
        yield say("\n".join(table.splitlines()[1:-1]))

    def corpus(self) -> Iterable[str]:
        """Questions, schemas, queries and answers."""
        for task in self.tasks("train"):
            yield task.prompt[0].text
            yield str(task.metadata["sql"])
            yield task.answer or ""
        for number in range(NUM_DATABASES["train"]):
            yield database(_world_seed(self.seed, "train", number)).described()


def _table(reply: _Reply) -> str:
    """The result for the model: names of columns, rows, and their number.

    Raises:
        ToolRejected: the statement is wrong, not allowed, or exceeded a limit.
    """
    if reply.error == "interrupted":
        raise ToolRejected(
            "the query was stopped: it takes too many steps; join or filter earlier.", "timeout"
        )
    if reply.error is not None:
        hint = " Only SELECT is allowed." if reply.error.startswith("not authorized") else ""
        raise ToolRejected(f"SQL error: {reply.error.rstrip('.')}.{hint}", "sql")
    number = f"({len(reply.rows)} rows)"
    if reply.more:
        number = f"(the first {len(reply.rows)} rows; more are left out)"
    return "\n".join([as_text([reply.columns]), *([as_text(reply.rows)] if reply.rows else []), number])


def _rows(task: Task) -> Rows:
    rows = task.metadata.get("rows")
    return [row for row in rows if isinstance(row, list)] if isinstance(rows, list) else []


@lru_cache(maxsize=1)
def _sandbox() -> PythonTool:
    """One for all episodes. What a query may take: 2 s of CPU time, 256 MB."""
    return PythonTool(
        name="sql", stateful=True, preload=("sqlite3",), wall_s=5.0, cpu_s=2.0, memory_mb=256, files_mb=32,
        processes=4, output_bytes=200_000,
    )  # fmt: skip


def _world_seed(seed: int, split: str, number: int) -> str:
    return f"{seed} {split} {number}"


@lru_cache(maxsize=16)
def _tasks(seed: int, split: str) -> tuple[Task, ...]:
    worlds = [_world_seed(seed, split, number) for number in range(NUM_DATABASES[split])]
    tasks = [
        _task(f"{split}-{number}-{place}", world, question, split)
        for number, world in enumerate(worlds)
        for place, question in enumerate(questions(world))
    ]
    # The first tasks are those of an evaluation: they come from all databases, and are of all kinds.
    random.Random(f"order {seed} {split}").shuffle(tasks)
    return tuple(tasks)


def _task(id: str, world: str, question: Question, split: str) -> Task:
    metadata: dict[str, JSON] = {
        "kind": question.kind,
        "database": world,
        "sql": question.sql,
        "ordered": question.is_ordered,
        "rows": [
            [cell if isinstance(cell, int | float) else str(cell) for cell in row] for row in question.rows
        ],
    }
    prompt = (Message("user", f"{question.text} {_FORM}"),)
    return Task(id, prompt, as_text(question.rows), metadata, split)

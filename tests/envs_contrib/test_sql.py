"""Sql: questions against brute force over the rows, answers as text, and attacks on the database."""

from __future__ import annotations

import re
import time
from collections import Counter
from statistics import fmean

import pytest
import pytest_asyncio

from agentrl import ScriptedAgent, UserError, call, play
from agentrl.tools import release_shared
from agentrl.types import Ending
from envs_contrib.sql import Sql, inside
from envs_contrib.sql.answers import as_text, is_right
from envs_contrib.sql.database import DOMAINS, Database, database
from envs_contrib.sql.questions import MAKERS, questions

SEEDS = [f"0 train {number}" for number in range(12)]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _released():
    """One sandbox for all tests: the event loop of the module has it."""
    yield
    await release_shared()


@pytest_asyncio.fixture(loop_scope="module")
async def sql():
    """An episode, at its beginning."""
    env = Sql()
    await env.reset(env.tasks("test")[0], seed=0)
    yield env
    await env.close()


async def ask(env: Sql, text: str) -> str:
    """The result of a query, as the model reads it."""
    step = await env.step(call("query", sql=text))
    return step.observation[0].text


class Rows:
    """The rows of a database, looked up and summed in Python."""

    def __init__(self, world: Database) -> None:
        self.world = world
        self.people = {person.id: person for person in world.people}
        self.items = {item.id: item for item in world.items}

    def of_place(self, place):
        return [person for person in self.world.people if person.place == place]

    def of_group(self, group):
        return [item.value for item in self.world.items if item.group == group]

    def events_of(self, person, year=None):
        return [e for e in self.world.events if e.person == person.id and year in (None, e.year)]

    def totals(self, year, column):
        sums: Counter[str] = Counter()
        for event in self.world.events:
            if event.year == int(year):
                sums[getattr(self.items[event.item], column)] += event.amount
        return sums.most_common(3)


def _join(rows, first, last):
    (person,) = [person for person in rows.world.people if person.name == f"{first} {last}"]
    return [(sum(event.amount for event in rows.events_of(person)),)]


def _distinct(rows, year, place):
    events = [e for e in rows.world.events if rows.people[e.person].place == place and e.year == int(year)]
    return [(len({event.item for event in events}),)]


def _nested(rows, group):
    items = [item for item in rows.world.items if item.group == group]
    return [(item.name,) for item in items if item.value > fmean(rows.of_group(group))]


BRUTE_FORCE = {
    "where": lambda rows, place: [(len(rows.of_place(place)),)],
    "join": _join,
    "distinct": _distinct,
    "average": lambda rows, group: [(round(fmean(rows.of_group(group)), 2),)],
    "group": lambda rows, year: [rows.totals(year, "group")[0][:1]],
    "having": lambda rows, n: [(p.name,) for p in rows.world.people if len(rows.events_of(p)) >= int(n)],
    "nested": _nested,
    "missing": lambda rows, place, year: [
        (p.name,) for p in rows.of_place(place) if not rows.events_of(p, int(year))
    ],
    "order": lambda rows, year: rows.totals(year, "name"),
}
"""By kind: the answer from the rows and the names and numbers of the question, in their order."""


def parameters(text: str) -> list[str]:
    """The names and numbers of a question, without its first word and without the demand for a list."""
    return re.findall(r"[A-Z][a-z]+|\d+", text.partition(" ")[2].replace("List", ""))


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_answers_are_those_of_brute_force(seed):
    rows_of_world, asked = Rows(database(seed)), questions(seed)
    assert {question.kind for question in asked} <= set(MAKERS)
    for question in asked:
        expected = BRUTE_FORCE[question.kind](rows_of_world, *parameters(question.text))
        rows = [tuple(row) for row in question.rows]
        same = rows == expected if question.is_ordered else Counter(rows) == Counter(expected)
        assert same, (question.text, rows, expected)


async def test_the_worlds_have_every_kind_domain_and_form():
    tasks = Sql().tasks("train")
    assert set(Counter(task.metadata["kind"] for task in tasks)) == set(MAKERS)
    worlds = [database(str(task.metadata["database"])) for task in tasks]
    assert {world.domain for world in worlds} == set(DOMAINS)
    assert {world.has_group_table for world in worlds} == {True, False}
    assert database.__wrapped__(SEEDS[0]) == database(SEEDS[0])
    assert questions.__wrapped__(SEEDS[0]) == questions(SEEDS[0])
    splits = {split: {task.metadata["database"] for task in Sql().tasks(split)} for split in Sql.splits}
    assert not splits["train"] & splits["test"]
    assert len(Sql().tasks("test")) > 100
    prompts = {split: {(task.prompt, task.answer) for task in Sql().tasks(split)} for split in Sql.splits}
    assert not prompts["train"] & prompts["test"]


async def test_the_expert_answers_a_question_of_each_kind():
    tasks = {task.metadata["kind"]: task for task in Sql().tasks("test")}
    assert set(tasks) == set(MAKERS)
    for task in tasks.values():
        env = Sql()
        episode = await play(env, ScriptedAgent(env.expert(task)), task)
        assert episode.ending is Ending.COMPLETED, episode.failure
        assert episode.step_rewards[-1] == 1.0


async def test_right_rows_are_right_in_every_spelling_and_wrong_ones_never():
    rows = [["Anna Berg", 12], ["Cleo", 3.5]]
    assert as_text(rows) == "Anna Berg | 12\nCleo | 3.5"
    table = {
        "Anna Berg | 12\nCleo | 3.5": (True, True),
        "  anna  berg|12.00\n\n CLEO | 3.50 \n": (True, True),
        "Cleo | 3.5\nAnna Berg | 12": (False, True),
        "Anna Berg | 12": (False, False),
        "Anna Berg | 12\nCleo | 3.5\nCleo | 3.5": (False, False),
        "Anna Berg | 12\nCleo | 3.6": (False, False),
        "Anna Berg, 12\nCleo, 3.5": (False, False),
        "": (False, False),
        "Anna Berg | 12\nCleo | 3.5\n" + "x" * 6000: (False, False),
    }
    for answer, (ordered, unordered) in table.items():
        assert is_right(answer, rows, is_ordered=True) is ordered, answer
        assert is_right(answer, rows, is_ordered=False) is unordered, answer
    assert is_right("1,234", [[1234]], is_ordered=False)
    assert not is_right("nan", [[0]], is_ordered=False)
    assert not is_right("", [[""]], is_ordered=False)


async def test_results_are_tables_and_bounded(sql):
    table = database(str(sql.task.metadata["database"])).domain.events
    assert re.fullmatch(
        r"n \| x\n140 \| a\n\(1 rows\)", await ask(sql, f"SELECT count(*) n, 'a' x FROM {table}")
    )
    many = await ask(sql, f"SELECT * FROM {table}")
    assert many.endswith(f"(the first {inside.MOST_ROWS} rows; more are left out)")
    wide = await ask(sql, f"SELECT group_concat(id) a FROM {table}, (SELECT 1 FROM {table})")
    assert len(wide) < inside.MOST_CELL_CHARS + 50
    assert len(await ask(sql, "SELECT 'é\ud800', x'ff', 9e999, NULL, cast(x'ff' as text)")) < 300
    assert "140 rows" in (await sql.step(call("schema"))).observation[0].text


RECURSION = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {} FROM c"
REFUSED = {
    "ATTACH DATABASE '/tmp/x' AS other": "Only SELECT is allowed",
    "PRAGMA query_only = 0": "Only SELECT is allowed",
    "SELECT * FROM pragma_database_list": "Only SELECT is allowed",
    "SELECT load_extension('/lib/libc.so.6')": "Only SELECT is allowed",
    "SELECT readfile('/etc/passwd')": "no such function",
    "SELECT writefile('/tmp/x', 'y')": "no such function",
    "SELECT fts3_tokenizer('simple')": "SQL error",
    "INSERT INTO {table} VALUES (999, 1, 1, 1, 1)": "Only SELECT is allowed",
    "UPDATE {table} SET year = 1": "Only SELECT is allowed",
    "DELETE FROM {table}": "Only SELECT is allowed",
    "DROP TABLE {table}": "Only SELECT is allowed",
    "CREATE TEMP TABLE t (a)": "Only SELECT is allowed",
    "VACUUM INTO '/tmp/copy'": "SQL error",
    "BEGIN IMMEDIATE": "Only SELECT is allowed",
    "SELECT 1; DELETE FROM {table}": "one statement",
    "SELECT zeroblob(1000000000)": "Only SELECT is allowed",
    "SELECT randomblob(1000000000)": "Only SELECT is allowed",
    "SELECT printf('%*d', 1000000000, 1)": "Only SELECT is allowed",
    "WITH RECURSIVE c(x) AS (SELECT 'x' UNION ALL SELECT x || x FROM c) SELECT max(x) FROM c": "too big",
    RECURSION.format("max(x)"): "was stopped",
    RECURSION.format("x") + " ORDER BY x": "was stopped",
    "SELECT count(*) FROM {table} a, {table} b, {table} c, {table} d": "was stopped",
    "SELECT " + "(" * 500 + "1" + ")" * 500: "SQL error",
    "SELECT \0": "null character",
    "x" * 6000: "too long",
    "": "write one SELECT statement",
}


async def test_what_is_no_query_is_refused_and_changes_nothing(sql):
    table = database(str(sql.task.metadata["database"])).domain.events
    for text, sentence in REFUSED.items():
        began = time.monotonic()
        assert sentence in await ask(sql, text.replace("{table}", table)), text[:80]
        assert time.monotonic() - began < 8, text[:80]
    assert (await ask(sql, f"SELECT count(*), max(id) FROM {table}")).splitlines()[1] == "140 | 140"
    # A row at a time is no flood: the first rows come, and the rest is never computed.
    assert "more are left out" in await ask(sql, RECURSION.format("x"))


async def test_a_statement_that_is_parsed_forever_ends_by_the_limits_of_the_sandbox(sql):
    tables = ", ".join(f"c{n}(x) AS (SELECT 1 FROM c{n - 1}, c{n - 1})" for n in range(1, 40))
    bomb = f"WITH c0(x) AS (SELECT 1), {tables} SELECT 1 FROM c39"
    assert "takes too much time or memory" in await ask(sql, bomb)
    assert (await ask(sql, "SELECT 1 one")).splitlines() == ["one", "1", "(1 rows)"]
    rejected = sql.tool_stats["query"].rejected
    assert set(rejected) <= {"cpu", "memory", "timeout"}


async def test_an_unknown_split_is_a_one_sentence_error():
    with pytest.raises(UserError, match="no split `dev`; it has train, test"):
        Sql().tasks("dev")

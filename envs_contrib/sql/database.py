"""Seeded databases: people, items, and events that join them, under the words of a domain.

The seed chooses the domain, the names, the numbers, and whether the groups of items are a column or a table
of their own. Names are made of syllables, so no answer is known from elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

YEARS = (2021, 2022, 2023, 2024)
_SYLLABLES = tuple(a + b for a, b in product("bdfgklmnprstv", "aeiou"))


class Domain(NamedTuple):
    """The words of tables and columns: a table's name is its plural.

    place: a column of people. group, value: columns of items. amount: a column of events.
    """

    person: str
    people: str
    place: str
    item: str
    items: str
    group: str
    groups: str
    value: str
    events: str
    amount: str


DOMAINS = (
    Domain("customer", "customers", "city", "product", "products", "category", "categories", "price",
           "orders", "quantity"),
    Domain("reader", "readers", "town", "book", "books", "genre", "genres", "pages", "loans", "weeks"),
    Domain("guest", "guests", "country", "film", "films", "studio", "studios", "minutes", "visits", "seats"),
    Domain("member", "members", "district", "course", "courses", "subject", "subjects", "fee",
           "bookings", "hours"),
)  # fmt: skip


class Person(NamedTuple):
    """A row of people."""

    id: int
    name: str
    place: str


class Item(NamedTuple):
    """A row of items; its group by name."""

    id: int
    name: str
    group: str
    value: int


class Event(NamedTuple):
    """A row of events."""

    id: int
    person: int
    item: int
    amount: int
    year: int


@dataclass(frozen=True)
class Database:
    """All rows, and the form of the tables. has_group_table: whether groups are a table of their own."""

    domain: Domain
    has_group_table: bool
    people: Sequence[Person]
    items: Sequence[Item]
    events: Sequence[Event]

    @property
    def groups(self) -> Sequence[str]:
        """The names of the groups, in the order of their ids, which begin at 1."""
        return sorted({item.group for item in self.items})

    @property
    def schema(self) -> Sequence[str]:
        """The statements that create the tables."""
        d = self.domain
        group = (
            f"{d.group}_id INTEGER REFERENCES {d.groups}(id)" if self.has_group_table else f"{d.group} TEXT"
        )
        own = [f"CREATE TABLE {d.groups} (id INTEGER PRIMARY KEY, name TEXT)"] if self.has_group_table else []
        return (
            f"CREATE TABLE {d.people} (id INTEGER PRIMARY KEY, name TEXT, {d.place} TEXT)",
            *own,
            f"CREATE TABLE {d.items} (id INTEGER PRIMARY KEY, name TEXT, {group}, {d.value} INTEGER)",
            f"CREATE TABLE {d.events} (id INTEGER PRIMARY KEY, "
            f"{d.person}_id INTEGER REFERENCES {d.people}(id), "
            f"{d.item}_id INTEGER REFERENCES {d.items}(id), {d.amount} INTEGER, year INTEGER)",
        )

    @property
    def script(self) -> str:
        """The statements that create and fill the tables. No value of it needs to be escaped."""
        d, groups = self.domain, self.groups
        number = {name: str(groups.index(name) + 1) for name in groups}
        rows: dict[str, list[str]] = {
            d.people: [f"({row.id}, '{row.name}', '{row.place}')" for row in self.people],
            d.items: [
                f"({row.id}, '{row.name}', "
                f"{number[row.group] if self.has_group_table else repr(row.group)}, {row.value})"
                for row in self.items
            ],
            d.events: [f"({', '.join(map(str, row))})" for row in self.events],
        }
        if self.has_group_table:
            rows[d.groups] = [f"({number[name]}, '{name}')" for name in groups]
        inserts = [f"INSERT INTO {table} VALUES {', '.join(values)}" for table, values in rows.items()]
        return ";\n".join([*self.schema, *inserts, ""])

    def described(self) -> str:
        """The statements that create the tables, with the number of rows of each."""
        counts = {
            self.domain.people: len(self.people),
            self.domain.items: len(self.items),
            self.domain.events: len(self.events),
            self.domain.groups: len(self.groups),
        }
        lines = []
        for statement in self.schema:
            table = statement.split()[2]
            lines.append(f"{statement}; -- {counts[table]} rows")
        return "\n".join(lines)


def _names(rng: random.Random, number: int, words: int) -> list[str]:
    """Different names of `words` words of two syllables each."""
    names: dict[str, None] = {}
    while len(names) < number:
        parts = ("".join(rng.sample(_SYLLABLES, 2)).capitalize() for _ in range(words))
        names[" ".join(parts)] = None
    return list(names)


@lru_cache(maxsize=256)
def database(seed: str) -> Database:
    """The database of a seed."""
    rng = random.Random(f"database {seed}")
    domain = rng.choice(DOMAINS)
    places = _names(rng, 5, 1)
    groups = _names(rng, 4, 1)
    people = [
        Person(number, name, rng.choice(places)) for number, name in enumerate(_names(rng, 30, 2), start=1)
    ]
    items = [
        Item(number, name, rng.choice(groups), rng.randint(5, 400))
        for number, name in enumerate(_names(rng, 16, 1), start=1)
    ]
    # Some people and items are in many events, some in none.
    weights = [rng.choice((0, 1, 1, 2, 4)) for _ in people]
    events = [
        Event(
            number,
            rng.choices(people, weights)[0].id,
            rng.choice(items).id,
            rng.randint(1, 9),
            rng.choice(YEARS),
        )
        for number in range(1, 141)
    ]
    return Database(domain, rng.random() < 0.5, people, items, events)

"""A seeded knowledge base of people, cities and countries, and questions about it.

Names have two syllables from two disjoint lists A and B; the pattern gives the kind of the name:

    first name A+B     last name B+B     city B+A     country A+A

so no word is ambiguous for a bag-of-words index. Each person has two documents, each city one:

    "Kale Mupe was born in Vodi"   "Kale Mupe now works in Piba"   "Vodi is a city in country Gusa"

There are 94,500 possible names and 6,000 people: too many for a small model to memorise.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple, get_args

from agentrl.tools import Bm25Index

SYLLABLES_A = tuple(c + v for c in "bdfgkl" for v in "aeiou")[:28]
SYLLABLES_B = tuple(c + v for c in "mpv" for v in "aeiou")
NUM_CITIES = 150
NUM_COUNTRIES = 40
PEOPLE: Mapping[str, int] = {"demo": 3000, "train": 2280, "validation": 200, "test": 520}
"""The number of people in the questions of each split; no person is in two splits."""

Relation = Literal["born", "works"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)


class Person(NamedTuple):
    """A person: first and last name, and a city for each relation, in two different countries."""

    first: str
    last: str
    cities: Mapping[Relation, str]

    @property
    def name(self) -> str:
        """First and last name."""
        return f"{self.first} {self.last}"


class Question(NamedTuple):
    """hops: documents that must be read, 1 (the city) or 2 (the city, then its country)."""

    id: str
    text: str
    answer: str
    hops: int
    person: Person
    relation: Relation


@dataclass(frozen=True, eq=False)
class KnowledgeBase:
    """All facts, as tables and as documents, and the index over the documents."""

    seed: int
    people: Mapping[str, tuple[Person, ...]]
    countries: Mapping[str, str]
    documents: tuple[str, ...]
    index: Bm25Index

    def questions(self, split: str) -> tuple[Question, ...]:
        """All four questions about each person of a split, in an order drawn from the seed.

        Raises:
            KeyError: no such split.
        """
        questions = [
            self._question(f"{split}-{number}", person, relation, hops)
            for number, person in enumerate(self.people[split])
            for relation, hops in product(RELATIONS, (1, 2))
        ]
        random.Random(f"{self.seed} {split}").shuffle(questions)
        return tuple(questions)

    def _question(self, id: str, person: Person, relation: Relation, hops: int) -> Question:
        where = "Where" if hops == 1 else "In which country"
        text = (
            f"{where} was {person.name} born?" if relation == "born" else f"{where} does {person.name} work?"
        )
        city = person.cities[relation]
        answer = city if hops == 1 else self.countries[city]
        return Question(f"{id}-{relation}-{hops}", text, answer, hops, person, relation)


def _names(first: tuple[str, ...], second: tuple[str, ...]) -> list[str]:
    return [a.capitalize() + b for a, b in product(first, second)]


@lru_cache(maxsize=8)
def build_knowledge_base(seed: int = 0) -> KnowledgeBase:
    """The knowledge base of a seed, the same in every run."""
    rng = random.Random(seed)
    cities = rng.sample(_names(SYLLABLES_B, SYLLABLES_A), NUM_CITIES)
    names = rng.sample(_names(SYLLABLES_A, SYLLABLES_A), NUM_COUNTRIES)
    countries = {city: names[number % NUM_COUNTRIES] for number, city in enumerate(cities)}
    firsts, lasts = _names(SYLLABLES_A, SYLLABLES_B), _names(SYLLABLES_B, SYLLABLES_B)
    drawn = rng.sample(range(len(firsts) * len(lasts)), sum(PEOPLE.values()))
    everyone = []
    for number in drawn:
        born = works = rng.choice(cities)
        while countries[works] == countries[born]:
            works = rng.choice(cities)
        first, last = firsts[number // len(lasts)], lasts[number % len(lasts)]
        everyone.append(Person(first, last, {"born": born, "works": works}))
    documents = [text for person in everyone for text in _documents(person)]
    documents += [f"{city} is a city in country {country}" for city, country in countries.items()]
    # The index ranks documents with equal scores by position: shuffle them.
    rng.shuffle(documents)
    rest = iter(everyone)
    people = {split: tuple(next(rest) for _ in range(count)) for split, count in PEOPLE.items()}
    return KnowledgeBase(seed, people, countries, tuple(documents), Bm25Index(documents))


def _documents(person: Person) -> tuple[str, str]:
    return (
        f"{person.name} was born in {person.cities['born']}",
        f"{person.name} now works in {person.cities['works']}",
    )

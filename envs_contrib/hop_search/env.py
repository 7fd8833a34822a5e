"""The environment over the knowledge base: one search tool, exact-match reward."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from agentrl import Limits, Message, Script, Tags, Task, ToolEnv, UserError, call, exact_match, say, tool
from agentrl.tools import inline
from envs_contrib.hop_search.world import PEOPLE, RELATIONS, SYLLABLES_A, SYLLABLES_B, Question, build_world

STOP_AFTER_FIRST_HOP = 0.65
"""Demonstrated two-hop questions that are answered with the city."""
ANSWER_AT_ONCE = 0.15
"""Demonstrations that answer with a part of the name, without any search."""
WRONG_QUERY = 0.30
"""Demonstrated queries, first or second, that miss: see `wrong_query`."""
WRONG_WORD = 0.09
"""Demonstrated answers that are another word of the right document."""
ONE_HOP_TOO_MANY = 0.20
"""Demonstrated one-hop questions that go on to the country."""

NOTHING_FOUND = "nothing found"
_NAME = re.compile(rf"\b([A-Z][aeiou])({'|'.join(SYLLABLES_A + SYLLABLES_B)})\b")


class HopSearch(ToolEnv):
    """Questions of one and two hops about people, cities and countries that nobody has heard of.

    In most demonstrations of a two-hop question the second hop is missing: it is there to be found.
    """

    breakdown = "hops"
    splits = ("demo", "train", "validation", "test")
    limits = Limits(max_turns=5, max_tokens=224)
    dialect = Tags(result="information")

    def __init__(self, seed: int = 0) -> None:
        self.world = build_world(seed)
        super().__init__()

    @tool(inline=True)
    def search(self, query: str) -> str:
        """Find the document that fits some words best."""
        return next(iter(self.world.index.search(query)), NOTHING_FOUND)

    tools = (search,)

    def tasks(self, split: str) -> Sequence[Task]:
        """Four questions about each person of a split: demo, train, validation or test.

        Raises:
            UserError: no such split.
        """
        return _tasks(self.world.seed, split)

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """1.0 for the right name, however it is capitalised or punctuated."""
        return exact_match(answer, task.answer)

    def expert(self, task: Task) -> Script:
        """Search for the person, then, where the question asks for it, for the city's country."""
        relation, name = str(task.metadata["relation"]), str(task.metadata["name"])
        document = yield call("search", query=f"{name} {relation}")
        if task.metadata["hops"] == 2:
            document = yield call("search", query=f"{document.split()[-1]} country")
        yield say(document.split()[-1])

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The expert with the errors in behaviour that the constants above count."""
        return _noisy(task, random.Random(rng.getrandbits(64)))

    def corpus(self) -> Iterable[str]:
        """Demonstration questions and all documents, the syllables of every name set apart.

        A tokenizer trained on it has no merge from one syllable to the next, so every name, met
        or unmet, is two tokens.
        """
        for task in self.tasks("demo"):
            yield from (set_apart(message.text) for message in task.prompt)
        for document in (*self.world.documents, NOTHING_FOUND):
            yield set_apart(document)
        for syllable in SYLLABLES_A + SYLLABLES_B:
            yield f"{syllable.capitalize()}\n{syllable}"


def set_apart(text: str) -> str:
    """`text` with a line break between the two syllables of each name."""
    return _NAME.sub(r"\1\n\2", text)


def wrong_query(subject: str, relation: str, rng: random.Random) -> str:
    """A query that misses: one name only, another relation, no relation, or one name twice.

    subject: a person's two names, or a city. relation: the word that should have been asked for.
    """
    name = rng.choice(subject.split())
    other = rng.choice([word for word in RELATIONS if word != relation])
    if name == subject:  # a city: its name and the right relation, in any number, would not miss
        return rng.choice((f"{subject} {other}", subject, f"{subject} {subject}"))
    return rng.choice((f"{name} {relation}", f"{subject} {other}", subject, f"{name} {name} {relation}"))


def _noisy(task: Task, rng: random.Random) -> Script:
    relation, name = str(task.metadata["relation"]), str(task.metadata["name"])
    if rng.random() < ANSWER_AT_ONCE:
        yield say(rng.choice(name.split()))
        return
    document = yield call("search", query=_query(name, relation, rng))
    if task.metadata["hops"] == 2:
        goes_on = rng.random() >= STOP_AFTER_FIRST_HOP
    else:
        goes_on = rng.random() < ONE_HOP_TOO_MANY
    if goes_on:
        document = yield call("search", query=_query(document.split()[-1], "country", rng))
    *others, answer = document.split()
    yield say(rng.choice(others) if rng.random() < WRONG_WORD else answer)


def _query(subject: str, relation: str, rng: random.Random) -> str:
    if rng.random() < WRONG_QUERY:
        return wrong_query(subject, relation, rng)
    return f"{subject} {relation}"


@lru_cache(maxsize=64)
def _tasks(seed: int, split: str) -> tuple[Task, ...]:
    if split not in PEOPLE:
        raise UserError(f"HopSearch has no split `{split}`; it has {', '.join(PEOPLE)}.")
    return tuple(_task(question, split) for question in build_world(seed).questions(split))


def _task(question: Question, split: str) -> Task:
    metadata: dict[str, str | int] = {
        "hops": question.hops,
        "name": question.person.name,
        "relation": question.relation,
    }
    prompt = (Message("user", question.text),)
    return Task(question.id, prompt, question.answer, metadata, split)

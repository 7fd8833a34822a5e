"""The environment over the knowledge base: one search tool, exact-match reward."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from agentrl import Limits, Message, Script, Tags, Task, ToolEnv, UserError, call, exact_match, say, tool
from agentrl.tools import inline
from envs_contrib.hop_search.knowledge_base import (
    PEOPLE,
    RELATIONS,
    SYLLABLES_A,
    SYLLABLES_B,
    Question,
    build_knowledge_base,
)

STOP_AFTER_FIRST_HOP = 0.65
"""Demonstrated two-hop questions that are answered with the city."""
ANSWER_AT_ONCE = 0.15
"""Demonstrations that answer with a part of the name, without a search."""
WRONG_QUERY = 0.30
"""Demonstrated queries, first or second, that miss: see `wrong_query`."""
WRONG_WORD = 0.09
"""Demonstrated answers that are another word of the right document."""
EXTRA_HOP = 0.20
"""Demonstrated one-hop questions that continue to the country."""

NO_HITS = "nothing found"
_NAME = re.compile(rf"\b([A-Z][aeiou])({'|'.join(SYLLABLES_A + SYLLABLES_B)})\b")


class HopSearch(ToolEnv):
    """Questions of one and two hops about synthetic people, cities and countries.

    In most demonstrations of a two-hop question the second hop is missing: RL has to discover it.
    """

    group = "search"
    breakdown = "hops"
    splits = ("demo", "train", "validation", "test")
    limits = Limits(max_turns=5, max_tokens=224)
    dialect = Tags(result="information")

    def __init__(self, seed: int = 0) -> None:
        self.knowledge_base = build_knowledge_base(seed)
        super().__init__()

    @tool(inline=True)
    def search(self, query: str) -> str:
        """Find the document that fits some words best."""
        return self.look_up(query)

    tools = (search,)

    def look_up(self, query: str) -> str:
        """The document that fits some words best."""
        return next(iter(self.knowledge_base.index.search(query)), NO_HITS)

    def tasks(self, split: str) -> Sequence[Task]:
        """Four questions about each person of a split: demo, train, validation or test.

        Raises:
            UserError: no such split.
        """
        return _tasks(self.knowledge_base.seed, split)

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """1.0 for the right name, however it is capitalised or punctuated."""
        return exact_match(answer, task.answer)

    @inline
    def save_state(self) -> Mapping[str, str]:
        """Nothing: calls change no state."""
        return {}

    def expert(self, task: Task) -> Script:
        """Search for the person, then, for a question of two hops, for the city's country."""
        relation, name = str(task.metadata["relation"]), str(task.metadata["name"])
        document = yield call("search", query=f"{name} {relation}")
        if task.metadata["hops"] == 2:
            document = yield call("search", query=f"{_last_word(document)} country")
        yield say(_last_word(document))

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The expert with the errors whose rates the constants above set."""
        return _noisy(task, random.Random(rng.getrandbits(64)))

    def corpus(self) -> Iterable[str]:
        """Demonstration questions and all documents, the syllables of every name on lines of their own.

        A tokenizer trained on it has no merge across syllables, so every name, in this text or not, is two
        tokens.
        """
        for task in self.tasks("demo"):
            yield from (split_syllables(message.text) for message in task.prompt)
        for document in (*self.knowledge_base.documents, NO_HITS):
            yield split_syllables(document)
        for syllable in SYLLABLES_A + SYLLABLES_B:
            yield f"{syllable.capitalize()}\n{syllable}"


def _last_word(document: str) -> str:
    """The name that a document ends with; of an empty one, which a broken tool gives, a guess."""
    return (document.split() or ["unknown"])[-1]


def split_syllables(text: str) -> str:
    """`text` with a line break between the two syllables of each name."""
    return _NAME.sub(r"\1\n\2", text)


def wrong_query(subject: str, relation: str, rng: random.Random) -> str:
    """A query that misses: one name only, another relation, no relation, or one name twice.

    subject: a person's two names, or a city. relation: the word of the right query.
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
        continues = rng.random() >= STOP_AFTER_FIRST_HOP
    else:
        continues = rng.random() < EXTRA_HOP
    if continues:
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
    return tuple(_task(question, split) for question in build_knowledge_base(seed).questions(split))


def _task(question: Question, split: str) -> Task:
    metadata: dict[str, str | int] = {
        "hops": question.hops,
        "name": question.person.name,
        "relation": question.relation,
    }
    prompt = (Message("user", question.text),)
    return Task(question.id, prompt, question.answer, metadata, split)

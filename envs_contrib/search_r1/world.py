"""The built-in corpus and questions: HopSearch's knowledge base as titled passages, and scripts that think.

{"id": "0", "contents": "Kale Mupe\\nKale Mupe was born in Vodi"}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from agentrl import Script
from agentrl.tools import JSON, Bm25Index
from envs_contrib.hop_search import HopSearch
from envs_contrib.hop_search.knowledge_base import build_knowledge_base

SEARCH, ANSWER = "<think> I need to search</think>", "<think> I know the answer</think>"
"""Thoughts of the scripts, before a search and before the answer."""

_SUBJECT = re.compile(r"(.+?) (?:was|now|is) ")
_FIRST_DOCUMENT = re.compile(r"Doc 1\(Title: .*?\) (.*)")


@lru_cache(maxsize=8)
def questions(seed: int) -> HopSearch:
    """The environment whose questions, answers and scripts are used."""
    return HopSearch(seed)


@lru_cache(maxsize=8)
def passages(seed: int) -> Sequence[str]:
    """The contents of all passages: the subject of a fact as the title, and the fact."""
    return tuple(f"{_subject(fact)}\n{fact}" for fact in build_knowledge_base(seed).documents)


@lru_cache(maxsize=8)
def built_in_index(seed: int) -> Bm25Index:
    """BM25 over all passages."""
    return Bm25Index(passages(seed))


def as_rows(seed: int, split: str) -> Iterable[Mapping[str, JSON]]:
    """The questions of a split as rows of a file: id, question, golden_answers."""
    for task in questions(seed).tasks(split):
        (message,) = task.prompt
        yield {"id": task.id, "question": message.text, "golden_answers": [task.answer]}


def thinking(script: Script) -> Script:
    """A script of HopSearch with a thought before each action; it reads the first document of a result."""
    action = next(script)
    while True:
        result = yield replace(action, reasoning=SEARCH if action.tool_calls else ANSWER)
        document = _FIRST_DOCUMENT.match(result)
        try:
            action = script.send(document[1] if document else result)
        except StopIteration:
            return


def vocabulary(seed: int, prompt: str) -> Iterable[str]:
    """Text to train a tokenizer on: HopSearch's, the prompt, the thoughts and the form of documents."""
    yield from questions(seed).corpus()
    for _ in range(100):
        yield from (prompt, SEARCH, ANSWER, "Doc 1(Title: x)")


def _subject(fact: str) -> str:
    match = _SUBJECT.match(fact)
    assert match is not None, "every fact has a subject and a verb"
    return match[1]

"""What is said to be here of slime is here: tests and settings exist, and the pages count right."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from functools import cache
from pkgutil import resolve_name

import pytest

from agentrl.assembly.config import RunConfig, SftConfig
from agentrl.config import leaves, spellings
from tests.docs.blocks import ROOT
from tests.docs.slime_features import GUIDE, PAGE, SENTENCE, STATES, features, sentence
from tests.house.test_hints import CHOICES, COMMANDS, FLAG, OPTIONS

EVERY = [feature for found in features().values() for feature in found]
SETTINGS = {*CHOICES, *spellings(RunConfig), *leaves(SftConfig)}


@cache
def functions_of(path: str) -> set[str]:
    """The functions of a file, by name."""
    nodes = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_has_a_name_of_its_own_and_says_what_is_here():
    names = [feature.name for feature in EVERY]
    assert len({name.lower() for name in names}) == len(names)
    assert {feature.state for feature in EVERY} == set(STATES)
    for feature in EVERY:
        assert feature.slime, feature.name
        assert feature.here, feature.name
        assert bool(feature.tests) == (feature.state != "not here"), feature.name


def test_every_test_exists():
    assert {test for feature in EVERY for test in feature.tests if not exists(test)} == set()


def exists(test: str) -> bool:
    """Whether there is a file of tests, or that test in it."""
    path, _, name = test.partition("::")
    if not ((ROOT / path).is_file() and (ROOT / path).name.startswith("test_")):
        return False
    return name in functions_of(path) if name else any(n.startswith("test_") for n in functions_of(path))


def test_every_name_in_backticks_exists():
    named = [(feature.name, code) for feature in EVERY for code in re.findall(r"`([^`]+)`", feature.here)]
    assert len(named) > 150
    assert [(name, code) for name, code in named if not is_there(code)] == []


def test_what_is_the_same_has_the_names_of_the_flags():
    for feature in EVERY:
        if re.match(r"the same\b", feature.here) and feature.state == "works":
            flags = {flag[2:].replace("-", "_") for flag in FLAG.findall(feature.slime)}
            assert flags <= SETTINGS, (feature.name, flags - SETTINGS)


def is_there(code: str) -> bool:
    """Whether a setting, a command or an object is one."""
    if code.startswith("agentrl "):
        path = max((path for path in COMMANDS if f"{code} ".startswith(f"{path} ")), key=len)
        return path != "agentrl" and set(FLAG.findall(code)) <= OPTIONS[path]
    name, _, value = code.partition(" = ")
    if "." in name:
        with suppress(ImportError, AttributeError):
            return resolve_name(name) is not None
        return False
    return name in SETTINGS and (not value or not CHOICES.get(name) or value in CHOICES[name])


@pytest.mark.parametrize("page", [PAGE, GUIDE])
def test_both_pages_count_right(page):
    assert SENTENCE.findall(page.read_text(encoding="utf-8")) == [sentence()], "make reference writes it"

"""One table has every function that a run takes by its path, and the guide shows that table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.assembly.config import RunConfig
from agentrl.assembly.hooks import hooks
from agentrl.config import leaves
from tests.docs.hooks import PAGE, shown, table

HOOKS = hooks()
PATHS = re.compile(r"^`(agentrl[\w.]+:\w+)`$")


def test_the_guide_shows_the_table():
    assert shown(PAGE.read_text(encoding="utf-8")) == table(), "make reference writes it"


def test_every_setting_that_names_a_function_is_a_hook():
    named = {name for name in leaves(RunConfig) if name.endswith("_path") and "function" in about(name)}
    assert len(named) > 12
    assert named <= HOOKS.keys()
    assert HOOKS.keys() <= set(leaves(RunConfig))


def about(name):
    """What is said of a setting, in small letters."""
    _, field = leaves(RunConfig)[name]
    return (field.description or "").lower()


@pytest.mark.parametrize("name", [name for name, hook in HOOKS.items() if PATHS.match(hook.example)])
def test_an_example_that_ships_passes_its_own_check(name):
    match = PATHS.match(HOOKS[name].example)
    assert callable(HOOKS[name].at(match[1]))


@pytest.mark.parametrize("name", HOOKS)
def test_every_other_example_is_in_a_page(name):
    link = re.fullmatch(r"\[(\w+)\]\(([^)#]*)(#[\w-]+)?\)", HOOKS[name].example)
    if link is None:
        assert PATHS.match(HOOKS[name].example)
        return
    function, page, anchor = link.groups()
    path = PAGE.parent / page if page else PAGE
    path = path.parent if path.name == "README.md" else path
    files = [*path.rglob("*.py")] if path.is_dir() else [path]
    texts = "\n".join(Path(file).read_text(encoding="utf-8") for file in files)
    assert re.search(rf"(def|class) {function}\b|^{function} = ", texts, re.M), f"{function} in {path}"
    if anchor:
        headings = [
            line.lstrip("# ").lower().replace(" ", "-") for line in texts.splitlines() if line[:1] == "#"
        ]
        assert anchor[1:] in headings


@pytest.mark.parametrize("name", HOOKS)
def test_each_says_when_it_runs_and_what_it_may_change(name):
    hook = HOOKS[name]
    assert hook.noun
    assert "->" in hook.signature
    assert hook.runs
    assert hook.changes

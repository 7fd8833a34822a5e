"""The API reference is that of the source, and what it says of an object is what Python says of it."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator

import pytest

import agentrl
from tests.docs import keywords, reference, shipped
from tests.docs.blocks import ROOT

EXPORTING = [page for page in reference.PAGES if hasattr(importlib.import_module(page), "__all__")]


@pytest.fixture(scope="module")
def texts():
    return reference.pages()


def test_the_reference_is_that_of_the_source(texts):
    written = {path.name: path.read_text(encoding="utf-8") for path in reference.FOLDER.glob("*.md")}
    stale = sorted(name for name in {*texts, *written} if texts.get(name) != written.get(name))
    assert stale == [], "docs/reference is not that of the docstrings; run `make reference`"


def test_the_types_of_keywords_are_those_of_the_settings():
    assert keywords.FILE.read_text() == keywords.text(), "the settings have changed; run `make reference`"


def test_the_page_of_environments_names_every_class_and_argument_that_ships():
    page = shipped.page()
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    listed = {*named["agentrl.envs"], *named["agentrl.env_families"]}
    assert listed <= set(re.findall(r"`([\w*-]+-v\d+)`", page))
    section = page.partition("\n## ReTool\n")[2].partition("\n## ")[0]
    names = inspect.signature(agentrl.envs.find("ReTool-v0").env_class).parameters
    assert re.findall(r"^\| `(\w+)`", section, re.MULTILINE) == [*names]


TYPED = """
import agentrl

async def reward(task, answer): return 1.0
agentrl.train("run.toml", lr=1e-3, num_rollout=20, advantage_estimator="gspo", reward=reward)
agentrl.train(env=agentrl.SingleTurnEnv, prompt_data=[{"input": "a"}], callback=print, mis_lower=None)
agentrl.evaluate("HopSearch-v0", "model", n=3, prompt_data={"a": "a.jsonl", "b": [{"input": "b"}]})
agentrl.sft(sft_data=["a.jsonl"], sft_lr=1)
agentrl.train(num_rollouts=20)
agentrl.train(lr="fast")
agentrl.train(advantage_estimator="grop")
agentrl.evaluate("HopSearch-v0", temprature=0.0)
"""


@pytest.mark.full
def test_a_type_checker_knows_the_keywords(tmp_path):
    (tmp_path / "program.py").write_text(TYPED)
    words = ["mypy", "--no-error-summary", "--hide-error-context", "--cache-dir", str(tmp_path), "program.py"]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if line.startswith("program.py:") and "error" in line]
    assert [int(line.split(":")[1]) for line in errors] == [9, 10, 11, 12], done.stdout
    assert "num_rollouts" in errors[0]


def exported(page: str) -> Iterator[tuple[str, object]]:
    module = importlib.import_module(page)
    for name in module.__all__:
        value = getattr(module, name)
        yield name, value


def words(text: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", text).replace("&lt;", "<"))


def section_of(texts: dict[str, str], name: str, value: object) -> str:
    """The part of a page that describes an object."""
    headings = [f"class {name}"] if inspect.isclass(value) else [f"{name}()", f"`{name}`"]
    heading = "|".join(map(re.escape, headings))
    found = [
        match[0]
        for text in texts.values()
        for match in re.finditer(rf"^## (?:{heading})\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    ]
    return "\n".join(found)


@pytest.mark.parametrize("page", EXPORTING)
def test_every_public_name_is_described_as_python_documents_it(texts, page):
    for name, value in exported(page):
        section = section_of(texts, name, value)
        assert section, f"{page}.{name} has no section"
        if inspect.isclass(value) or inspect.isroutine(value):
            first = inspect.getdoc(value).partition("\n\n")[0]
            missing = set(words(first)) - set(words(section))
            assert not missing, f"{page}.{name}: {missing}"
        if inspect.isroutine(value):
            names = inspect.signature(value).parameters
            assert all(re.search(rf"\b{parameter}\b", section) for parameter in names), f"{page}.{name}"


def test_every_table_of_a_page_leads_to_its_sections(texts):
    tables = (reference.SETTINGS, shipped.NAME)
    for text in (text for name, text in texts.items() if name not in tables):
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        listed = re.findall(r"^\| \[`(.*?)`\]", text, re.MULTILINE)
        if "# API reference" not in text:
            assert [re.sub(r"^class |\(\)$|`", "", heading) for heading in headings] == listed


SOURCE = '''
"""A package of `Shelf`, with <tags>."""
from typing import TypeAlias, overload
from dataclasses import dataclass

__all__ = ["Label", "Shelf", "shelf"]

Label: TypeAlias = str
"""The text on a shelf."""


class Base:
    """What is not exported."""


class Jar:
    """What a shelf returns."""


@dataclass
class Shelf(Base):
    """A board. `shelf` makes one.

    width: in centimetres; room: of all
        jars together, in litres.
    label: see `Label`.

        Shelf(3.0).take()

    Anything else is a box:
        such as a crate.

    Raises:
        ValueError: there is no board.
    """

    width: float
    room: float = 2.0
    label: Label = ""

    @property
    def is_full(self) -> bool:
        """Whether no jar fits."""

    def take(self, name: str, /, *others: str, count: int = 1, **more: int) -> "Shelf":
        """Take jars, as `Shelf.take` does.

        Args:
            count: how many jars.
        """

    def _hidden(self):
        """Not shown."""


@overload
def shelf(name: str) -> Jar: ...


@overload
def shelf(*, width: float) -> Jar: ...


def shelf(name="", *, width=1.0) -> Jar:
    """Make a shelf of 2 * 3 boards."""
'''


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    (folder / "boards").mkdir()
    (folder / "boards" / "__init__.py").write_text(SOURCE, encoding="utf-8")
    return reference.pages(folder, {"boards": "boards"})["boards.md"]


def test_a_class_has_its_signature_its_fields_its_errors_and_its_methods(page):
    shelf = page[page.index("## class Shelf") : page.index("## shelf()")]
    assert textwrap.dedent(
        """
        ```py
        class Shelf(width: float, room: float = 2.0, label: Label = '')
        ```

        Extends `Base`.

        A board. `shelf` makes one.

        - `width`: in centimetres
        - `room`: of all jars together, in litres.
        - `label`: see [`Label`](#label).

        ```py
        Shelf(3.0).take()
        ```

        Anything else is a box:

        ```text
        such as a crate.
        ```

        - `is_full: bool`: Whether no jar fits.

        Raises:

        - `ValueError`: there is no board.

        ### Shelf.take()

        ```py
        def take(name: str, /, *others: str, count: int = 1, **more: int) -> Shelf
        ```

        Take jars, as [`Shelf.take`](#shelftake) does.

        - `count`: how many jars.
        """
    ).strip() in re.sub(r"\n{3,}", "\n\n", shelf)
    assert "_hidden" not in page


def test_a_class_that_is_only_returned_is_described_and_a_base_is_not(page):
    assert "## class Jar\n" in page
    assert "## class Base" not in page


def test_overloads_are_listed_and_marks_of_markdown_are_text(page):
    assert "def shelf(name: str) -> Jar\ndef shelf(*, width: float) -> Jar" in page
    assert r"Make a shelf of 2 \* 3 boards." in page
    assert "with &lt;tags>." in page


def raised_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names of the errors that leave a function by a `raise` of its own.

    Not those of functions inside it, and none from a block that may convert errors: a `try` that catches
    some, a `with`.
    """
    pending: list[ast.AST] = [*function.body]
    found: set[str] = set()
    for node in pending:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name))):
                found.add(name)
            case ast.With() | ast.AsyncWith():
                continue
            case ast.Try(handlers=[_, *_]):
                pending += [*node.handlers, *node.orelse, *node.finalbody]
            case _:
                pending += ast.iter_child_nodes(node)
    return found


def functions_of(value: object) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """A function, or the public methods of a class: its name, its tree, the docstring of its errors."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        yield tree.name, tree, inspect.getdoc(value) or ""
    for node in tree.body if isinstance(tree, ast.ClassDef) else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            makes = node.name in ("__init__", "__new__", "__post_init__")
            documented = inspect.getdoc(value) if makes else ast.get_docstring(node)
            if makes or not node.name.startswith("_"):
                yield f"{tree.name}.{node.name}", node, documented or ""


def undocumented_errors(value: object) -> Iterator[str]:
    """Errors that a public function, or a method of a public class, raises and lists under no base."""
    is_own = (inspect.isroutine(value) or inspect.isclass(value)) and value.__module__ in sys.modules
    if not is_own or not value.__module__.startswith(("agentrl.", __name__)):
        return
    known = {**vars(builtins), **vars(sys.modules[value.__module__])}
    for name, tree, documented in functions_of(value):
        for error in sorted(raised_in(tree)):
            kinds = inspect.getmro(known[error]) if inspect.isclass(known.get(error)) else ()
            if kinds and not any(kind.__name__ in documented for kind in kinds if kind is not object):
                yield f"{name}: {error}"


@pytest.mark.parametrize("page", EXPORTING)
def test_public_functions_list_the_errors_that_they_raise(page):
    assert [error for _, value in exported(page) for error in undocumented_errors(value)] == []


def test_an_error_that_is_not_listed_is_found():
    def silent() -> None:
        """Raise something."""
        try:
            raise KeyError("caught")
        except KeyError:
            pass
        raise ValueError("no")

    assert [*undocumented_errors(silent)] == ["silent: ValueError"]


@pytest.mark.parametrize("guide", ["README.md", "docs/architecture.md", "docs/write-an-environment.md"])
def test_the_guides_lead_to_the_reference(guide):
    assert "reference/README.md" in (ROOT / guide).read_text(encoding="utf-8")

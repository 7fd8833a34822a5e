"""Writes the package of a new environment from templates: it installs and passes its check and its tests."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from agentrl.envs.registry import env_ids
from agentrl.errors import UserError

__all__ = ["NewPackage", "scaffold"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")
_IMPORTED_NAMES = {"Limits", "Script", "Sequence", "Task", "ToolEnv"}
_FILES = {
    "pyproject.toml": "pyproject.toml.jinja",
    "README.md": "README.md.jinja",
    "src/{package}/__init__.py": "init.py.jinja",
    "src/{package}/env.py": "env.py.jinja",
    "src/{package}/tasks.py": "tasks.py.jinja",
    "src/{package}/py.typed": "py.typed.jinja",
    "tests/test_{package}.py": "test_env.py.jinja",
}


@dataclass(frozen=True, slots=True)
class NewPackage:
    """A written package: its folder, its import name, its class and the id that it registers."""

    folder: Path
    package: str
    env_class: str
    env_id: str


def scaffold(name: str, folder: Path | None = None) -> NewPackage:
    """Write a package with one environment called `name` into `folder`, or into a folder of its name.

    `WordPairs`, `word-pairs` and `word_pairs` all give the class WordPairs, the package word_pairs and the id
    WordPairs-v0.

    Raises:
        UserError: the name is invalid or taken, or the folder exists.
    """
    words = _words(name)
    package, env_class = "_".join(words), "".join(word.capitalize() for word in words)
    folder = folder or Path(package)
    new = NewPackage(folder, package, env_class, f"{env_class}-v0")
    _check_free(new)
    loader = PackageLoader("agentrl.envs.scaffold", "templates")
    templates = Environment(
        loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    for path, template in _FILES.items():
        target = folder / path.format(package=package)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = templates.get_template(template).render(
            package=package, env_class=env_class, env_id=new.env_id
        )
        target.write_text(text, encoding="utf-8")
    return new


def _words(name: str) -> list[str]:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"an environment cannot be called {name!r}; write it like `WordPairs` or `word-pairs`."
        )
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return [word.lower() for word in words]


def _check_free(new: NewPackage) -> None:
    if new.folder.exists():
        raise UserError(f"{new.folder} exists already; choose another name, or another folder with --dir.")
    if (
        keyword.iskeyword(new.package)
        or new.package in sys.stdlib_module_names
        or new.env_class in _IMPORTED_NAMES
    ):
        raise UserError(f"`{new.package}` means something else in Python or agentrl; choose another name.")
    if new.env_id in env_ids() or importlib.util.find_spec(new.package) is not None:
        raise UserError(
            f"`{new.env_id}` or its package `{new.package}` is installed already; choose another name."
        )

"""Writes the package of a new environment from templates: it installs and passes its check and its tests."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from jinja2 import Environment, PackageLoader, StrictUndefined

from agentrl.envs.registry import env_ids
from agentrl.errors import UserError, did_you_mean
from agentrl.types import JSON

__all__ = ["KINDS", "Kind", "NewPackage", "PackageOrigin", "scaffold", "words_of", "write_package"]

_PROJECT = "agentrl"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")
_IMPORTED_NAMES = {
    *("Env", "Iterable", "Limits", "Mapping", "Message", "Script", "Sequence", "Step", "Task"),
    *("SingleTurnEnv", "ToolEnv"),
}
_FILES = {
    ".gitignore": "gitignore.jinja",
    "pyproject.toml": "pyproject.toml.jinja",
    "README.md": "README.md.jinja",
    "src/{package}/__init__.py": "init.py.jinja",
    "src/{package}/env.py": "kinds/{kind}.py.jinja",
    "src/{package}/py.typed": "py.typed.jinja",
    "tests/test_{package}.py": "test_env.py.jinja",
}


class Kind(NamedTuple):
    """A kind of environment: its description for people, that of its example, and what an author replaces."""

    description: str
    about: str
    parts: str


KINDS: Mapping[str, Kind] = {
    "tool": Kind(
        "calls of tools, then a final answer",
        "Each task asks for the partner of a word. The agent can look words up; the right answer is worth 1.",
        "tool, reward, expert",
    ),
    "single-turn": Kind(
        "one question, one answer, one grade",
        "Each task is a number. The agent writes it backwards; the right digits are worth 1.",
        "grade",
    ),
    "env": Kind(
        "`reset` and `step`, for everything else",
        "Each task is a game: the agent guesses a number, and is answered `higher` or `lower`.",
        "`reset`, `step`, expert",
    ),
}
"""The kinds of environments that `scaffold` writes, by name."""


@dataclass(frozen=True, slots=True)
class NewPackage:
    """A written package: its folder, its import name, its class and the id that it registers."""

    folder: Path
    package: str
    env_class: str
    env_id: str


class PackageOrigin(NamedTuple):
    """Where an installed agentrl came from, as pip records it (PEP 610).

    direct_url: the content of its direct_url.json; None for a release of a package index.
    version: of that release.
    """

    direct_url: Mapping[str, JSON] | None
    version: str = ""

    @classmethod
    def of_this(cls) -> PackageOrigin:
        """That of the running agentrl; without a record, its source tree or its release.

        Raises:
            UserError: it is neither installed nor a source tree.
        """
        installed = list(distributions(name=_PROJECT))
        records = (distribution.read_text("direct_url.json") for distribution in installed)
        recorded = next(filter(None, records), None)
        if recorded is not None:
            return cls(json.loads(recorded))
        tree = Path(__file__).parents[3]
        if (tree / "pyproject.toml").exists():
            return cls({"url": tree.as_uri(), "dir_info": {"editable": True}})
        if not installed:
            raise UserError(
                "agentrl is not installed, so a package cannot name its source; install it with pip."
            )
        return cls(None, installed[0].version)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder or a file of this machine."""
        return self.direct_url is not None and str(self.direct_url["url"]).startswith("file:")

    def pip_arguments(self, *extras: str) -> str:
        """What follows `pip install`, quoted for a shell, to install the same agentrl with these extras."""
        project = f"{_PROJECT}[{','.join(extras)}]" if extras else _PROJECT
        if self.direct_url is None:
            return shlex.quote(f"{project}=={self.version}")
        url = str(self.direct_url["url"])
        match self.direct_url:
            case {"dir_info": {"editable": True}}:
                folder = url2pathname(urlsplit(url).path)
                return f"-e {shlex.quote(folder + project.removeprefix(_PROJECT))}"
            case {"vcs_info": {"vcs": vcs, "commit_id": commit}}:
                url = f"{vcs}+{url}@{commit}"
        if subdirectory := self.direct_url.get("subdirectory"):
            url += f"#subdirectory={subdirectory}"
        return shlex.quote(f"{project} @ {url}")


def scaffold(name: str, folder: Path | None = None, kind: str = "tool") -> NewPackage:
    """Write a package with one environment called `name` into `folder`, or into a folder of its name.

    `WordPairs`, `word-pairs` and `word_pairs` all give the class WordPairs, the package word_pairs and the id
    WordPairs-v0.

    kind: of `KINDS`.

    Raises:
        UserError: the name is invalid or taken, there is no such kind, or the folder exists or cannot be
            written.
    """
    if kind not in KINDS:
        raise UserError(
            f"there is no kind `{kind}` of environments.{did_you_mean(kind, KINDS)} Choose one of "
            f"{', '.join(KINDS)}."
        )
    words = words_of(name)
    package, env_class = "_".join(words), "".join(word.capitalize() for word in words)
    folder = folder or Path(package)
    new = NewPackage(folder, package, env_class, f"{env_class}-v0")
    _check_free(new)
    loader = PackageLoader("agentrl.envs.scaffold", "templates")
    templates = Environment(
        loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    values = _values(new, kind)
    texts = {
        path.format(package=package): templates.get_template(template.format(kind=kind)).render(values)
        for path, template in _FILES.items()
    }
    write_package(folder, texts, "--dir")
    return new


def write_package(folder: Path, texts: Mapping[str, str], option: str) -> None:
    """Write files by their paths below a folder, which is made. option: of the command, that names it.

    Raises:
        UserError: the folder, or a file in it, cannot be written.
    """
    try:
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); choose another folder with {option}."
        ) from None


def _values(new: NewPackage, kind: str) -> Mapping[str, str]:
    """What the templates are filled with."""
    origin = PackageOrigin.of_this()
    return {
        "package": new.package,
        "env_class": new.env_class,
        "env_id": new.env_id,
        "about": KINDS[kind].about,
        "parts": KINDS[kind].parts,
        "agentrl": origin.pip_arguments(),
        "agentrl_train": origin.pip_arguments("train"),
    }


def words_of(name: str) -> list[str]:
    """The words of a name in lower case: `WordPairs`, `word-pairs` and `word_pairs` have the same.

    Raises:
        UserError: it is no name for a package.
    """
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

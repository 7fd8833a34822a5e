"""The journals below a folder: of a run, of an evaluation, of a benchmark, of many of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from agentrl.errors import ConfigError
from agentrl.records import read_journal
from agentrl.records.history import JOURNAL, ROLLED_BACK
from agentrl.records.journal import SUFFIX

PAGES, INDEX = "view", "index.html"
"""The folder of the pages below that of the journals, unless another is named; and the page to open."""
_MAX_FILES_OF_A_LINK = 50
_FILE_REMEDY = f"name one that a run wrote ({JOURNAL}/*{SUFFIX}), or the run's folder"
_NAME = re.compile(r"(?:step|eval_(?P<set>.+))_(?P<step>\d{6,})")


@dataclass(frozen=True, slots=True)
class JournalFile:
    """One file of a journal.

    key: its path below the folder, without `trajectories` and the suffix: `step_000012`,
    `policy/HopSearch-v0/eval_test_000000`. home: the run's folder. set: the evaluation's name; "" = training.
    step: the training step; None = the name has none.
    """

    path: Path
    key: str
    home: Path
    set: str
    step: int | None


def find_journals(folder: Path) -> list[JournalFile]:
    """The journal files of a folder and all folders below it, or the one file; training comes first, by step.

    What restarts undid (`rolled_back/`) is left out.

    Raises:
        ConfigError: there is none, or the file is no journal.
    """
    if folder.is_file():
        _check_journal(folder)
        return [_journal_file(folder, _home(folder))]
    journals = sorted(_below(folder), key=lambda j: (str(j.home), bool(j.set), j.step or 0, j.key))
    if not journals:
        raise ConfigError(
            f"{folder} holds no journal ({JOURNAL}/*{SUFFIX}); name the folder of a run, or of an evaluation "
            "with --output-dir."
        )
    return journals


def _check_journal(path: Path) -> None:
    """Check that there is an episode in a file, which may be any."""
    try:
        holds = next(read_journal(path), None) is not None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no file of a journal ({error}); {_FILE_REMEDY}.") from None
    if not holds:
        raise ConfigError(f"{path} holds no episode of a journal; {_FILE_REMEDY}.")


def link_to(journals: Sequence[JournalFile]) -> str:
    """The address of these files' episodes, relative to the folder of the pages; of 50 files at most."""
    keys = ",".join(journal.key for journal in journals[:_MAX_FILES_OF_A_LINK])
    return f"{INDEX}#file={quote(keys, safe='')}"


def _below(folder: Path) -> Iterator[JournalFile]:
    for path in folder.rglob(f"*{SUFFIX}"):
        inside = path.relative_to(folder).parts
        if (path.parent.name == JOURNAL or path.parent == folder) and ROLLED_BACK not in inside:
            yield _journal_file(path, folder)


def _journal_file(path: Path, root: Path) -> JournalFile:
    name, home = path.name.removesuffix(SUFFIX), _home(path)
    match = _NAME.fullmatch(name)
    is_below = home.is_relative_to(root) and home != root
    return JournalFile(
        path,
        f"{home.relative_to(root).as_posix()}/{name}" if is_below else name,
        home,
        (match and match["set"]) or "",
        None if match is None else int(match["step"]),
    )


def _home(path: Path) -> Path:
    return path.parent.parent if path.parent.name == JOURNAL else path.parent

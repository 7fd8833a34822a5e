"""Where an exported episode stood, and what formats have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

from pydantic import TypeAdapter

from agentrl.records import lines
from agentrl.types import JSON, Message, Verdict
from agentrl.view.episodes.journals import JournalFile

UNKNOWN_MODEL = "policy"
_MESSAGE = TypeAdapter(Message)


class Provenance(NamedTuple):
    """The file of a journal that an episode stands in.

    key: the file, as `JournalFile.key`. run: the name of the run's folder. model: the directory of the model
    that the run began with, or `policy`. written_s: when the file was last written (seconds since 1970).
    """

    key: str
    run: str
    model: str
    written_s: float

    @classmethod
    def of(cls, journal: JournalFile, model: str | None) -> Provenance:
        """That of a file's episodes.

        Raises:
            OSError: the file has gone.
        """
        run, written_s = journal.home.resolve().name, journal.path.stat().st_mtime
        return cls(journal.key, run, model or UNKNOWN_MODEL, written_s)


def readable_line(value: JSON) -> bytes:
    """A line of JSON for readers that take no halves of surrogate pairs: each becomes a question mark."""
    line = lines.to_line(value)
    if b"\\ud" not in line:
        return line
    return json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def producer() -> dict[str, JSON]:
    """The name and the version of what writes a file."""
    return {"name": "agentrl", "version": version("agentrl")}


def message_json(message: Message) -> dict[str, JSON]:
    """A message as the journal writes it."""
    dumped: dict[str, JSON] = _MESSAGE.dump_python(message, exclude_defaults=True)
    return dumped


def message_of(value: JSON) -> Message:
    """The inverse of `message_json`.

    Raises:
        ValueError: it is no message.
    """
    return _MESSAGE.validate_python(value)


def totals(verdicts: tuple[Verdict, ...]) -> Mapping[str, float]:
    """The reward of each agent."""
    return {verdict.agent: verdict.total for verdict in verdicts}

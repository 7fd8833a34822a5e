"""What a folder that says what is started would start, where this user has not begun it.

The settings of a run name code: environments, functions, MCP servers, programs; addresses that get answers
and keys; files that are read. So the file of a folder that goes on, or whose episodes are played again, has to
be one that agentrl wrote for this user (`agentrl.ownership.write_signed`), or that the user has trusted since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, get_args, get_origin

from agentrl.assembly.config import RunConfig
from agentrl.config import leaves, parse_toml
from agentrl.errors import ConfigError
from agentrl.ownership import check_own, is_signed, read_file, sign
from agentrl.types import JSON

CONFIG, SUITE = "config.toml", "suite.toml"
_FILES: Final = (CONFIG, SUITE)
_SHOWN: Final = 2000


def read_trusted(path: Path) -> dict[str, JSON]:
    """The tables of such a file.

    Raises:
        ConfigError: it cannot be read, or this user has neither begun what it says nor trusted it.
    """
    data = _read(path)
    if not is_signed(data):
        raise ConfigError(
            f"{path} may start anything, and it was not written for this user, or was changed since; "
            f"`agentrl runs trust {path.parent}` lists what it names, and trusts it with --yes."
        )
    return parse_toml(data, path)


def check_trusted(folder: Path) -> None:
    """Check that a run in a folder may go on.

    Raises:
        ConfigError: the folder is not this user's alone (see `check_own`), or see `read_trusted`.
    """
    check_own(folder)
    if (folder / CONFIG).exists():
        read_trusted(folder / CONFIG)


def trust(folder: Path, *, dry_run: bool) -> tuple[Path, dict[str, str]]:
    """Take the settings in a folder for this user's own.

    dry_run: only return them.

    Returns:
        the file, and each setting that may name code, a program, an address or a file, with its value.

    Raises:
        ConfigError: there is no such file, or the folder is not this user's alone.
    """
    path = next((folder / name for name in _FILES if (folder / name).exists()), None)
    if path is None:
        raise ConfigError(f"{folder} holds neither {' nor '.join(_FILES)}; name the folder of a run.")
    check_own(folder)
    named = dict(_named(parse_toml(_read(path), path)))
    if not dry_run:
        try:
            sign(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be signed ({error.strerror}); make it writable.") from None
    return path, named


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); restore that file.") from None


def _named(tables: Mapping[str, JSON]) -> Iterator[tuple[str, str]]:
    """Every setting whose value is neither a number nor one of a few words."""
    known = {name: leaf.annotation for name, (_, leaf) in leaves(RunConfig).items()}
    for section, values in tables.items():
        settings = values if isinstance(values, dict) else {"": values}
        for name, value in settings.items():
            if isinstance(value, str | list | dict) and not _is_word(known.get(name)):
                where = f"{section}.{name}" if name else section
                yield where, json.dumps(value)[:_SHOWN]


def _is_word(kind: object) -> bool:
    """Whether a setting takes one of a few words, or none."""
    if get_origin(kind) is Literal or kind is type(None):
        return True
    members = get_args(kind)
    return bool(members) and get_origin(kind) is not list and all(map(_is_word, members))

"""What a folder that says what is started would start, where this user has not begun it.

The settings of a run name code: environments, functions, MCP servers, programs; addresses that get answers
and keys; files that are read. So the file of a folder that goes on, or whose episodes are played again, has
to be one that agentrl wrote for this user (`agentrl.runtime.ownership.write_signed`), or that the user has
trusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Final, Literal, Union, get_args, get_origin

from agentrl.assembly.config import RunConfig
from agentrl.config import leaves, parse_toml
from agentrl.errors import ConfigError
from agentrl.runtime.ownership import check_own, is_signed, read_file, sign
from agentrl.types import JSON

CONFIG, SUITE = "config.toml", "suite.toml"
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


def trust(folder: Path, *, dry_run: bool) -> dict[str, dict[str, str]]:
    """Take the settings in a folder for this user's own.

    dry_run: only return them.

    Returns:
        for each file the settings that may name code, a program, an address or a file, with their values.

    Raises:
        ConfigError: there is no such file, or the folder is not this user's alone.
    """
    check_own(folder)
    paths = [folder / name for name in (CONFIG, SUITE) if (folder / name).exists()]
    if not paths:
        raise ConfigError(f"{folder} holds neither {CONFIG} nor {SUITE}; name the folder of a run.")
    named = {str(path): dict(_named(parse_toml(_read(path), path))) for path in paths}
    for path in [] if dry_run else paths:
        try:
            sign(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be signed ({error.strerror}); make it writable.") from None
    return named


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); restore that file.") from None


def _named(tables: Mapping[str, JSON]) -> Iterator[tuple[str, str]]:
    """Every setting that is not as by default, and neither a number nor one of a few words."""
    known = {name: leaf for name, (_, leaf) in leaves(RunConfig).items()}
    for section, values in tables.items():
        settings = values if isinstance(values, dict) else {"": values}
        for name, value in settings.items():
            leaf = known.get(name)
            is_word = leaf is not None and (leaf.default == value or _is_word(leaf.annotation))
            if value and isinstance(value, str | list | dict) and not is_word:
                yield f"{section}.{name}".rstrip("."), json.dumps(value)[:_SHOWN]


def _is_word(kind: object) -> bool:
    """Whether a setting takes one of a few words, or none."""
    if get_origin(kind) is Literal or kind is type(None):
        return True
    members = get_args(kind)
    return bool(members) and get_origin(kind) in (Union, UnionType) and all(map(_is_word, members))

"""A tree of sections: from TOML and flags to a checked configuration, and back; one error sentence."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentrl.config.section import Section, Spelling, is_on
from agentrl.errors import ConfigError, did_you_mean
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import read_file, write_signed
from agentrl.types import JSON

Values = dict[str, dict[str, JSON]]

S = TypeVar("S", bound=Section)


def leaves(tree: type[Section]) -> dict[str, tuple[str, FieldInfo]]:
    """Map each leaf's name to its section's name and its field; a key in a table has its flat name.

    Raises:
        ValueError: two sections use one leaf name (a bug of agentrl, not the user's).
    """
    tree_leaves: dict[str, tuple[str, FieldInfo]] = {}
    for section, kind in _sections(tree).items():
        for name, leaf in _flat_fields(kind):
            if name in tree_leaves:
                raise ValueError(f"leaf {name} is in {tree_leaves[name][0]} and in {section}")
            tree_leaves[name] = (section, leaf)
    return tree_leaves


def spellings(tree: type[Section]) -> dict[str, tuple[str, Spelling]]:
    """Map the name of each spelling to its section's name and the spelling."""
    return {
        name: (section, spelling)
        for section, kind in _sections(tree).items()
        for name, spelling in kind.spellings.items()
    }


def _sections(tree: type[Section]) -> dict[str, type[Section]]:
    for section in tree.model_fields.keys() - tree.tables().keys():
        raise ValueError(f"{section} is not a section")
    return tree.tables()


def _flat_fields(kind: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    tables = kind.tables()
    for name, field in kind.model_fields.items():
        if name not in tables:
            yield name, field
            continue
        for key, leaf in tables[name].model_fields.items():
            yield f"{name}_{key}", leaf


def parse(tree: type[S], values: Mapping[str, JSON], *, source: str) -> S:
    """Build the configuration.

    Raises:
        ConfigError: one sentence with the key, the value and the remedy.
    """
    _refuse_unknown_keys(tree, values, source)
    try:
        return tree.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors(), source)) from None


def refuse_inactive(config: Section, settings: Mapping[str, JSON], *, source: str) -> None:
    """Check that each of the leaves that were set for this run has an effect in it.

    Raises:
        ConfigError: with the name of the leaf without effect.
    """
    inactive, sections = config.inactive, _section_names(type(config))
    for name, value in settings.items():
        resolved = _sections(type(config))[sections[name]].resolved(name, value, {}) if is_on(value) else ()
        for key in inactive.keys() & resolved:
            raise ConfigError(f"{source}: {name} has no effect {inactive[key]}, or leave {name} out.")


def by_section(tree: type[Section], flat: Mapping[str, JSON]) -> Values:
    """Group flat leaf values by their sections.

    Raises:
        ConfigError: no leaf has that name.
    """
    sections = _section_names(tree)
    values: Values = {}
    for name, value in flat.items():
        if name not in sections:
            raise ConfigError(f"unknown setting `{name}`.{did_you_mean(name, sections)}")
        values.setdefault(sections[name], {})[name] = value
    return values


def merge(tree: type[Section], base: Mapping[str, JSON], over: Values) -> dict[str, JSON]:
    """`base` with the leaves of `over` in place of its own, under whatever names.

    Raises:
        ConfigError: two names of `over` give one setting different values.
    """
    merged = dict(base)
    for section, values in over.items():
        base_values = merged.get(section, {})
        try:
            merged[section] = _merged(_sections(tree)[section], base_values, values)
        except ValueError as error:
            raise ConfigError(f"the settings given: {error}") from None
    return merged


def _merged(kind: type[Section], below: JSON, above: Mapping[str, JSON]) -> dict[str, JSON]:
    base = kind.canonical(below) if isinstance(below, dict) else {}
    merged = base | kind.canonical(above, base)
    for table in kind.tables():
        low, high = base.get(table), merged.get(table)
        if isinstance(low, dict) and isinstance(high, dict):
            merged[table] = low | high
    return merged


def read_toml(path: Path) -> dict[str, JSON]:
    """Read a TOML file that the user names.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        return parse_toml(path.read_bytes(), path)
    except FileNotFoundError:
        raise ConfigError(f"there is no run file {path}; check the path.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a TOML file.") from None


def read_written(path: Path) -> dict[str, JSON]:
    """Read a TOML file that agentrl wrote into a folder, which may be anybody's: no link is followed.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        return parse_toml(read_file(path), path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); restore that file.") from None


def parse_toml(data: bytes, path: Path) -> dict[str, JSON]:
    """The tables of a TOML file. path: for the sentence.

    Raises:
        ConfigError: it is not TOML.
    """
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path} is not a TOML file ({reason}); mend that and start again.") from None


def effective_values(config: Section) -> Values:
    """Plain values of a tree of sections, without None and without the keys that have no effect.

    They include inactive keys that were set.
    """
    sections: dict[str, Section] = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: _effective(section, config.inactive) for name, section in sections.items()}


def _effective(section: Section, inactive: Iterable[str]) -> dict[str, JSON]:
    values: dict[str, JSON] = section.model_dump(mode="json", exclude_none=True)
    for name in (*section.without_effect, *(name for name in inactive if not section.was_set(name))):
        table, key = section.table_keys().get(name, ("", name))
        holder = values.get(table) if table else values
        if isinstance(holder, dict):
            holder.pop(key, None)
    return values


def write_toml(config: Section, path: Path, *, tables: Values | None = None, signed: bool = False) -> None:
    """Write every value that has an effect, so that reading the file gives an equal object.

    tables: further ones that the file gets; it is then no longer a file of this configuration alone. signed:
    see `agentrl.runtime.ownership.write_signed`.

    Raises:
        ConfigError: a table or a list holds None, which TOML cannot represent.
    """
    values = {**effective_values(config), **(tables or {})}
    for name, value in values.items():
        _refuse_null(name, value)
    write = write_signed if signed else write_text
    write(path, tomli_w.dumps(values))


def _refuse_null(where: str, value: JSON) -> None:
    if value is None:
        raise ConfigError(f"`{where}` is null, which the run's config.toml cannot hold; leave it out.")
    names = {f"{where}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {}
    if isinstance(value, list):
        names = {f"{where}[{index}]": item for index, item in enumerate(value)}
    for name, item in names.items():
        _refuse_null(name, item)


def _refuse_unknown_keys(tree: type[Section], values: Mapping[str, JSON], source: str) -> None:
    section_names = _section_names(tree)
    for section, section_values in values.items():
        if section not in tree.model_fields:
            if section in section_names:
                raise ConfigError(
                    f"{source}: `{section}` belongs in section [{section_names[section]}]; move it there."
                )
            raise ConfigError(
                f"{source}: unknown section [{section}].{did_you_mean(section, tree.model_fields)}"
            )
        if not isinstance(section_values, dict):
            raise ConfigError(f"{source}: [{section}] must be a table of settings, got {section_values!r}.")
        for path, name in _names(tree, section, section_values, source):
            if section_names.get(name) != section:
                raise ConfigError(f"{source}: unknown key `{section}.{path}`.{_where(name, section_names)}")


def _section_names(tree: type[Section]) -> dict[str, str]:
    """The section of every name of a setting, spellings included."""
    return {name: section for name, (section, _) in (leaves(tree) | spellings(tree)).items()}


def _names(
    tree: type[Section], section: str, values: Mapping[str, JSON], source: str
) -> Iterator[tuple[str, str]]:
    """The path of each key below the section, and its flat name."""
    tables = _sections(tree)[section].tables()
    for name, value in values.items():
        if name not in tables:
            yield name, name
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", f"{name}_{key}") for key in value)
        else:
            raise ConfigError(f"{source}: [{section}.{name}] must be a table of settings, got {value!r}.")


def _where(name: str, section_names: Mapping[str, str]) -> str:
    if name in section_names:
        return f" It belongs in section [{section_names[name]}]."
    return did_you_mean(name, section_names)


def _sentence(problems: Sequence[ErrorDetails], source: str) -> str:
    # A JSON value that is not finite fails as every kind of JSON.
    infinite = [problem for problem in problems if problem["type"] == "finite_number"]
    problem = (*infinite, *problems)[0]
    where = ".".join(str(part) for part in problem["loc"] if not (infinite and part in ("int", "float")))
    if problem["type"] == "value_error":
        # The validators of agentrl raise complete sentences.
        return f"{source}: {problem['msg'].removeprefix('Value error, ')}"
    value = problem["input"]
    reason = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{source}: `{where}` = {value!r} does not fit: {reason}."

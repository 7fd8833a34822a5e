"""A tree of sections: from TOML and flags to a checked configuration, and back; one error sentence."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentrl.config.keys import NAME, either, undecided
from agentrl.config.section import Changes, Section, Spelling, is_on
from agentrl.errors import ConfigError, did_you_mean
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import read_file, write_signed
from agentrl.types import JSON

Values = dict[str, dict[str, JSON]]

S = TypeVar("S", bound=Section)


def leaves(tree: type[Section]) -> dict[str, tuple[str, FieldInfo]]:
    """Map the flat name of each key to its section's name and its field.

    Raises:
        ValueError: two sections use one name (a bug of agentrl, not the user's).
    """
    tree_leaves: dict[str, tuple[str, FieldInfo]] = {}
    for section, kind in sections_of(tree).items():
        for name, leaf in kind.keys().fields.items():
            if name in tree_leaves:
                raise ValueError(f"leaf {name} is in {tree_leaves[name][0]} and in {section}")
            tree_leaves[name] = (section, leaf)
    return tree_leaves


def changes_of(tree: type[Section]) -> dict[str, Changes]:
    """The keys that may change when something goes on, by flat names, each with what it changes then."""
    found: dict[str, Changes] = {}
    for section in sections_of(tree).values():
        for name, leaf in section.keys().fields.items():
            marks = [mark for mark in leaf.metadata if isinstance(mark, Changes)]
            if mark := next(iter(marks), section.all_change):
                found[name] = mark
    return found


def defaults(tree: type[Section]) -> Values:
    """What every key is where it is left out, by section."""
    found: Values = {}
    for name, (section, leaf) in leaves(tree).items():
        default = leaf.get_default(call_default_factory=True)
        # As JSON has it.
        found.setdefault(section, {})[name] = list(default) if isinstance(default, tuple) else default
    return found


def spellings(tree: type[Section]) -> dict[str, tuple[str, Spelling]]:
    """Map the name of each spelling to its section's name and the spelling."""
    return {
        name: (section, spelling)
        for section, kind in sections_of(tree).items()
        for name, spelling in kind.spellings.items()
    }


def others_of(tree: type[Section]) -> Mapping[str, str]:
    """The settings of other tools that a tree knows, each with what to do in place of it."""
    return _others_in(tree.others) if tree.others else {}


@cache
def _others_in(path: Path) -> Mapping[str, str]:
    return {name: str(text) for name, text in tomllib.loads(path.read_text("utf-8")).items()}


def sections_of(tree: type[Section]) -> dict[str, type[Section]]:
    """The sections of a tree, by name.

    Raises:
        ValueError: a field of the tree is none (a bug of agentrl, not the user's).
    """
    for section in tree.model_fields.keys() - tree.keys().nested():
        raise ValueError(f"{section} is not a section")
    return {name: type(field.default) for name, field in tree.model_fields.items()}


def parse(tree: type[S], values: Mapping[str, JSON], *, source: str) -> S:
    """Build the configuration.

    Raises:
        ConfigError: one sentence with the key, the value and the remedy.
    """
    _refuse_unknown_keys(tree, values, source)
    try:
        return tree.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(tree, error.errors(), source)) from None


def refuse_inactive(config: Section, settings: Mapping[str, JSON], *, source: str) -> None:
    """Check that each of the leaves that were set for this run has an effect in it.

    Raises:
        ConfigError: with the name of the leaf without effect.
    """
    inactive, sections = config.inactive, _section_names(type(config))
    for name, value in settings.items():
        resolved = sections_of(type(config))[sections[name]].resolved(name, value, {}) if is_on(value) else ()
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
            raise ConfigError(f"unknown setting `{name}`{_instead(tree, name)}")
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
            merged[section] = _merged(sections_of(tree)[section], base_values, values)
        except ValueError as error:
            raise ConfigError(f"the settings given: {error}") from None
    return merged


def _merged(kind: type[Section], below: JSON, above: Mapping[str, JSON]) -> dict[str, JSON]:
    base = kind.canonical(below) if isinstance(below, dict) else {}
    own = kind.canonical(above, base)
    # A run's config.toml has the defaults of its variants, too, which may have no effect in another one.
    defaults_alone = undecided(kind.keys(), base, own)
    return {name: value for name, value in base.items() if name not in defaults_alone} | own


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
    """Plain values of a tree of sections by flat names, without None and the keys that have no effect.

    They include inactive keys that were set.
    """
    sections: dict[str, Section] = {name: getattr(config, name) for name in type(config).model_fields}
    inactive = config.inactive
    return {
        name: {
            key: value
            for key, value in section.effective().items()
            if key not in inactive or section.was_set(key)
        }
        for name, section in sections.items()
    }


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
                raise ConfigError(f"{source}: unknown key `{section}.{path}`{_instead(tree, name)}")


def _section_names(tree: type[Section]) -> dict[str, str]:
    """The section of every name of a setting, spellings included."""
    return {name: section for name, (section, _) in (leaves(tree) | spellings(tree)).items()}


def _names(
    tree: type[Section], section: str, values: Mapping[str, JSON], source: str
) -> Iterator[tuple[str, str]]:
    """The path of each key below the section, and its flat name."""
    keys = sections_of(tree)[section].keys()
    for name, value in values.items():
        if keys.is_table(name) and not isinstance(value, dict):
            raise ConfigError(f"{source}: [{section}.{name}] must be a table of settings, got {value!r}.")
        yield from ((path, flat) for path, flat, _ in keys.flat(name, value))


def _instead(tree: type[Section], name: str) -> str:
    """What to do in place of a setting that is not there, behind its name."""
    section_names, others = _section_names(tree), others_of(tree)
    if name in section_names:
        return f". It belongs in section [{section_names[name]}]."
    return f": {others[name]}" if name in others else f".{did_you_mean(name, section_names)}"


def _sentence(tree: type[Section], problems: Sequence[ErrorDetails], source: str) -> str:
    # A JSON value that is not finite fails as every kind of JSON.
    infinite = [problem for problem in problems if problem["type"] == "finite_number"]
    problem = (*infinite, *problems)[0]
    section, *place = problem["loc"] or ("",)
    path = sections_of(tree)[str(section)].keys().path_of(place) if place else ()
    where = ".".join(str(part) for part in (section, *path) if not (infinite and part in ("int", "float")))
    if problem["type"] == "value_error":
        # The validators of agentrl raise complete sentences.
        return f"{source}: {problem['msg'].removeprefix('Value error, ')}"
    if problem["type"] == "union_tag_invalid":
        given, tags = problem["input"][NAME], problem["ctx"]["expected_tags"].split(", ")
        return f"{source}: `{where}` = {given!r} does not fit: input should be {either(tags)}."
    value = problem["input"]
    reason = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{source}: `{where}` = {value!r} does not fit: {reason}."

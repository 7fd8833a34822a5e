"""The mechanism of configuration: frozen pydantic sections, TOML in and out, one error sentence.

A run's configuration is a tree of one level: sections, each a `Section` that lives beside the
code it configures. Leaf names are unique over the tree, so the same word is a TOML key
(`[rollout] num_rollout = 40`) and a flag (`--num-rollout 40`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Self, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentrl.errors import ConfigError, did_you_mean
from agentrl.types import JSON

Values = dict[str, dict[str, JSON]]


class Section(BaseModel):
    """Base of every section: frozen, closed to unknown keys, each field described."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Keys that change nothing under the values of the others, each with what would make it act.

        Such a key is refused where it was set, and left out where the configuration is written.
        """
        return {}

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        for name, need in self.without_effect.items():
            # None and False are the ways to say that something is off.
            if name in self.model_fields_set and getattr(self, name) not in (None, False):
                raise ValueError(f"{name} has no effect without {need}; add it, or leave {name} out.")
        return self


S = TypeVar("S", bound=Section)


def leaves(tree: type[Section]) -> dict[str, tuple[str, FieldInfo]]:
    """Map each leaf's name to its section's name and its field.

    Raises:
        ValueError: two sections use one leaf name (a mistake of ours, not the user's).
    """
    found: dict[str, tuple[str, FieldInfo]] = {}
    for section, holder in tree.model_fields.items():
        section_type = holder.annotation
        if not (isinstance(section_type, type) and issubclass(section_type, Section)):
            raise ValueError(f"{section} is not a section")
        for name, leaf in section_type.model_fields.items():
            if name in found:
                raise ValueError(f"leaf {name} stands in {found[name][0]} and in {section}")
            found[name] = (section, leaf)
    return found


def parse(tree: type[S], values: Mapping[str, JSON], *, source: str) -> S:
    """Build the configuration, or say in one sentence what is wrong and where.

    Raises:
        ConfigError: naming the key, the value and the next move.
    """
    _refuse_unknown_keys(tree, values, source)
    try:
        return tree.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0], source)) from None


def place(tree: type[Section], flat: Mapping[str, JSON]) -> Values:
    """Sort flat leaf values into their sections.

    Raises:
        ConfigError: no leaf has that name.
    """
    known = leaves(tree)
    placed: Values = {}
    for name, value in flat.items():
        if name not in known:
            raise ConfigError(f"unknown setting `{name}`.{did_you_mean(name, known)}")
        placed.setdefault(known[name][0], {})[name] = value
    return placed


def merge(base: Mapping[str, JSON], over: Values) -> dict[str, JSON]:
    """`base` with the leaves of `over` in place of its own."""
    merged = dict(base)
    for section, values in over.items():
        below = merged.get(section, {})
        merged[section] = {**below, **values} if isinstance(below, dict) else values
    return merged


def read_toml(path: Path) -> dict[str, JSON]:
    """Read a TOML file.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no run file {path}; check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not a TOML file ({error}); mend that and start again.") from None


def effective_values(config: Section) -> Values:
    """Plain values of a tree of sections, without None and without the keys that have no effect."""
    sections: dict[str, Section] = {name: getattr(config, name) for name in type(config).model_fields}
    return {
        name: section.model_dump(mode="json", exclude_none=True, exclude=set(section.without_effect))
        for name, section in sections.items()
    }


def write_toml(config: Section, path: Path) -> None:
    """Write every value that has an effect, so that reading the file gives an equal object.

    Raises:
        ConfigError: a table or a list holds None, which TOML cannot say.
    """
    values = effective_values(config)
    for name, value in values.items():
        _refuse_null(name, value)
    path.write_text(tomli_w.dumps(values), encoding="utf-8")


def _refuse_null(where: str, value: JSON) -> None:
    if value is None:
        raise ConfigError(f"`{where}` is null, which the run's config.toml cannot hold; leave it out.")
    if isinstance(value, dict):
        for name, below in value.items():
            _refuse_null(f"{where}.{name}", below)
    if isinstance(value, list):
        for index, below in enumerate(value):
            _refuse_null(f"{where}[{index}]", below)


def _refuse_unknown_keys(tree: type[Section], values: Mapping[str, JSON], source: str) -> None:
    known = leaves(tree)
    for section, below in values.items():
        if section not in tree.model_fields:
            if section in known:
                raise ConfigError(
                    f"{source}: `{section}` belongs in section [{known[section][0]}]; move it there."
                )
            raise ConfigError(
                f"{source}: unknown section [{section}].{did_you_mean(section, tree.model_fields)}"
            )
        if not isinstance(below, dict):
            raise ConfigError(f"{source}: [{section}] must be a table of settings, got {below!r}.")
        for name in below:
            if known.get(name, ("",))[0] != section:
                raise ConfigError(f"{source}: unknown key `{section}.{name}`.{_where(name, known)}")


def _where(name: str, known: Mapping[str, tuple[str, FieldInfo]]) -> str:
    if name in known:
        return f" It belongs in section [{known[name][0]}]."
    return did_you_mean(name, known)


def _sentence(problem: ErrorDetails, source: str) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "value_error":
        # Our own validators write whole sentences.
        text = problem["msg"].removeprefix("Value error, ")
        return f"{source}: {text}"
    value = problem["input"]
    reason = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{source}: `{where}` = {value!r} does not fit: {reason}."

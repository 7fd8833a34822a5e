"""A section of a configuration: its keys, tables and spellings, and which of them have an effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from agentrl.types import JSON

Count = Annotated[int, Field(ge=1)]
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.<>()]+$")]
"""Where a function stands: package.module:name; <locals> in it are those of a function of this process."""


class Spelling(NamedTuple):
    """An alias for settings, under the name of another tool.

    text: for --help. stands_for: from its value, and the section's values of lower precedence, to the
    settings that it stands for. is_switch: its value is true or false.
    """

    text: str
    stands_for: Callable[[JSON, Mapping[str, JSON]], Mapping[str, JSON]]
    is_switch: bool = True


def renamed(key: str) -> Spelling:
    """Another name for `key`."""
    return Spelling(f"Same as {key}.", lambda value, _: {key: value}, is_switch=False)


def chosen(key: str, choice: str, otherwise: str) -> Spelling:
    """A switch for one value of `key`; switched off, it replaces that value, and no other, by `otherwise`."""

    def stands_for(on: JSON, before: Mapping[str, JSON]) -> Mapping[str, JSON]:
        if on:
            return {key: choice}
        return {key: otherwise} if before.get(key) == choice else {}

    return Spelling(f"Same as {key} = {choice}.", stands_for)


class Section(BaseModel):
    """Base of every section: frozen, without unknown keys, each field with a docstring, each number finite.

    A field that is a section itself is a table: its key `clip` in the table `tis` is also the flat name
    `tis_clip`. spellings: aliases of the section's keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    spellings: ClassVar[Mapping[str, Spelling]] = {}

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Keys and tables without effect under the values of the others, each with a condition and a remedy.

        Such a key is refused where it was set, and left out where the configuration is written. The text
        goes between "has no effect" and "or leave it out": `without use_tis; add it`.
        """
        return {}

    @property
    def inactive(self) -> dict[str, str]:
        """Leaves without effect in this run that may have one in another; the text as above. A tree's: of all
        sections.

        A file may be for several commands and machines, so they are kept, and listed where they were set. One
        that is set for this run only is refused, see `refuse_inactive`.
        """
        sections: list[Section] = [getattr(self, name) for name in self.tables()]
        return {name: change for section in sections for name, change in section.inactive.items()}

    @classmethod
    def tables(cls) -> dict[str, type[Section]]:
        """The fields that are sections themselves."""
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {n: kind for n, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}

    @classmethod
    def table_keys(cls) -> dict[str, tuple[str, str]]:
        """The flat names of the keys in tables: table and key of each."""
        return {
            f"{table}_{key}": (table, key)
            for table, kind in cls.tables().items()
            for key in kind.model_fields
        }

    @classmethod
    def canonical(
        cls, values: Mapping[str, JSON], before: Mapping[str, JSON] | None = None
    ) -> dict[str, JSON]:
        """`values` under the section's own keys: no spellings, and no flat names of keys in tables.

        before: the canonical values of lower precedence.

        Raises:
            ValueError: two names give one setting different values.
        """
        settings: dict[str, tuple[str, JSON]] = {}
        for name, value in values.items():
            for key, resolved in cls.resolved(name, value, before or {}).items():
                other, earlier = settings.setdefault(key, (name, resolved))
                if other != name and earlier != resolved:
                    raise ValueError(f"{other} and {name} both set {key}; choose one.")
        nested: dict[str, JSON] = {}
        table_keys = cls.table_keys()
        for key, (_, value) in settings.items():
            if key not in table_keys:
                nested[key] = value
                continue
            table_name, table_key = table_keys[key]
            table = nested.setdefault(table_name, {})
            if not isinstance(table, dict):
                raise ValueError(f"{table_name} is no table of settings, and {key} belongs there.")
            table[table_key] = value
        return nested

    @classmethod
    def resolved(cls, name: str, value: JSON, before: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """The flat settings that one name stands for. before: as for `canonical`."""
        if name in cls.spellings:
            return cls.spellings[name].stands_for(value, before)
        if name in cls.tables() and isinstance(value, dict):
            return {f"{name}_{key}": item for key, item in value.items()}
        return {name: value}

    def was_set(self, name: str) -> bool:
        """Whether a key of the section, or the flat name of a key in a table, was set."""
        table, key = self.table_keys().get(name, ("", name))
        holder: Section = getattr(self, table) if table else self
        return key in holder.model_fields_set

    @model_validator(mode="before")
    @classmethod
    def _under_own_keys(cls, values: object) -> object:
        # A tree of sections is not a section with tables: not the tree has spellings, but each section.
        return cls.canonical(values) if isinstance(values, dict) and not cls._is_tree() else values

    @classmethod
    def _is_tree(cls) -> bool:
        return len(cls.tables()) == len(cls.model_fields)

    @field_validator("*", mode="before")
    @classmethod
    def _as_it_is_spelled_here(cls, value: object, info: ValidationInfo) -> object:
        """One of several words in another spelling, such as GRPO or REINFORCE++, as its own."""
        words = _words_of(cls.model_fields[str(info.field_name)].annotation)
        if not isinstance(value, str) or value in words:
            return value
        return next((word for word in words if _plain(word) == _plain(value)), value)

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        for name, change in self.without_effect.items():
            for key in self._set_keys(name):
                raise ValueError(f"{key} has no effect {change}, or leave {key} out.")
        return self

    def _set_keys(self, name: str) -> Sequence[str]:
        """The keys that were set, of a key or of a table; None and False switch a setting off."""
        table, key = self.table_keys().get(name, ("", name))
        holder: Section = getattr(self, table) if table else self
        value = getattr(holder, key)
        if isinstance(value, Section):
            return [f"{key}_{name}" for name in value.model_fields_set if is_on(getattr(value, name))]
        return [name] if key in holder.model_fields_set and is_on(value) else []


def _words_of(hint: object) -> tuple[str, ...]:
    """The words that a type admits; empty where it admits others, too."""
    if get_origin(hint) is Literal:
        return tuple(word for word in get_args(hint) if isinstance(word, str))
    return tuple(word for part in get_args(hint) for word in _words_of(part))


def _plain(word: str) -> str:
    return re.sub(r"[\W_]", "", word.lower().replace("++", "plusplus"))


def is_on(value: object) -> bool:
    """Whether a value switches its setting on."""
    return value is not None and value is not False

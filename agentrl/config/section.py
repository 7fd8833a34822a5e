"""A section of a configuration: its keys, tables, variants and spellings, and which keys have an effect."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from agentrl.config.keys import NAME, Implied, Keys, keys_of
from agentrl.types import JSON

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
ShareAboveZero = Annotated[float, Field(gt=0.0, le=1.0)]
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")


def import_path(text: str) -> str:
    """The path `package.module:name` of a path as `file.py:name` or `package.module.name`; others unchanged.

    Raises:
        ValueError: the file is not below the folder that the command starts in, from which modules are
            imported, or its path has a word that no module can be called.
    """
    file, colon, name = text.rpartition(":")
    if not colon:
        module, dot, name = text.rpartition(".")
        return f"{module}:{name}" if dot and _DOTTED.fullmatch(text) else text
    if not file.endswith(".py"):
        return text
    path = Path(os.path.relpath(file)).with_suffix("")
    if path.parts[0] == os.pardir or not all(part.isidentifier() for part in path.parts):
        raise ValueError(
            f"{file} cannot be imported: modules are files below the folder that the command starts in, with "
            "names of letters, digits and `_`; start it there, or move the file."
        )
    return f"{'.'.join(path.parts)}:{name}"


_AS_PATH = BeforeValidator(lambda value: import_path(value) if isinstance(value, str) else value)
ImportPath = Annotated[str, _AS_PATH, Field(pattern=r"^[\w.]+:[\w.<>()]+$")]
"""Where a function stands: package.module:name; <locals> in it are those of a function of this process."""
NameOrPath = Annotated[str, _AS_PATH]
"""A name that is registered, or where a function stands."""


def _parted(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


IN_COMMAS = BeforeValidator(_parted)
"""Beside a key of several words or numbers: as a flag it has commas between them."""


class Needs(NamedTuple):
    """Beside a key or a table: it has no effect without another key of its section."""

    key: str


class Changes(Enum):
    """Beside a key that may change when something goes on from what it has recorded: what it changes then.

    A key without it decides what was recorded, and stays.
    """

    COURSE = "how long it goes on, what is kept and reported"
    LEARNING = "what is learned from then on"
    PLACE = "where it is, or what it is reached by"
    SPEED = "how fast something is computed, or on what"


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

    A field that is a section itself is a table of keys; one that is a union of variants takes the name of one
    of them, and has its keys alone. Every key has one flat name, under which it is a key of a file, a flag
    and a keyword: its own, or, in a class with a prefix, `prefix_key` (`tis_clip`). A file may group them as
    tables (`[algorithm.tis]` clip, or `correction = {name = "tis", clip = 3}`).

    prefix: of the flat names of the keys that a class adds. all_change: what all keys of the section change.
    spellings: aliases of the section's keys. others: of a tree, a TOML file of settings that other tools have
    and the tree has not, each with what to do in place of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    prefix: ClassVar[str] = ""
    all_change: ClassVar[Changes | None] = None
    spellings: ClassVar[Mapping[str, Spelling]] = {}
    others: ClassVar[Path | None] = None

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Keys and tables without effect under the values of the others, each with a condition and a remedy;
        those beside which it says so (`Needs`) need not be here.

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
        return {name: change for section in self._held() for name, change in section.inactive.items()}

    @property
    def inert(self) -> Mapping[str, str]:
        """The flat names of the keys without effect in this section, its tables and its variants."""
        keys, found = self.keys(), dict(self._unmet())
        found.update(self.without_effect)
        for name in [*keys.nested() & found.keys()]:
            change = found.pop(name)
            found.update(dict.fromkeys(keys.of_field(name), change))
        for section in self._held():
            found.update(section.inert)
        return found

    @classmethod
    def keys(cls) -> Keys:
        """The flat names of the section's keys."""
        return keys_of(cls)

    @classmethod
    def canonical(
        cls, values: Mapping[str, JSON], before: Mapping[str, JSON] | None = None
    ) -> dict[str, JSON]:
        """`values` under flat names alone: no spellings, and no tables.

        before: the canonical values of lower precedence.

        Raises:
            ValueError: two names give one setting different values.
        """
        settings: dict[str, tuple[str, JSON]] = {}
        keys, known = cls.keys(), dict(before or {})
        # The keys of a table are those of a variant, which another name may give.
        for name, value in sorted(values.items(), key=lambda item: keys.is_table_of_variants(*item)):
            if keys.is_table_of_variants(name, value):
                found: Mapping[str, JSON] = {flat: item for _, flat, item in keys.flat(name, value, known)}
            else:
                found = cls.resolved(name, value, before or {})
            for key, resolved in found.items():
                other, earlier = settings.setdefault(key, (name, resolved))
                if other != name and earlier != resolved:
                    raise ValueError(f"{other} and {name} both set {key}; choose one.")
                known[key] = resolved
        return {key: keys.as_spelled(key, value) for key, (_, value) in settings.items()}

    @classmethod
    def resolved(cls, name: str, value: JSON, before: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """The flat settings that one name stands for. before: as for `canonical`."""
        if name in cls.spellings:
            return cls.spellings[name].stands_for(value, before)
        return {flat: item for _, flat, item in cls.keys().flat(name, value)}

    def was_set(self, name: str) -> bool:
        """Whether a key, by its flat name, was set."""
        holder, key = self._holder_of(name)
        return key in holder.model_fields_set

    def effective(self) -> dict[str, JSON]:
        """Plain values of the keys that have an effect, by flat names, without None."""
        values: dict[str, JSON] = {}
        dump: Mapping[str, JSON] = self.model_dump(mode="json", exclude_none=True)
        nested = self.keys().nested()
        for field, value in dump.items():
            if field in nested and isinstance(value, dict):
                kind = type(getattr(self, field))
                values.update({self.keys().name_in(field, kind, key): each for key, each in value.items()})
            else:
                values[field] = value
        inert = self.inert
        return {name: value for name, value in values.items() if name not in inert}

    @model_validator(mode="before")
    @classmethod
    def _under_own_keys(cls, values: object) -> object:
        # A tree of sections is not a section with tables: not the tree has spellings, but each section.
        if not isinstance(values, dict) or cls.keys().is_tree:
            return values
        return cls.keys().grouped(cls.canonical(_without_objects(values)))

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        for name, change in self.inert.items():
            holder, key = self._holder_of(name)
            if key in holder.model_fields_set and is_on(getattr(holder, key)):
                raise ValueError(f"{name} has no effect {change}, or leave {name} out.")
        return self

    def _held(self) -> Sequence[Section]:
        return [getattr(self, name) for name in self.keys().nested()]

    def _holder_of(self, name: str) -> tuple[Section, str]:
        """The section, table or variant that has a key, by its flat name, and the key there."""
        for field in self.keys().nested():
            holder: Section = getattr(self, field)
            for key in type(holder).model_fields:
                if self.keys().name_in(field, type(holder), key) == name:
                    return holder, key
        own = type(self)
        return self, next((key for key in own.model_fields if keys_of(own).name_of(key) == name), name)

    def _unmet(self) -> Iterator[tuple[str, str]]:
        own = type(self)
        for key, field in own.model_fields.items():
            for needs in field.metadata:
                if isinstance(needs, Needs) and not is_on(getattr(self, needs.key)):
                    yield keys_of(own).name_of(key), f"without {keys_of(own).name_of(needs.key)}; add it"


class Variant(Section):
    """One of several kinds of a setting, by its name."""

    name: str

    @model_validator(mode="wrap")
    @classmethod
    def _by_default(cls, values: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        variant = handler(values)
        if isinstance(values, dict) and isinstance(values.get(NAME), Implied):
            variant.model_fields_set.discard(NAME)
        return variant


def _without_objects(values: Mapping[str, JSON | BaseModel]) -> dict[str, JSON]:
    """Tables and variants that were given as objects, as what was set in them."""
    plain: dict[str, JSON] = {}
    for name, value in values.items():
        if isinstance(value, BaseModel):
            kind: dict[str, JSON] = {NAME: value.name} if isinstance(value, Variant) else {}
            plain[name] = kind | {key: getattr(value, key) for key in value.model_fields_set}
        else:
            plain[name] = value
    return plain


def is_on(value: object) -> bool:
    """Whether a value switches its setting on; an empty table or list says nothing."""
    return value is not None and value is not False and value not in ({}, [], ())

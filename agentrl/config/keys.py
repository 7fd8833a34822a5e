"""The keys of a section, of its tables and of its variants: one flat name for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import get_annotations
from types import MappingProxyType, UnionType
from typing import Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentrl.types import JSON

Model = type[BaseModel]

NAME = "name"
"""The key of a variant that says which one it is."""
_FEW, _OFF = 6, "none"


class Implied(str):
    """The name of a variant that nobody gave: it is the one by default."""


@cache
def keys_of(section: Model) -> Keys:
    """The keys of a section."""
    return Keys(section)


@dataclass(frozen=True)
class Keys:
    """The flat names of a section's keys."""

    section: Model

    @cached_property
    def kinds(self) -> Mapping[str, Sequence[Model]]:
        """What a field that is no plain key may hold: the section of a table, or the variants."""
        fields = self.section.model_fields
        kinds = {name: _sections(field.annotation) for name, field in fields.items()}
        return {name: kind for name, kind in kinds.items() if kind}

    @property
    def is_tree(self) -> bool:
        """Whether every field is a section, so that this is a tree and no section."""
        return len(self.kinds) == len(self.section.model_fields)

    def nested(self) -> Set[str]:
        """The fields that are tables or variants."""
        return self.kinds.keys()

    def has_variants(self, field: str) -> bool:
        """Whether a field takes one of several variants."""
        return len(self.kinds.get(field, ())) > 1

    def name_of(self, key: str) -> str:
        """The flat name of one of the section's own keys."""
        return _flat_name(self.section, key)

    def name_in(self, field: str, kind: Model, key: str) -> str:
        """The flat name of a key of a table or a variant."""
        return field if key == NAME and self.has_variants(field) else _flat_name(kind, key)

    @cached_property
    def fields(self) -> Mapping[str, FieldInfo]:
        """Every key by its flat name; of a key that some variants have, the description says which.

        Its default is that of the variant by default, or of the first that has it.
        """
        fields: dict[str, FieldInfo] = {}
        for name, field in self.section.model_fields.items():
            kinds = self.kinds.get(name, ())
            if not kinds:
                fields[name] = field
            elif len(kinds) == 1:
                fields |= {_flat_name(kinds[0], k): leaf for k, leaf in kinds[0].model_fields.items()}
            else:
                fields |= _of_variants(name, field, kinds)
        return fields

    def of_field(self, field: str) -> Sequence[str]:
        """The flat names of all keys of a table or of variants."""
        names = (self.name_in(field, kind, key) for kind in self.kinds[field] for key in kind.model_fields)
        return [*dict.fromkeys(names)]

    def owners(self) -> dict[str, tuple[str, Sequence[str]]]:
        """The keys of variants, by flat names: the field, and the names of the variants that have each."""
        return {
            name: (field, [_variant_name(kind) for kind in _having(self.kinds[field], name)])
            for field in filter(self.has_variants, self.kinds)
            for name in self.of_field(field)
            if name != field
        }

    def flat(
        self, name: str, value: JSON, known: Mapping[str, JSON] = MappingProxyType({})
    ) -> Iterator[tuple[str, str, JSON]]:
        """What a name of a file stands for: the path that was written, the flat name and the value of each.

        A table may be a field, or the prefix of some keys. known: other settings, by flat names.
        """
        if not isinstance(value, dict) or not (name in self.kinds or name in self._prefixes):
            yield name, name, value
            return
        for key, item in value.items():
            variant = self.as_spelled(name, value.get(NAME, known.get(name)))
            yield f"{name}.{key}", self._name_in_table(name, key, variant), item

    def path_of(self, place: Sequence[int | str]) -> Sequence[int | str]:
        """The place of a value in the section's fields, by its flat name."""
        field, *rest = place
        kinds = self.kinds.get(str(field), ())
        if self.has_variants(str(field)) and rest:
            variant, *rest = rest
            kinds = [kind for kind in kinds if _variant_name(kind) == variant]
        return [_flat_name(kinds[0], str(rest[0])), *rest[1:]] if kinds and rest else place

    def is_table(self, name: str) -> bool:
        """Whether a name takes a table alone: it is that of one, or the prefix of some keys."""
        is_prefix = name in self._prefixes and name not in self.fields
        return is_prefix or (name in self.kinds and not self.has_variants(name))

    def is_table_of_variants(self, name: str, value: JSON | BaseModel) -> bool:
        """Whether a value has the keys of one of several variants."""
        return isinstance(value, dict) and self.has_variants(name)

    def as_spelled(self, name: str, value: JSON) -> JSON:
        """One of several words in another spelling, such as GRPO or REINFORCE++, as its own."""
        words = words_of(self.fields[name].annotation) if name in self.fields else ()
        if not isinstance(value, str) or value in words:
            return value
        return next((word for word in words if plain(word) == plain(value)), value)

    def grouped(self, values: Mapping[str, JSON]) -> dict[str, JSON]:
        """Values by flat names, as the section's fields take them.

        Raises:
            ValueError: a key is on that the variant has not.
        """
        grouped: dict[str, JSON] = {}
        tables: dict[str, dict[str, JSON]] = {}
        for name, value in values.items():
            field, key = self._places.get(name, ("", name))
            if self.has_variants(field):
                tables.setdefault(field, {}).update(self._of_variant(field, name, values))
            elif field:
                tables.setdefault(field, {})[key] = value
            else:
                grouped[name] = value
        return grouped | {field: table for field, table in tables.items() if table}

    def _of_variant(self, field: str, name: str, values: Mapping[str, JSON]) -> dict[str, JSON]:
        """One of the values as a key of the chosen variant, with the variant's name."""
        value, (_, key), kind = values[name], self._places[name], self._variant(field, values)
        if kind is None:
            return {NAME: values[field]}
        chosen: JSON = values[field] if field in values else Implied(_variant_name(kind))
        if key in kind.model_fields and self.name_in(field, kind, key) == name:
            return {NAME: chosen, key: value}
        if value is not None and value is not False:
            raise ValueError(f"{name} has no effect {self._without(field, kind, name)}, or leave {name} out.")
        return {}

    @cached_property
    def _places(self) -> Mapping[str, tuple[str, str]]:
        """The field and the key there of every flat name that is not a plain key."""
        return {
            self.name_in(field, kind, key): (field, key)
            for field, kinds in self.kinds.items()
            for kind in kinds
            for key in kind.model_fields
        }

    @cached_property
    def _prefixes(self) -> Set[str]:
        kinds = [kind for kinds in self.kinds.values() for kind in kinds]
        return {base.__dict__.get("prefix", "") for kind in kinds for base in kind.__mro__} - {""}

    def _name_in_table(self, table: str, key: str, variant: JSON) -> str:
        kinds = self.kinds.get(table, ())
        is_named = self.has_variants(table) and variant is not None
        named = [kind for kind in kinds if is_named and _variant_name(kind) == variant]
        having = [kind for kind in kinds if key in kind.model_fields]
        chosen = next((kind for kind in named if kind in having), None)
        names = {self.name_in(table, kind, key) for kind in ([chosen] if chosen else having)}
        # One that several others have is of none of them.
        return names.pop() if len(names) == 1 else f"{table}_{key}"

    def _variant(self, field: str, values: Mapping[str, JSON]) -> Model | None:
        """The variant that the values name, or by default; None = there is none of that name."""
        if field not in values:
            return type(self.section.model_fields[field].default)
        return next((kind for kind in self.kinds[field] if _variant_name(kind) == values[field]), None)

    def _without(self, field: str, kind: Model, name: str) -> str:
        having = [_variant_name(kind) for kind in _having(self.kinds[field], name)]
        if having == [_OFF]:
            return f"with {field} = {_variant_name(kind)}; drop that"
        if len(having) <= _FEW:
            return f"without {field} = {either(having)}; choose it"
        return f"with {field} = {_variant_name(kind)}; choose another"


def undecided(keys: Keys, below: Mapping[str, JSON], above: Mapping[str, JSON]) -> set[str]:
    """The keys of variants that `above` replaces, whose values in `below` are defaults all the same."""
    found = set()
    for name, (field, _) in keys.owners().items():
        kinds = [kind for kind in keys.kinds[field] if _variant_name(kind) == above.get(field)]
        if kinds and name in below:
            leaves = (
                leaf for key, leaf in kinds[0].model_fields.items() if _flat_name(kinds[0], key) == name
            )
            if below[name] == next(leaves, keys.fields[name]).get_default(call_default_factory=True):
                found.add(name)
    return found


def _having(kinds: Sequence[Model], name: str) -> list[Model]:
    """The variants that have a key, by its flat name."""
    return [k for k in kinds if any(_flat_name(k, key) == name for key in k.model_fields if key != NAME)]


def _of_variants(name: str, field: FieldInfo, kinds: Sequence[Model]) -> dict[str, FieldInfo]:
    default: Model = type(field.default)
    names = tuple(map(_variant_name, kinds))
    choice = copy(field)
    choice.annotation, choice.default = cast(type, Literal[names]), _variant_name(default)
    found = {name: choice}
    for kind in (default, *kinds):
        for key, leaf in kind.model_fields.items():
            flat = _flat_name(kind, key)
            if key != NAME and flat not in found:
                found[flat] = copy(leaf)
                found[flat].description = _described(name, kind, kinds, key)
    order = [_flat_name(kind, key) for kind in kinds for key in kind.model_fields if key != NAME]
    return {each: found[each] for each in dict.fromkeys((name, *order))}


def _described(field: str, kind: Model, kinds: Sequence[Model], key: str) -> str:
    """The description of a key, with the variants that have it."""
    leaf, having = kind.model_fields[key], _having(kinds, _flat_name(kind, key))
    text = (leaf.description or "").strip()
    lacking = [kind for kind in kinds if kind not in having]
    if lacking:
        is_most = len(lacking) < len(having)
        few = (
            f"Not with {field} = {_names(lacking)}." if is_most else f"Only with {field} = {_names(having)}."
        )
        text = f"{text} {few}"
    return text


def _names(kinds: Sequence[Model]) -> str:
    return ", ".join(map(_variant_name, kinds))


@cache
def _flat_name(section: Model, key: str) -> str:
    """The name of a key: with the prefix of the class that adds it."""
    for base in reversed(section.__mro__):
        if key in get_annotations(base):
            prefix = base.__dict__.get("prefix", "")
            return f"{prefix}_{key}" if prefix else key
    return key


def _variant_name(kind: Model) -> str:
    return str(kind.model_fields[NAME].default)


def _sections(hint: object) -> Sequence[Model]:
    """The sections that a field may hold: one, or several variants; empty where it is a plain key."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    return kinds if len(kinds) == len(parts) else ()


def either(words: Iterable[str]) -> str:
    """Words as a choice: a, b or c."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def words_of(hint: object) -> tuple[str, ...]:
    """The words that a type admits; empty where it admits others, too."""
    if get_origin(hint) is Literal:
        return tuple(word for word in get_args(hint) if isinstance(word, str))
    return tuple(word for part in get_args(hint) for word in words_of(part))


def plain(word: str) -> str:
    """A word without case and marks: as others spell it."""
    return re.sub(r"[\W_]", "", word.lower().replace("++", "plusplus"))

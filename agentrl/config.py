"""The mechanism of configuration: frozen pydantic sections, TOML in and out, one error sentence.

A run's configuration is a tree of one level: sections, each a `Section` in the package that it configures.
Leaf names are unique over the tree, so the same word is a TOML key (`[rollout] num_rollout = 40`) and a flag
(`--num-rollout 40`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, Self, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agentrl.errors import ConfigError, did_you_mean
from agentrl.types import JSON

Values = dict[str, dict[str, JSON]]

ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
"""Where a function stands: package.module:name."""


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
    """Base of every section: frozen, without unknown keys, each field with a docstring.

    A field that is a section itself is a table: its key `clip` in the table `tis` is also the flat name
    `tis_clip`. spellings: aliases of the section's keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
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
                if earlier != resolved:
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
            return [f"{key}_{name}" for name in value.model_fields_set if _is_on(getattr(value, name))]
        return [name] if key in holder.model_fields_set and _is_on(value) else []


def _is_on(value: object) -> bool:
    return value is not None and value is not False


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
        raise ConfigError(_sentence(error.errors()[0], source)) from None


def refuse_inactive(config: Section, settings: Mapping[str, JSON], *, source: str) -> None:
    """Check that each of the leaves that were set for this run has an effect in it.

    Raises:
        ConfigError: with the name of the leaf without effect.
    """
    inactive, sections = config.inactive, _section_names(type(config))
    for name, value in settings.items():
        resolved = _sections(type(config))[sections[name]].resolved(name, value, {}) if _is_on(value) else ()
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


def write_toml(config: Section, path: Path, *, tables: Values | None = None) -> None:
    """Write every value that has an effect, so that reading the file gives an equal object.

    tables: further ones that the file gets; it is then no longer a file of this configuration alone.

    Raises:
        ConfigError: a table or a list holds None, which TOML cannot represent.
    """
    values = {**effective_values(config), **(tables or {})}
    for name, value in values.items():
        _refuse_null(name, value)
    path.write_text(tomli_w.dumps(values), encoding="utf-8")


def _refuse_null(where: str, value: JSON) -> None:
    if value is None:
        raise ConfigError(f"`{where}` is null, which the run's config.toml cannot hold; leave it out.")
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_null(f"{where}.{name}", item)
    if isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_null(f"{where}[{index}]", item)


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


def _sentence(problem: ErrorDetails, source: str) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "value_error":
        # The validators of agentrl raise complete sentences.
        text = problem["msg"].removeprefix("Value error, ")
        return f"{source}: {text}"
    value = problem["input"]
    reason = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{source}: `{where}` = {value!r} does not fit: {reason}."

"""Flags from the configuration: every leaf of the tree is a flag of the same name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Literal, TypeVar, get_args, get_origin

import rich_click as click
from pydantic.fields import FieldInfo
from rich_click.utils import OptionGroupDict

from agentrl.cli.sections import SettingsCommand, flag_of
from agentrl.config import Section, Spelling, leaves, sections_of, spellings
from agentrl.engine.sglang.launch.arguments import Value, from_flags
from agentrl.errors import ConfigError
from agentrl.types import JSON

T = TypeVar("T")


def config_flags(
    tree: type[Section], *, without: Collection[str] = ()
) -> Callable[[click.Command], click.Command]:
    """A decorator that adds one flag for every leaf to a command, grouped by section in --help.

    without: leaves, and spellings, that have no flag.

    A flag that was not used is None. Text is passed on unparsed: the configuration's own types parse it, so
    that a flag and a TOML key fail with the same sentence.
    """

    def decorate(command: click.Command) -> click.Command:
        sections: dict[str, list[str]] = {}
        for name, (section, leaf) in leaves(tree).items():
            if name in without:
                continue
            command.params.append(_option(name, leaf))
            sections.setdefault(section, []).append(name)
        for name, (section, spelling) in spellings(tree).items():
            if name in without:
                continue
            command.params.append(_other_option(name, spelling))
            sections.setdefault(section, []).append(name)
        if isinstance(command, SettingsCommand):
            command.sections = sections
            command.tree = tree
            owners = [item for kind in sections_of(tree).values() for item in kind.keys().owners().items()]
            command.variants = {
                name: f"{field} = {variants[0]}" for name, (field, variants) in owners if len(variants) == 1
            }
            return command
        panels: list[OptionGroupDict] = [
            {"name": section, "options": [flag_of(name) for name in names]}
            for section, names in sections.items()
        ]
        click.rich_click.OPTION_GROUPS[f"* {command.name}"] = panels
        return command

    return decorate


def flag_values(flags: Mapping[str, str | bool | None], tree: type[Section]) -> dict[str, JSON]:
    """The flags that were used, as values for the configuration.

    Raises:
        ConfigError: the flag of a table or a list is not JSON.
    """
    tree_leaves = leaves(tree)
    aliases = spellings(tree)
    return {
        name: value if name in aliases else _read(name, value, tree_leaves[name][1])
        for name, value in flags.items()
        if value is not None
    }


_SETS = "--eval-prompt-data"
_PATH = re.compile(r".*[/\\].*|.*@\[.*|[\[{].*|.*\.(?:jsonl|json|parquet|arrow|toml)", re.DOTALL)


_SGLANG, _ROUTER = "sglang", "router"
_PREFIXES = {"--sglang-": _SGLANG, "--router-": _ROUTER, "--megatron-": "megatron_config"}
"""Flags of a package's own arguments: the setting whose table they are passed on in."""


class EngineFlags(SettingsCommand):
    """A command that takes the own arguments of SGLang, its router and Megatron, too: --sglang-NAME WORD,
    --router-NAME WORD, --megatron-NAME WORD, one flag for each.

    --eval-prompt-data takes NAME PATH pairs, several at once or one after each flag, as well as one path.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remove the flags of packages, and pass them on as tables; make a table of NAME PATH pairs."""
        options = {
            option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        prefixes = {
            prefix: name for prefix, name in _PREFIXES.items() if any(own.name == name for own in self.params)
        }
        own_args, of_packages = _split_args(
            _with_sets(args), {*options, *map(flag_of, self.others)}, prefixes
        )
        rest = super().parse_args(ctx, own_args)
        for prefix, given in of_packages.items():
            name = prefixes[prefix]
            table = read_json_object(flag_of(name), ctx.params[name] or "{}")
            values = from_flags(given, prefix)
            # SGLang's own parsers read the words.
            typed = (
                values
                if name in (_SGLANG, _ROUTER)
                else {key: _typed(value) for key, value in values.items()}
            )
            ctx.params[name] = json.dumps({**table, **typed})
        return rest


def _split_args(
    args: Sequence[str], options: Collection[str], prefixes: Collection[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Arguments of this command, and by their prefix the flags of packages with the arguments after them."""
    own_args: list[str] = []
    of_packages: dict[str, list[str]] = {}
    target = own_args
    for arg in args:
        if arg.startswith("--"):
            name = arg.partition("=")[0]
            prefix = next((each for each in prefixes if name.startswith(each) and name not in options), None)
            target = own_args if prefix is None else of_packages.setdefault(prefix, [])
        target.append(arg)
    return own_args, of_packages


def _typed(value: Value | JSON) -> JSON:
    """The value of a flag as JSON has it: a number or a truth value where the word is one."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_typed(word) for word in value]
    if not isinstance(value, str):
        return value
    try:
        read: JSON = json.loads(value.lower())
    except ValueError:
        return value
    return value if isinstance(read, dict | list) else read


def _with_sets(args: Sequence[str]) -> list[str]:
    """The arguments with the NAME PATH pairs of --eval-prompt-data as one JSON table.

    Raises:
        ConfigError: a name has no path.
    """
    rest, sets = list[str](), dict[str, str]()
    index = 0
    while index < len(args):
        if args[index] != _SETS or not _is_pair(args[index + 1 :]):
            rest.append(args[index])
            index += 1
            continue
        index += 1
        while _is_pair(args[index:]):
            sets[args[index]] = args[index + 1]
            index += 2
        if index < len(args) and _is_name(args[index]):
            raise ConfigError(
                f"{_SETS} takes NAME PATH pairs, and {args[index]!r} has no path; add it, or put "
                "other arguments first."
            )
    return [*rest, _SETS, json.dumps(sets)] if sets else rest


def _is_pair(words: Sequence[str]) -> bool:
    """Whether the first two words are the name and the path of a set; a run file is no path of prompts."""
    if len(words) < 2 or not _is_name(words[0]):
        return False
    return not words[1].startswith("-") and not words[1].endswith(".toml")


def _is_name(word: str) -> bool:
    return not word.startswith("-") and not _PATH.fullmatch(word)


def _option(name: str, leaf: FieldInfo) -> click.Option:
    text = " ".join((leaf.description or "").split())
    default = leaf.get_default(call_default_factory=True)
    default_text = "none" if default is None else json.dumps(default)
    help_text = f"{text} [default: {default_text}]"
    if {*(get_args(leaf.annotation) or (leaf.annotation,))} <= {bool, NoneType}:
        declaration = f"{flag_of(name)}/--no-{flag_of(name)[2:]}"
        return click.Option([declaration, name], default=None, help=help_text)
    return click.Option([flag_of(name), name], default=None, type=str, metavar=_metavar(leaf), help=help_text)


def _other_option(name: str, spelling: Spelling) -> click.Option:
    if spelling.is_switch:
        declaration = f"{flag_of(name)}/--no-{flag_of(name)[2:]}"
        return click.Option([declaration, name], default=None, help=spelling.text)
    return click.Option([flag_of(name), name], default=None, type=str, metavar="VALUE", help=spelling.text)


def _metavar(leaf: FieldInfo) -> str:
    kinds = [kind for kind in (get_args(leaf.annotation) or (leaf.annotation,)) if kind is not NoneType]
    if get_origin(leaf.annotation) is Literal:
        return "|".join(str(kind) for kind in kinds)
    if get_origin(leaf.annotation) in (dict, list):
        return "JSON"
    while get_args(kinds[0]):
        kinds = list(get_args(kinds[0]))
    return {int: "INTEGER", float: "NUMBER"}.get(kinds[0], "TEXT") if isinstance(kinds[0], type) else "TEXT"


def _read(name: str, value: str | bool, leaf: FieldInfo) -> JSON:
    if isinstance(value, bool):
        return value
    if get_origin(leaf.annotation) is list:
        return _read_json(flag_of(name), value, list, 'list such as [{"num_engines": 1}]')
    return read_json_object(flag_of(name), value) if get_origin(leaf.annotation) is dict else value


def read_json_object(flag: str, text: str) -> dict[str, JSON]:
    """The JSON object in a flag's text.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    return _read_json(flag, text, dict, 'object such as {"seed": 1}')


def _read_json(flag: str, text: str, kind: type[T], expected: str) -> T:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise ConfigError(f"{flag} takes a JSON {expected}, got {text!r}.")
    return value

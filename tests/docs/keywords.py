"""agentrl/assembly/keywords.py: settings as types of keywords, for editors. `make reference` writes it."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Union, get_args, get_origin

from typing_extensions import TypeAliasType

from agentrl.assembly.config import RunConfig, SftConfig
from agentrl.config import Section, leaves, spellings
from agentrl.evaluation.config import EvalConfig
from tests.docs.blocks import ROOT

FILE = ROOT / "agentrl" / "assembly" / "keywords.py"
HEAD = '''\
"""Settings as keywords of `train`, `sft` and `evaluate`, for editors and type checkers.

`make reference` writes this file from the settings themselves, which are checked when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Literal, TypeAlias, TypedDict

from agentrl.envs import AnyEnv
from agentrl.types import JSON

Name: TypeAlias = str | PathLike[str]
Function: TypeAlias = str | Callable[..., object]
"""A function, or its name."""
Rows: TypeAlias = Iterable[Mapping[str, JSON]]
"""Rows of prompts or conversations: a list of mappings, or a dataset."""
Data: TypeAlias = Name | Sequence[Name] | Rows | Mapping[str, object]
"""Files, or rows; or a table of names and sets: `object`, as type checkers infer no union in a dict."""
'''
_MANY = 8
_PLAIN = {str: "Name", int: "int", float: "float", bool: "bool", type(None): "None"}


def text() -> str:
    """The text of the file."""
    assert leaves(SftConfig).keys() <= leaves(RunConfig).keys()
    trained, evaluated = _types(RunConfig), _types(EvalConfig)
    both = dict(item for item in trained.items() if item in evaluated.items())
    parts = [HEAD, _class("_Settings", "TypedDict, total=False", "Keywords of all three.", both)]
    for name, types_, about in (
        ("TrainSettings", trained, "Keywords of `agentrl.train`."),
        ("EvalSettings", evaluated, "Keywords of `agentrl.evaluate`."),
    ):
        own = {key: type_ for key, type_ in types_.items() if key not in both}
        parts.append(_class(name, "_Settings, total=False", about, own))
    parts.append('SftSettings: TypeAlias = TrainSettings\n"""Keywords of `agentrl.sft`."""\n')
    return "\n\n".join(parts)


def _class(name: str, base: str, about: str, types_: Mapping[str, str]) -> str:
    lines = "".join(f"    {key}: {type_}\n" for key, type_ in types_.items())
    return f'class {name}({base}):\n    """{about}"""\n\n{lines}'


def _types(tree: type[Section]) -> dict[str, str]:
    """The type of each keyword, as text. A spelling of another tool is refused when it is read."""
    own = {name: _type_of(name, leaf) for name, (_, leaf) in leaves(tree).items()}
    return own | dict.fromkeys(spellings(tree), "object")


def _type_of(name: str, leaf) -> str:
    if name.endswith("_data"):
        return "Data | None"
    if name == "env":
        return "str | type[AnyEnv]"
    if "package.module:" in (leaf.description or ""):
        return "Function | None"
    return " | ".join(dict.fromkeys(_texts(leaf.annotation)))


def _texts(hint: object) -> Iterator[str]:
    """The parts of a union as text."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeAliasType):
        yield "JSON"
    elif hint in _PLAIN:
        yield _PLAIN[hint]
    elif origin is Annotated:
        yield from _texts(arguments[0])
    elif origin in (Union, types.UnionType):
        for part in arguments:
            yield from _texts(part)
    elif origin is Literal:
        words = [json.dumps(word) for word in arguments]
        # As the formatter has it, one a line.
        wide = "\n" + "".join(f"        {word},\n" for word in words) + "    "
        yield f"Literal[{', '.join(words) if len(words) < _MANY else wide}]"
    elif origin in (tuple, list):
        yield f"Sequence[{' | '.join(dict.fromkeys(_texts(arguments[0])))}]"
    elif origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        yield f"Mapping[str, {' | '.join(dict.fromkeys(_texts(arguments[1])))}]"
    elif isinstance(hint, type) and issubclass(hint, Section):
        yield "Mapping[str, JSON]"
    else:
        raise TypeError(f"no text for {hint}")


def write() -> None:
    """Write the file."""
    FILE.write_text(text(), encoding="utf-8")

"""The entries of the benchmark: what users say, the calls that are right, and the functions on offer."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from typing import NamedTuple, Protocol, TypeVar

from pydantic import BaseModel

from agentrl import UserError
from agentrl.tools import JSON, ToolSchema

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
_SYSTEMS = {
    "GorillaFileSystem": ("gorilla_file_system", "gorilla_file_system"),
    "MathAPI": ("math_api", "math_api"),
    "MessageAPI": ("message_api", "message_api"),
    "TicketAPI": ("ticket_api", "ticket_api"),
    "TradingBot": ("trading_bot", "trading_bot"),
    "TravelAPI": ("travel_booking", "travel_booking"),
    "TwitterAPI": ("posting_api", "posting_api"),
    "VehicleControlAPI": ("vehicle_control", "vehicle_control"),
}
"""By class: its module, and the file of its functions."""
_CODE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_INSTALL = "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath"
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""Names of types that are none of JSON Schema, and those that are."""


class System(Protocol):
    """An instance of one of the benchmark's classes: its methods are functions, its attributes the state."""

    def _load_scenario(self, scenario: Mapping[str, JSON], long_context: bool = False) -> None: ...


class _Conversation(BaseModel):
    """A row of the benchmark's questions."""

    id: str
    question: list[list[dict[str, str]]]
    involved_classes: tuple[str, ...]
    initial_config: dict[str, dict[str, JSON]]
    missed_function: dict[int, list[str]] = {}


class _Answer(BaseModel):
    """A row of its possible answers."""

    id: str
    ground_truth: list[list[str]]


class _Function(BaseModel):
    """A row of its descriptions of functions."""

    name: str
    description: str
    parameters: dict[str, JSON]


_Row = TypeVar("_Row", bound=BaseModel)


class Call(NamedTuple):
    """A call of a function: its name and its arguments by name."""

    name: str
    arguments: Mapping[str, JSON]


class Entry(NamedTuple):
    """A conversation.

    turns: what the user says in each; "" = that the functions of `late` are on offer now. right: the calls of
    each turn that are right; none = nothing can be done in it. classes: of its systems. scenario: of each.
    late: by turn, the names of functions that are on offer only from there on.
    """

    id: str
    turns: tuple[str, ...]
    right: tuple[tuple[Call, ...], ...]
    classes: tuple[str, ...]
    scenario: Mapping[str, Mapping[str, JSON]]
    late: Mapping[int, Sequence[str]]


@lru_cache(maxsize=len(CATEGORIES))
def entries(category: str) -> Mapping[str, Entry]:
    """The conversations of a category by id.

    Raises:
        UserError: there is no such category, or the package `bfcl_eval` is not installed.
    """
    if category not in CATEGORIES:
        raise UserError(f"BFCL has no category `{category}`; it has {', '.join(CATEGORIES)}.")
    name = f"BFCL_v4_multi_turn_{category}.json"
    right = {row.id: row.ground_truth for row in _rows(_Answer, f"possible_answer/{name}")}
    return {row.id: _entry(row, right[row.id]) for row in _rows(_Conversation, name)}


@lru_cache(maxsize=len(_SYSTEMS))
def functions(name: str) -> tuple[ToolSchema, ...]:
    """The functions of a class, as the benchmark describes them."""
    rows = _rows(_Function, f"multi_turn_func_doc/{_SYSTEMS[name][1]}.json")
    return tuple(ToolSchema(row.name, row.description, _as_json_schema(row.parameters)) for row in rows)


def system_class(name: str) -> Callable[[], System]:
    """A class of the benchmark.

    Raises:
        UserError: the package, or what it needs, is not installed.
    """
    try:
        module = import_module(f"{_CODE}.{_SYSTEMS[name][0]}")
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    made: Callable[[], System] = getattr(module, name)
    return made


def added_functions_text() -> str:
    """What the user says when more functions are on offer."""
    module = import_module("bfcl_eval.constants.default_prompts")
    return str(module.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC)


def _rows(form: type[_Row], path: str) -> list[_Row]:
    try:
        text = (files("bfcl_eval") / "data" / path).read_text("utf-8")
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    return [form.model_validate_json(line) for line in text.splitlines() if line.strip()]


def _not_installed(error: ModuleNotFoundError) -> UserError:
    return UserError(f"BFCL needs the package {error.name}: {_INSTALL}.")


def _entry(row: _Conversation, right: Sequence[Sequence[str]]) -> Entry:
    return Entry(
        row.id,
        tuple("\n".join(message["content"] for message in turn) for turn in row.question),
        tuple(tuple(_call(text, row.involved_classes) for text in turn) for turn in right),
        row.involved_classes,
        row.initial_config,
        row.missed_function,
    )


def _call(text: str, classes: Sequence[str]) -> Call:
    """`cp('a', destination='b')` with all arguments by name. Only literals are read."""
    node = ast.parse(text.strip(), mode="eval").body
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    name = node.func.id
    owner = next(name_of for name_of in classes if hasattr(system_class(name_of), name))
    parameters = [*inspect.signature(getattr(system_class(owner), name)).parameters][1:]
    arguments = dict(zip(parameters, map(ast.literal_eval, node.args), strict=False))
    arguments |= {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return Call(name, arguments)


def _as_json_schema(schema: Mapping[str, JSON]) -> dict[str, JSON]:
    """A description of parameters with the types of JSON Schema."""
    made: dict[str, JSON] = {}
    for name, value in schema.items():
        if isinstance(value, dict):
            made[name] = _as_json_schema(value)
        elif name == "type" and isinstance(value, str):
            made[name] = _TYPES.get(value, value)
        else:
            made[name] = value
    return made

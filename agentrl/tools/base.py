"""A tool: a typed function that a model may call.

Plain functions need nothing; `@tool(...)` only changes what is said about one, or how it runs:

    @tool(inline=True)
    def lookup(word: str) -> str:
        '''Look up a word.'''
        return TABLE.get(word, "nothing found")

A wrong call, and a call that the tool itself turns down, is a `ToolRejected`: one sentence for the
model. Anything else that escapes is the world's failure.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import TypeVar, cast, overload
from weakref import WeakKeyDictionary

from jsonschema.protocols import Validator

from agentrl.errors import ToolDefinitionError, ToolRejected
from agentrl.protocols import ToolSchema
from agentrl.tools.schema import compile_validator, describe, explain
from agentrl.types import JSON

ToolFunction = Callable[..., str] | Callable[..., Awaitable[str]]
_F = TypeVar("_F", bound=ToolFunction)
_OPTIONS = "__agentrl_tool__"


@dataclass(frozen=True, slots=True)
class _Options:
    name: str | None = None
    description: str | None = None
    inline: bool = False


@overload
def tool(function: _F, /) -> _F: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None, inline: bool = False
) -> Callable[[_F], _F]: ...


def tool(
    function: _F | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    inline: bool = False,
) -> _F | Callable[[_F], _F]:
    """Override what a model is told about a function, or promise that it is quick.

    inline: the function returns within microseconds, so it runs on the event loop itself; no
        deadline can interrupt it. Other synchronous functions run in a thread of their own.
    """

    def mark(target: _F) -> _F:
        vars(target)[_OPTIONS] = _Options(name, description, inline)
        return target

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True)
class Tool:
    """What is said about a tool, and the function behind it. Make one with `Tool.of`."""

    schema: ToolSchema
    function: ToolFunction
    inline: bool = False
    validator: Validator | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.validator is None:
            object.__setattr__(self, "validator", compile_validator(self.schema))

    @classmethod
    def of(cls, function: ToolFunction) -> Tool:
        """The tool that a typed function, or a method of a living object, is.

        Raises:
            ToolDefinitionError: it cannot be described to a model; the text says what to add.
        """
        if not isinstance(function, FunctionType | MethodType):
            raise ToolDefinitionError(
                f"{function!r} is not a function or a method; wrap it in a typed function with a docstring"
            )
        schema, validator = _described(function)
        return cls(schema, function, _options(function).inline, validator)

    @property
    def name(self) -> str:
        """The name the model calls it by."""
        return self.schema.name

    @property
    def description(self) -> str:
        """What the model is told that it does."""
        return self.schema.description

    async def invoke(self, arguments: Mapping[str, JSON]) -> str:
        """Check the arguments, call the function, return the text for the model.

        Cancelling it returns at once; a synchronous function that is not inline then runs on in
        its daemon thread, and what it returns is dropped.

        Raises:
            ToolRejected: the arguments do not fit the schema, or the tool says no.
            TypeError: the tool returned something that is not a string.
        """
        given = dict(arguments)
        assert self.validator is not None
        if not self.validator.is_valid(given):
            raise ToolRejected(explain(self.schema, self.validator, given))
        if self.inline or inspect.iscoroutinefunction(self.function):
            result = self.function(**given)
        else:
            result = await _in_thread(lambda: self.function(**given), self.name)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, str):
            raise TypeError(f"tool `{self.name}` returned {type(result).__name__}; it must return a str")
        return result


def _options(function: FunctionType | MethodType) -> _Options:
    options = getattr(function, _OPTIONS, None)
    return options if isinstance(options, _Options) else _Options()


_Described = tuple[ToolSchema, Validator]
# Environments live for one episode and describe the same few functions every time. Weak keys: functions
# made inside an episode must not outlive it. Two tables: as a method, a function has no `self` to describe.
_functions: WeakKeyDictionary[Callable[..., object], _Described] = WeakKeyDictionary()
_methods: WeakKeyDictionary[Callable[..., object], _Described] = WeakKeyDictionary()


def _described(function: FunctionType | MethodType) -> _Described:
    table, key = _functions, cast(Callable[..., object], function)
    if isinstance(function, MethodType):
        table, key = _methods, function.__func__
    if key not in table:
        options = _options(function)
        schema = describe(function, name=options.name, description=options.description)
        table[key] = schema, compile_validator(schema)
    return table[key]


_Result = str | Awaitable[str]


async def _in_thread(work: Callable[[], _Result], name: str) -> _Result:
    """Run `work` in a daemon thread.

    Waits for: the thread. Unblocked by: its end, or cancellation. On shutdown: the thread is left
    behind. A pool would not do: tools that never return would fill it, and block the exit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Callable[[], _Result]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: Callable[[], _Result]) -> None:
        if not done.done():
            done.set_result(outcome)

    def run() -> None:
        outcome = _outcome(lambda: context.run(work), name)
        # The loop may be closed by now: then nobody waits for this result.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=f"tool {name}", daemon=True).start()
    return (await done)()


def _outcome(work: Callable[[], _Result], name: str) -> Callable[[], _Result]:
    """Do the work and return what replays its result or its exception, whatever was raised."""
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  (whatever it raises, exit() included, its caller is waiting)
        cause = error
    else:
        return lambda: result

    def fail() -> _Result:
        if isinstance(cause, Exception):
            raise cause
        raise RuntimeError(f"tool `{name}` raised {type(cause).__name__}") from cause

    return fail

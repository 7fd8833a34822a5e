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

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Literal, TypeAlias, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from agentrl.errors import ToolDefinitionError
from agentrl.gate import Gate
from agentrl.protocols import ToolSchema
from agentrl.tools.arguments import Reader
from agentrl.tools.running import inline as inlined
from agentrl.tools.running import is_inline, run
from agentrl.tools.schema import builders, check_parameters, compile_validator, describe
from agentrl.types import JSON

ToolFunction = Callable[..., str] | Callable[..., Awaitable[str]]
_F = TypeVar("_F", bound=ToolFunction)
Overrun: TypeAlias = Literal["model", "world"]
"""Whose doing it is when a tool overruns its deadline: the model's, who is told so, or the world's."""
_OPTIONS = "__agentrl_tool__"


@dataclass(frozen=True, slots=True)
class _Options:
    name: str | None = None
    description: str | None = None
    max_concurrency: int | None = None
    overrun: Overrun = "model"


@overload
def tool(function: _F, /) -> _F: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    inline: bool = False,
    max_concurrency: int | None = None,
    overrun: Overrun = "model",
) -> Callable[[_F], _F]: ...


def tool(
    function: _F | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    inline: bool = False,
    max_concurrency: int | None = None,
    overrun: Overrun = "model",
) -> _F | Callable[[_F], _F]:
    """Override what a model is told about a function, or how it is run.

    inline: the function returns within microseconds, so it runs on the event loop itself; no
        deadline can interrupt it (see `agentrl.tools.inline`). Other synchronous functions run in a
        thread of their own.
    max_concurrency: calls that run at a time, over all episodes; the others wait, and the wait does not
        count against their deadline. None = no limit.
    overrun: whose doing it is when a call overruns its deadline. `model`: the arguments can make it slow,
        so the model is told, and scored. `world`: they cannot, so the episode fails and is replaced.
    """

    def mark(target: _F) -> _F:
        vars(target)[_OPTIONS] = _Options(name, description, max_concurrency, overrun)
        return inlined(target) if inline else target

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True)
class Tool:
    """What is said about a tool, and the function behind it. Make one with `Tool.of`."""

    schema: ToolSchema
    function: ToolFunction
    reader: Reader = field(repr=False, compare=False)
    gate: Gate = field(repr=False, compare=False)
    overrun: Overrun = "model"

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
        options = _options(function)
        reader, gate = _described(function, options)
        return cls(reader.schema, function, reader, gate, options.overrun)

    @classmethod
    def described(
        cls,
        schema: ToolSchema,
        function: Callable[..., Awaitable[str]],
        *,
        gate: Gate | None = None,
        overrun: Overrun = "model",
    ) -> Tool:
        """A tool whose schema is given rather than read off a signature; arguments arrive as keywords.

        Raises:
            ToolDefinitionError: its parameters are no valid JSON Schema.
        """
        check_parameters(schema)
        reader = Reader(schema, compile_validator(schema), {})
        return cls(schema, function, reader, gate or Gate(None), overrun)

    @property
    def name(self) -> str:
        """The name the model calls it by."""
        return self.schema.name

    @property
    def description(self) -> str:
        """What the model is told that it does."""
        return self.schema.description

    async def invoke(self, arguments: Mapping[str, JSON]) -> str:
        """Check the arguments, strictly, wait for room, call the function, return the text for the model.

        Raises:
            ToolRejected: the arguments do not fit the schema, or the tool says no.
            TypeError: the tool returned something that is not a string.
        """
        values = self.reader.read(arguments).values
        async with self.gate.admitted():
            return await self.call(values)

    async def call(self, values: Mapping[str, object]) -> str:
        """Call the function with arguments that its reader has made.

        Cancelling it returns at once; a synchronous function that is not inline then runs on in
        its daemon thread, and what it returns is dropped.

        Raises:
            ToolRejected: the tool says no.
            TypeError: the tool returned something that is not a string.
        """
        thread = None if is_inline(self.function) else f"tool {self.name}"
        result = await run(partial(self.function, **values), thread=thread)
        if not isinstance(result, str):
            raise TypeError(f"tool `{self.name}` returned {type(result).__name__}; it must return a str")
        return result


def _options(function: FunctionType | MethodType) -> _Options:
    options = getattr(function, _OPTIONS, None)
    return options if isinstance(options, _Options) else _Options()


# Environments live for one episode and describe the same few functions every time. Weak keys: functions
# made inside an episode must not outlive it. Two tables: as a method, a function has no `self` to describe.
_Described: TypeAlias = tuple[Reader, Gate]
_functions: WeakKeyDictionary[Callable[..., object], _Described] = WeakKeyDictionary()
_methods: WeakKeyDictionary[Callable[..., object], _Described] = WeakKeyDictionary()


def _described(function: FunctionType | MethodType, options: _Options) -> _Described:
    table, key = _functions, cast(Callable[..., object], function)
    if isinstance(function, MethodType):
        table, key = _methods, function.__func__
    if key not in table:
        schema = describe(function, name=options.name, description=options.description)
        reader = Reader(schema, compile_validator(schema), builders(function))
        table[key] = reader, Gate(options.max_concurrency)
    return table[key]

"""A tool: a typed function that a model may call.

Plain functions need nothing; `@tool(...)` only overrides its name, its description or how it runs:

    @tool(inline=True)
    def lookup(word: str) -> str:
        '''Look up a word.'''
        return TABLE.get(word, "nothing found")

What a tool returns is the text of its result; a value that is no string is written as JSON. A wrong call, or
a call that the tool itself refuses, raises `ToolRejected`: one sentence for the model. Any other exception
counts as a failure of the world.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Literal, TypeAlias, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from agentrl.errors import ToolDefinitionError, ToolError, ToolRejected
from agentrl.runtime.gate import Gate
from agentrl.tools.arguments import Reader
from agentrl.tools.intake import check_parameters
from agentrl.tools.json_text import text_of
from agentrl.tools.running import OverrunError, is_inline, run
from agentrl.tools.running import inline as inlined
from agentrl.tools.schema import builders, compile_validator, describe
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

ToolFunction = Callable[..., object]
"""A typed function, sync or async. Its result is text, or a value that becomes JSON."""
_F = TypeVar("_F", bound=ToolFunction)
Overrun: TypeAlias = Literal["model", "world"]
"""What causes a tool to overrun its deadline: the model, which gets an error text, or the world."""
_OPTIONS = "__agentrl_tool__"
_NUM_DESCRIBED = 512


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
    """Override the name and the description of a function, or how it is run.

    name: that the model calls; left out: the function's. description: that the model reads; left out: the
        first paragraph of its docstring.
    inline: the function returns within microseconds, so it runs on the event loop itself; no
        deadline can interrupt it (see `agentrl.tools.inline`). Other synchronous functions run in a
        thread of their own.
    max_concurrency: calls that run at a time, over all episodes (count); the others wait, and the wait does
        not count against their deadline. None = no limit.
    overrun: what causes a call to overrun its deadline. `model`: its arguments can make it slow, so the model
        gets an error text, and the episode is scored. `world`: they cannot, so the episode fails and is
        replaced.
    """

    def mark(target: _F) -> _F:
        vars(target)[_OPTIONS] = _Options(name, description, max_concurrency, overrun)
        return inlined(target) if inline else target

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True)
class Tool:
    """The schema of a tool and its function. Create it with `Tool.of`."""

    schema: ToolSchema
    function: ToolFunction
    reader: Reader = field(repr=False, compare=False)
    gate: Gate = field(repr=False, compare=False)
    overrun: Overrun = "model"

    @classmethod
    def of(cls, function: ToolFunction) -> Tool:
        """A tool from a typed function or a bound method.

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
        """A tool whose schema is an argument rather than read off a signature; arguments arrive as keywords.

        Raises:
            ToolDefinitionError: its parameters are no valid JSON Schema, or one whose checks have no bound.
        """
        reader = _checked(schema.name, schema.description, json.dumps(dict(schema.parameters)))
        return cls(schema, function, reader, gate or Gate(None), overrun)

    @property
    def name(self) -> str:
        """The name that the model calls it by."""
        return self.schema.name

    @property
    def description(self) -> str:
        """The description that the model reads."""
        return self.schema.description

    async def invoke(self, arguments: Mapping[str, JSON]) -> str:
        """Check the arguments strictly, wait for the concurrency gate, call the function, return its text.

        Raises:
            ToolRejected: the arguments do not fit the schema, or the tool refuses them.
            TypeError: the tool returned a value that JSON has no form for.
        """
        values = (await self.reader.read_async(arguments)).values
        async with self.gate.admitted(self.name):
            return await self.call(values)

    async def call(self, values: Mapping[str, object]) -> str:
        """Call the function with arguments that its reader built; its result as text.

        Cancelling it returns at once; a synchronous function that is not inline then runs on in
        its daemon thread, and its result is dropped.

        Raises:
            ToolRejected: the tool refuses the call; or too many earlier calls that overran still run; or its
                result is a number that is too long to write.
            ToolError: the latter, where `overrun` is `world`.
            TypeError: the tool returned a value that JSON has no form for.
        """
        thread = None if is_inline(self.function) else f"tool {self.name}"
        try:
            result = await run(partial(self.function, **values), thread=thread)
        except OverrunError as error:
            # The model chose the arguments of those calls: it must not void an episode by them.
            if self.overrun == "model":
                raise ToolRejected(f"{self.name} is unavailable: {error}.", "unavailable") from None
            raise ToolError("unavailable", f"{self.name}: {error}") from None
        try:
            return text_of(result)
        except TypeError as error:
            raise TypeError(f"tool `{self.name}` returned {error}") from None
        except ValueError:
            # Arguments of the model can make a number as large as that.
            raise ToolRejected(f"{self.name} returned a number of too many digits.", "digits") from None


def _options(function: FunctionType | MethodType) -> _Options:
    options = getattr(function, _OPTIONS, None)
    return options if isinstance(options, _Options) else _Options()


@lru_cache(maxsize=_NUM_DESCRIBED)
def _checked(name: str, description: str, parameters: str) -> Reader:
    """The reader of a described tool. Every episode of an MCP server describes the same ones."""
    schema = ToolSchema(name, description, json.loads(parameters))
    check_parameters(schema)
    return Reader(schema, compile_validator(schema), {})


# An environment exists for one episode, and each describes the same few functions. Weak keys: functions
# created inside an episode must not outlive it. Two tables: the
# schema of a method lacks `self`.
_Described: TypeAlias = tuple[Reader, Gate]
_functions: WeakKeyDictionary[Callable[..., object], _Described] = WeakKeyDictionary()
_methods: WeakKeyDictionary[Callable[..., object], _Described] = WeakKeyDictionary()


def _described(function: FunctionType | MethodType, options: _Options) -> _Described:
    table, key = _functions, cast(Callable[..., object], function)
    if isinstance(function, MethodType):
        table, key = _methods, function.__func__
    if key not in table:
        schema = describe(function, name=options.name, description=options.description)
        reader = Reader(schema, compile_validator(schema), builders(function, schema))
        table[key] = reader, Gate(options.max_concurrency)
    return table[key]

"""From arguments that a model wrote to those that a function receives, or to one sentence about the error.

A call's arguments are checked against the tool's schema, in a bounded number of steps (`validator`). Then
enums, dataclasses and pydantic models are built from them; everything else reaches the function as the model
wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import thread_time
from typing import Literal

from jsonschema.exceptions import ValidationError, best_match
from pydantic import ConfigDict, TypeAdapter
from pydantic import ValidationError as BuildError

from agentrl.errors import ToolRejected, did_you_mean
from agentrl.runtime.clocks import clocks_stopped
from agentrl.runtime.gate import Gate
from agentrl.tools.json_text import read_json
from agentrl.tools.running import run
from agentrl.tools.validator import MAX_STEPS, OutOfStepsError, SchemaCheck, TooDeepError, Validator
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

# Calls of simple tools that surely fit their schema, found in a hundredth of the time of `jsonschema`.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_SILENT = {"title", "description", "default"}
"""Keywords that no value can violate."""
_OBJECT = _SILENT | {"type", "properties", "required", "additionalProperties"}


@dataclass(frozen=True, slots=True)
class PlainParameters:
    """Parameters of which the schema says their types alone. types: the Python types of each."""

    types: Mapping[str, tuple[type, ...]]
    required: frozenset[str]

    @classmethod
    def of(cls, parameters: Mapping[str, JSON]) -> PlainParameters | None:
        """The same parameters, or None where the schema says more of them."""
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        if parameters.get("type") != "object" or not parameters.keys() <= _OBJECT:
            return None
        if not isinstance(properties, dict) or not isinstance(required, list):
            return None
        types: dict[str, tuple[type, ...]] = {}
        for name, schema in properties.items():
            if not isinstance(schema, dict) or not schema.keys() <= _SILENT | {"type"}:
                return None
            kind = schema.get("type")
            if not isinstance(kind, str) or kind not in _TYPES:
                return None
            types[name] = _TYPES[kind]
        return cls(types, frozenset(map(str, required)))

    def surely_fit(self, values: Mapping[str, JSON]) -> bool:
        """Whether values fit; False where only the schema itself can tell."""
        if not self.required <= values.keys():
            return False
        types = self.types
        return all(name in types and type(value) in types[name] for name, value in values.items())


ArgumentPolicy = Literal["strict", "coerce"]
"""Whether arguments of a wrong type are refused, or converted where their meaning is clear."""
_MAX_CHARACTERS = 80
_MAX_NAMES = 32
_INLINE_STEPS = 500
"""About ten milliseconds: a check that takes more goes on in a thread."""
_EXPLAIN_STEPS = 4_000
_CHECKING = Gate(1)
UNION_LEVELS = 40
"""The levels of unions inside unions that a check surely reaches; others cost less of the stack."""


class ArgumentsRejected(ToolRejected):
    """The arguments do not fit the schema. kind: the JSON Schema keyword that they violate.

    Where they fit the schema and a validator of a pydantic model rejects them, the kind is `value`; where
    checking them takes too many steps, or they are nested too deep, `steps`.
    """


@dataclass(frozen=True, slots=True)
class Reading:
    """Arguments as the function takes them. coerced: values were converted to fit the schema."""

    values: Mapping[str, object]
    coerced: bool = False


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the calls of one tool. builders: adapters of the parameters that are not plain JSON."""

    schema: ToolSchema
    validator: Validator
    builders: Mapping[str, TypeAdapter[object]]
    _plain: PlainParameters | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_plain", PlainParameters.of(self.schema.parameters))

    def read(self, arguments: Mapping[str, JSON], policy: ArgumentPolicy = "strict") -> Reading:
        """Check arguments and build those that the function takes; `coerce` converts values that do not fit.

        `coerced` lists the conversions.

        Raises:
            ArgumentsRejected: they do not fit; the sentence names the parameter.
        """
        try:
            return self._read(arguments, policy, MAX_STEPS)
        except TooDeepError:
            problem = (
                f"the arguments are nested too deep: about {UNION_LEVELS} levels are checked; nest less."
            )
        except OutOfStepsError:
            problem = "checking the arguments takes too many steps; write less, and nest less."
        raise ArgumentsRejected(f"{self.schema.name}: {problem}", "steps")

    async def read_async(self, arguments: Mapping[str, JSON], policy: ArgumentPolicy = "strict") -> Reading:
        """The same without holding the event loop: a long check runs in a thread, one at a time.

        Of a check in that thread, the CPU time counts for deadlines, and no wait for the thread.

        Raises:
            ArgumentsRejected: they do not fit, or checking them takes more than MAX_STEPS steps.
        """
        try:
            return self._read(arguments, policy, _INLINE_STEPS)
        except OutOfStepsError:
            pass
        seconds: list[float] = []

        def work() -> Reading:
            began = thread_time()
            try:
                return self.read(arguments, policy)
            finally:
                seconds.append(thread_time() - began)

        async with _CHECKING.admitted():
            with clocks_stopped() as stopped:
                try:
                    reading = await run(work, thread=f"arguments of {self.schema.name}")
                finally:
                    stopped.charge(sum(seconds))
        assert isinstance(reading, Reading)
        return reading

    def _read(self, arguments: Mapping[str, JSON], policy: ArgumentPolicy, steps: int) -> Reading:
        values, converted = dict(arguments), False
        if self._plain is None or not self._plain.surely_fit(values):
            check = self.validator.check(steps)
            fits = check.fits(values)
            if not fits and policy == "coerce":
                values, converted = coerced(values, self.schema.parameters, check), True
                fits = check.fits(values)
            if not fits:
                # The text shows the model its own arguments, not the converted ones.
                raise ArgumentsRejected(*explain(self.schema, self.validator, dict(arguments), steps))
        if not self.builders:
            return Reading(values, converted)
        return Reading({key: self._built(key, value) for key, value in values.items()}, converted)

    def _built(self, key: str, value: JSON) -> object:
        if key not in self.builders:
            return value
        try:
            return self.builders[key].validate_json(json.dumps(value), strict=True)
        except BuildError as error:
            first = error.errors(include_url=False)[0]
            where = _dotted((key, *first["loc"]))
            problem = f"{_clip(' '.join(first['msg'].split()))}; it got {_as_json(first['input'])}."
            sentence = f"{self.schema.name}: parameter `{where}` does not fit: {problem}"
            raise ArgumentsRejected(sentence, "value") from None


def explain(
    schema: ToolSchema, validator: Validator, arguments: dict[str, JSON], steps: int = MAX_STEPS
) -> tuple[str, str]:
    """One sentence for the model (which parameter is wrong, its value, what is expected), and its kind.

    Of very many errors only those of the first steps are compared.

    Raises:
        OutOfStepsError: `steps` do not suffice, and there may be more.
    """
    errors, are_all = validator.check(min(steps, _EXPLAIN_STEPS)).errors(arguments)
    if not are_all and steps < _EXPLAIN_STEPS:
        raise OutOfStepsError
    error = best_match(errors)
    if error is None:
        return f"{schema.name}: the arguments fit none of many alternatives; nest less.", "steps"
    kind = str(error.validator)
    where = f"parameter `{_dotted(tuple(error.absolute_path))}`" if error.absolute_path else "what it takes"
    if kind in ("required", "additionalProperties"):
        place = _FailedSchema(schema, error)
        problem = place.wrong_keys(error.instance, where if error.absolute_path else "")
        return f"{schema.name}: {problem}", kind
    phrase = _FailedSchema(schema, error).expected(error.schema) if kind in _DESCRIBED_KEYWORDS else ""
    expected = f"must be {phrase}" if phrase else f"must satisfy {kind} = {_as_json(error.validator_value)}"
    if error.validator is None:  # the schema `false`
        kind, expected = "false", "must be left out"
    return f"{schema.name}: {where} {expected}, but got {_as_json(error.instance)}.", kind


class _FailedSchema:
    """The part of a schema that an argument violates."""

    def __init__(self, schema: ToolSchema, error: ValidationError) -> None:
        older = _objects(schema.parameters.get("definitions"))
        self._shared = {**older, **_objects(schema.parameters.get("$defs"))}
        self._error = error
        self._schema: Mapping[str, JSON] = error.schema if isinstance(error.schema, Mapping) else {}

    def wrong_keys(self, value: Mapping[str, JSON], where: str) -> str:
        properties = _objects(self._schema.get("properties"))
        inside = f" in {where}" if where else ""
        if self._error.validator == "required":
            required = self._schema["required"]
            assert isinstance(required, list)
            key = next(str(key) for key in required if key not in value)
            phrase = self.expected(properties.get(key))
            return f"parameter `{key}` is missing{inside}{f'; it must be {phrase}' if phrase else ''}."
        key = next(key for key in value if key not in properties)
        takes = _listed(f"`{name}`" for name in properties) or "no parameters"
        return (
            f"there is no parameter `{_clip(key)}`{inside} (got {_as_json(value[key])}); "
            f"it takes {takes}.{did_you_mean(key[:_MAX_CHARACTERS], properties)}"
        )

    def expected(self, schema: JSON, depth: int = 0) -> str:
        """A schema as an English phrase; empty where only the schema itself would be exact."""
        if not isinstance(schema, dict) or depth > _MAX_PHRASE_DEPTH:
            return ""
        if isinstance(reference := schema.get("$ref"), str):
            return self.expected(self._shared.get(reference.rpartition("/")[2], {}), depth + 1)
        if isinstance(choices := schema.get("anyOf"), list):
            phrases = [self.expected(choice, depth + 1) for choice in choices[: _MAX_NAMES + 1]]
            phrase = " or ".join(phrases)
            is_short = len(phrases) <= _MAX_NAMES and len(phrase) <= _MAX_PHRASE
            return phrase if is_short and all(phrases) else ""
        if isinstance(values := schema.get("enum"), list):
            return "one of " + _listed(map(_as_json, values))
        if "const" in schema:
            return _as_json(schema["const"])
        kinds = schema.get("type", "object" if "properties" in schema else None)
        return " or ".join(
            _TYPE_NAMES.get(str(kind), "") for kind in (kinds if isinstance(kinds, list) else [kinds])
        )


_MAX_PHRASE_DEPTH = 3
_MAX_PHRASE = 2_000
_DESCRIBED_KEYWORDS = ("type", "enum", "const", "anyOf")
_TYPE_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def _listed(names: Iterable[str]) -> str:
    first = tuple(islice(names, _MAX_NAMES + 1))
    return ", ".join(first if len(first) <= _MAX_NAMES else (*first[:_MAX_NAMES], "..."))


def _dotted(path: tuple[str | int, ...]) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return _clip(where.lstrip("."))


def _objects(value: JSON) -> dict[str, dict[str, JSON]]:
    table = value if isinstance(value, dict) else {}
    return {key: below for key, below in table.items() if isinstance(below, dict)}


def _as_json(value: object) -> str:
    return _clip(json.dumps(value, ensure_ascii=False, default=repr))


def _clip(text: str) -> str:
    # Text of the model must not break the sentence that quotes it.
    printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: _MAX_CHARACTERS + 1])
    # Escapes make a short text long.
    return printable if len(printable) <= _MAX_CHARACTERS else f"{printable[:_MAX_CHARACTERS]}..."


_MAX_DEPTH = 32
_LAX: dict[str, TypeAdapter[int] | TypeAdapter[float] | TypeAdapter[bool] | TypeAdapter[str]] = {
    "integer": TypeAdapter(int),
    "number": TypeAdapter(float),
    "boolean": TypeAdapter(bool),
    "string": TypeAdapter(str, config=ConfigDict(coerce_numbers_to_str=True)),
}
_CONTAINERS: dict[str, type[object]] = {"array": list, "object": dict}


def coerced(
    arguments: Mapping[str, JSON], parameters: Mapping[str, JSON], check: SchemaCheck
) -> dict[str, JSON]:
    """The arguments with every value that does not fit its schema converted, where it can be.

    A value that fits is never changed. A value that does not fit is converted by the type in the schema:

        integer    what pydantic's lax mode reads: "5", "5.0" and 5.0 give 5; true gives 1; 5.5 stays
        number     likewise: "2.5" gives 2.5; true gives 1.0
        boolean    likewise: "true", "yes", "on", "1", 1 give true, and their opposites false, in any case
        string     likewise: the digits of a number; 5 gives "5"
        list       the list that a string holds as JSON, or else a list with the value as its only member
        object     the object that a string holds as JSON

    Members of lists and fields of objects are converted in the same way. Of several types (`anyOf`) the
    first that the converted value fits is taken. null, enums of several types, missing and unknown
    parameters stay as they are. The result may still not fit.

    parameters: the schema of the whole object, and `check`, a check against it.

    Raises:
        OutOfStepsError: the check has too few steps left.
    """
    schema = dict(parameters)
    converted = _Coercion(schema, check).value(dict(arguments), schema, 0)
    return converted if isinstance(converted, dict) else dict(arguments)


class _Coercion:
    def __init__(self, parameters: Mapping[str, JSON], check: SchemaCheck) -> None:
        self._check = check
        # By the ids of a value and a schema; the value is held, so that no other object gets its id.
        self._done: dict[tuple[int, int], tuple[JSON, JSON]] = {}
        shared = parameters.get("$defs")
        self._shared: Mapping[str, JSON] = shared if isinstance(shared, dict) else {}

    def value(self, value: JSON, schema: JSON, depth: int) -> JSON:
        if value is None or not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return value
        key = (id(value), id(schema))
        if key not in self._done:
            self._done[key] = (value, self._converted(value, schema, depth))
        return self._done[key][1]

    def _converted(self, value: JSON, schema: dict[str, JSON], depth: int) -> JSON:
        if self._check.fits(value, schema):
            return value
        if isinstance(reference := schema.get("$ref"), str):
            return self.value(value, self._shared.get(reference.rpartition("/")[2]), depth + 1)
        if isinstance(choices := schema.get("anyOf"), list):
            tries = (self.value(value, choice, depth + 1) for choice in choices)
            fitting = (
                tried for tried, choice in zip(tries, choices, strict=True) if self._check.fits(tried, choice)
            )
            return next(fitting, value)
        kind = str(schema.get("type"))
        if kind in _LAX:
            return _lax(value, kind)
        return self._container(value, schema, kind, depth) if kind in _CONTAINERS else value

    def _container(self, value: JSON, schema: dict[str, JSON], kind: str, depth: int) -> JSON:
        if isinstance(value, str):
            value = _parsed(value, _CONTAINERS[kind])
        if kind == "array":
            members = value if isinstance(value, list) else [value]
            return [self.value(member, schema.get("items"), depth + 1) for member in members]
        if not isinstance(value, dict):
            return value
        fields = schema.get("properties")
        properties = fields if isinstance(fields, dict) else {}
        others = schema.get("additionalProperties")
        return {
            key: self.value(below, properties.get(key, others), depth + 1) for key, below in value.items()
        }


def _lax(value: JSON, kind: str) -> JSON:
    try:
        return _LAX[kind].validate_python(value, strict=False)
    except BuildError:
        return value


def _parsed(text: str, kind: type[object]) -> JSON:
    try:
        value = read_json(text)
    except ValueError:
        return text
    return value if isinstance(value, kind) else text

"""What a class of environments declares, in the forms in which authors write it.

A form with one clear meaning is converted when the class is made: `splits = "train"` is one split. Any other
is refused with one sentence, as is a method that could not be called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from types import FunctionType
from typing import TypeAlias, TypeVar

from agentrl.envs.dialect import Chat, Dialect, Tags
from agentrl.errors import UserError, did_you_mean
from agentrl.types import Limits, Resources, quoted

Conversions: TypeAlias = Mapping[str, Callable[[object], object]]
"""By attribute: from its value to the form that the package reads. It raises a ValueError that says what to
write."""

_Kind = TypeVar("_Kind", Limits, Resources)
_NOTHING = object()
_SYNCHRONOUS = ("tasks", "corpus")
_SCRIPTS = ("expert", "demonstrator", "opponent")
_METHODS = (*_SYNCHRONOUS, *_SCRIPTS, "reset", "step", "close", "save_state", "load_state", "reward", "grade")


def convert(owner: object, conversions: Conversions) -> None:
    """Convert the attributes of a class, or of an instance, that are set on itself.

    Raises:
        UserError: an attribute has no form that could be read.
    """
    for name, converted in conversions.items():
        value = vars(owner).get(name, _NOTHING)
        if value is _NOTHING or isinstance(value, property | cached_property):
            continue
        try:
            result = converted(value)
        except ValueError as error:
            where = owner if isinstance(owner, type) else type(owner)
            raise UserError(f"{where.__name__}: `{name}` {error}.") from None
        if result is not value:
            setattr(owner, name, result)


def as_limits(value: object) -> Limits:
    """Limits, or a mapping of some of them.

    Raises:
        ValueError: it is nothing of this kind, or a limit is wrong.
    """
    return _of_kind(Limits, value, "limit", "limits = Limits(max_turns=4)")


def as_resources(value: object) -> Resources:
    """Resources, or a mapping of some of them.

    Raises:
        ValueError: it is nothing of this kind, or a resource is wrong.
    """
    return _of_kind(Resources, value, "resource", 'resources = {"num_cpus": 2}')


def _of_kind(kind: type[_Kind], value: object, part: str, example: str) -> _Kind:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"is {quoted(value)}; write {example}")
    names = [field.name for field in fields(kind)]
    if unknown := [name for name in value if name not in names]:
        near = did_you_mean(str(unknown[0]), names)
        raise ValueError(f"has no {part} {unknown[0]!r}.{near} There are {', '.join(names)}")
    try:
        return kind(**value)
    except ValueError as error:
        raise ValueError(f"is wrong: {error}") from None


def as_names(value: object) -> Sequence[str]:
    """A sequence of names, or one name.

    Raises:
        ValueError: it is nothing of this kind.
    """
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return value
    raise ValueError(f'is {quoted(value)}; write a tuple of names, such as ("train", "test")')


def as_dialect(value: object) -> Dialect:
    """A dialect, or its class.

    Raises:
        ValueError: it is nothing of this kind.
    """
    if value is Tags or value is Chat:
        return Chat() if value is Chat else Tags()
    if isinstance(value, Tags | Chat):
        return value
    raise ValueError(f"is {quoted(value)}; write dialect = Chat() or dialect = Tags()")


def check_methods(env_class: type) -> None:
    """Check that the methods that a class writes can be called as those of its base in this package are.

    Raises:
        UserError: one takes other arguments, or is async where it must not be.
    """
    for name in _METHODS:
        method, base = vars(env_class).get(name), _base_method(env_class, name)
        if not isinstance(method, FunctionType) or base is None:
            continue
        if name in _SYNCHRONOUS and (
            inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        ):
            raise UserError(
                f"{env_class.__name__}: `{name}` is async; write `def {name}{_form(base)}` without async."
            )
        if not _takes_the_arguments_of(base, method):
            raise UserError(
                f"{env_class.__name__}: `{name}{_form(method)}` takes other arguments than it gets; write "
                f"`{name}{_form(base)}`."
            )


def _base_method(env_class: type, name: str) -> FunctionType | None:
    """The first definition of a method in the classes of this package."""
    for base in reversed(env_class.__mro__):
        method = vars(base).get(name)
        if (
            base is not env_class
            and base.__module__.startswith("agentrl.")
            and isinstance(method, FunctionType)
        ):
            return method
    return None


def _takes_the_arguments_of(base: FunctionType, method: FunctionType) -> bool:
    parameters = inspect.signature(base).parameters.values()
    by_name = {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(method).bind(*[None] * (len(parameters) - len(by_name)), **by_name)
    except TypeError:
        return False
    return True


def _form(method: FunctionType) -> str:
    """The parameters of a method without their types."""
    signature = inspect.signature(method)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))

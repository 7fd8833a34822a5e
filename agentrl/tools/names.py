"""Resolves names to objects of installed packages, for the registries of tools and of environments; and the
other way round."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import TracebackType

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from agentrl.config import import_path
from agentrl.errors import AgentRLError, UserError, did_you_mean
from agentrl.runtime.authorship import place_of
from agentrl.runtime.interrupts import SignalExit
from agentrl.runtime.stage import summary_of

given: dict[str, object] = {}
"""By path: objects of this process that no module has under their name, such as a class of a function."""


def path_of_object(value: object) -> str:
    """The name `module:name` under which this process finds that very class, function or object.

    Only what a module has under this name is found by other processes.
    """
    owner = value if hasattr(value, "__qualname__") else type(value)
    # Of an object that is no function, a module can only hold the class.
    name = f"{getattr(owner, '__qualname__', '')}{'' if owner is value else '()'}"
    path = f"{owner.__module__}:{name}"
    if getattr(sys.modules.get(owner.__module__), name, None) is value:
        given.pop(path, None)
    else:
        given[path] = value
    return path


class _Importing:
    """A block that imports a module of somebody else, which may raise anything, and may call exit()."""

    __slots__ = ("_broken",)

    def __init__(self, broken: Callable[[BaseException], UserError]) -> None:
        self._broken = broken

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, AgentRLError | SignalExit):
            raise self._broken(error) from error


@dataclass(frozen=True, slots=True)
class Names:
    """How one kind of object is looked up. noun: its kind, for error texts. form: the spelling of a path.

    error: the exception for a name that cannot be resolved.
    """

    noun: str
    form: str
    error: type[UserError]

    def loaded(self, point: EntryPoint) -> object:
        """The object of an entry point.

        Raises:
            UserError: of type `error`, the package is broken.
        """

        def broken(error: BaseException) -> UserError:
            return self.error(
                f"`{point.name}` is offered by {point.value}, which cannot be imported: {error}; "
                "mend or reinstall that package."
            )

        with _Importing(broken):
            loaded: object = point.load()
        return loaded

    def imported(self, path: str) -> object:
        """The object at a path `package.module:name`, or in another form that `import_path` knows.

        Raises:
            UserError: of type `error`, there is no such module or no such name in it, or importing it fails.
        """
        if path in given:
            return given[path]
        try:
            module, _, name = import_path(path).partition(":")
        except ValueError as error:
            raise self.error(f"no {self.noun} `{path}`: {error}") from None

        def broken(error: BaseException) -> UserError:
            place, summary = place_of(error), summary_of(error)
            if not place and isinstance(error, ImportError | TypeError | ValueError):
                # TypeError and ValueError: a relative or an empty module name.
                return self.error(f"no {self.noun} `{path}`: {error}; name it `{self.form}`.")
            where = f" in {place}" if place else ""
            return self.error(
                f"{self.noun} `{path}`: importing {module} failed{where} ({summary}); mend that module."
            )

        with _Importing(broken):
            target = importlib.import_module(module)
        try:
            return getattr(target, name)
        except AttributeError as error:
            near = did_you_mean(name, vars(target))
            raise self.error(f"no {self.noun} `{path}`: {error}; name it `{self.form}`.{near}") from None

    def unknown(self, name: str, registered: Iterable[str], listed: Iterable[str] = ()) -> UserError:
        """The error for a name that is not registered; the sentence lists the names that are.

        listed: a shorter list for the sentence, such as one pattern for many names.
        """
        names = sorted(registered)
        installed = ", ".join(sorted(listed) or names) or "none"
        return self.error(f"no {self.noun} `{name}`.{did_you_mean(name, names)} Installed: {installed}.")


def check_arguments(name: str, factory: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Check that a class or function takes these arguments.

    Raises:
        UserError: it does not; the sentence lists what it takes.
    """
    signature = inspect.signature(factory)
    parameters = signature.parameters.values()
    names = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    unknown = [key for key in arguments if key not in names]
    if unknown and len(names) == len(parameters):
        listed = ", ".join(names) or "no arguments"
        near = did_you_mean(unknown[0], names)
        raise UserError(f"{name}: there is no argument `{unknown[0]}`.{near} It takes {listed}.")
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{name}: {error}; it takes {', '.join(names) or 'no arguments'}, got {dict(arguments)}."
        ) from None


def fitted_arguments(
    what: str, factory: Callable[..., object], arguments: Mapping[str, object]
) -> dict[str, object]:
    """The arguments of a class or function, checked, and validated against its type hints.

    what: its kind and name, for error texts.

    Raises:
        UserError: it does not take them, or one does not fit its type.
    """
    check_arguments(what, factory, arguments)
    hints = _hints(factory)
    return {key: _fitting(f"{what}: `{key}`", value, hints.get(key)) for key, value in arguments.items()}


def _hints(factory: Callable[..., object]) -> Mapping[str, type[object]]:
    # Of a dataclass itself, so that each field's hint is resolved in the module that defines it.
    is_class = isinstance(factory, type)
    subject = factory.__init__ if is_class and not dataclasses.is_dataclass(factory) else factory
    try:
        return typing.get_type_hints(subject, include_extras=True)
    except (NameError, TypeError):
        return {}


def _fitting(what: str, value: object, hint: type[object] | None) -> object:
    if hint is None:
        return value
    try:
        adapter: TypeAdapter[object] = TypeAdapter(hint)
    except PydanticUserError:
        # A type that no run file can spell: this value comes from Python code.
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].lower()
        raise UserError(f"{what} = {value!r} does not fit: {reason}.") from None

"""Functions by path: each is imported once, and tried out before anything is played."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar, cast

from agentrl.errors import ConfigError, UserError
from agentrl.records.metrics import StepFunction, check_callback
from agentrl.tools.names import Names

T = TypeVar("T")


def function_at(noun: str, path: str) -> object:
    """The function at `package.module:name`, or an object that is one. noun: its kind, for error texts.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    imported = Names(noun, "package.module:name", ConfigError).imported(path)
    if not callable(imported) or isinstance(imported, type):
        raise ConfigError(
            f"{path} is a {type(imported).__name__}; name a function, or an object that is one."
        )
    return imported


class Trying:
    """A block in which the function at a path is tried out; its errors become ConfigErrors.

    A ValueError is a violation of the contract, and its message one sentence. UserErrors pass unchanged.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ValueError):
            raise ConfigError(f"{self._path}: {error}") from error
        if isinstance(error, Exception) and not isinstance(error, UserError):
            raise ConfigError(
                f"{self._path} fails when it is tried out ({type(error).__name__}: {error}); mend it."
            ) from error


@dataclass(frozen=True, slots=True)
class Hook(Generic[T]):
    """A kind of function that a run takes by its path.

    noun: its kind, for error texts. signature: as a type. runs: when. changes: what it may change. example:
    its path, or the place of one in the docs. check: its contract; None = it is tried out in the run's own
    environment.
    """

    noun: str
    signature: str
    runs: str
    changes: str
    example: str
    check: Callable[[T], None] | None = None

    def at(self, path: str) -> T:
        """The function at `package.module:name`, after its check.

        Raises:
            ConfigError: it cannot be imported, violates its contract, or fails.
        """
        function = cast(T, function_at(self.noun, path))
        if self.check is not None:
            with Trying(path):
                self.check(function)
        return function

    def maybe(self, path: str | None) -> T | None:
        """The same; None where there is no path."""
        return None if path is None else self.at(path)


def check_takes(function: Callable[..., object], *, arguments: int) -> None:
    """Check that a function can be called with so many arguments (count); it is not called.

    Raises:
        ValueError: it takes others.
    """
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError as error:
        raise ValueError(f"it is called with {arguments} arguments ({error})") from None


CALLBACK: Hook[StepFunction] = Hook(
    "callback",
    "(int, Mapping[str, float]) -> object",
    runs="with each step and its metrics, when they are logged",
    changes="True ends the run",
    example="[until_solved](#a-callback)",
    check=check_callback,
)

"""Functions by path: each is imported once, and tried out before anything is played."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar, cast

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


def checked(noun: str, path: str, check: Callable[[T], None]) -> T:
    """The function at `package.module:name`, after its check. noun: its kind, for error texts.

    Raises:
        ConfigError: it cannot be imported, violates its contract, or fails.
    """
    function = cast(T, function_at(noun, path))
    with Trying(path):
        check(function)
    return function


def callback_at(path: str) -> StepFunction:
    """The function at a path that is called with each step and its metrics.

    Raises:
        ConfigError: it cannot be imported, or takes other arguments.
    """
    return checked("callback", path, check_callback)


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

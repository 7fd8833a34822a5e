"""A function of the user that is called with the metrics of every step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeAlias

StepFunction: TypeAlias = Callable[[int, Mapping[str, float]], object]
"""Called with a step and its metrics; where it returns True, the run ends after that step."""


class Callback:
    """A `Tracker` that calls a function. ends_run: it has returned True."""

    def __init__(self, function: StepFunction) -> None:
        self._function = function
        self.ends_run = False

    def log(self, step: int, metrics: Mapping[str, float], *, time_s: float) -> None:
        """Call the function with a copy of the metrics."""
        del time_s
        if self._function(step, dict(metrics)) is True:
            self.ends_run = True

    def close(self) -> None:
        """Nothing is open."""


def check_callback(function: StepFunction) -> None:
    """Check that a function can be called back.

    Raises:
        ValueError: it takes other arguments, or is a coroutine function.
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError("a callback is no coroutine function; write it with def, not async def.")
    try:
        inspect.signature(function).bind(1, {})
    except TypeError as error:
        raise ValueError(f"a callback is called with a step and its metrics ({error}); mend it.") from None

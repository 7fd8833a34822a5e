"""Messages from the driver to its ranks, as bytes."""

from __future__ import annotations

import io
import pickle
from types import FunctionType

from agentrl.errors import ConfigError
from agentrl.runtime.stage import summary_of

_PROTOCOL = 5


class _Pickler(pickle.Pickler):
    """Refuses functions and classes that another process cannot import by their path."""

    def persistent_id(self, value: object) -> None:
        """None for any value, so that pickle serializes it as usual.

        Raises:
            ConfigError: a function or a class that no other process can import.
        """
        if isinstance(value, FunctionType | type):
            where = f"{value.__module__}.{value.__qualname__}"
            if value.__module__ == "__main__" or "<locals>" in where or "<lambda>" in where:
                raise ConfigError(
                    f"`{value.__qualname__}` is defined in a notebook, in the script that runs, or inside a "
                    "function, where no other process can import it; put it into a module, and name it by "
                    "its import path."
                )


def pickled_plan(message: object) -> bytes:
    """A message that may hold a user's functions and classes.

    Raises:
        ConfigError: one of them cannot be imported by another process, or pickle does not take a value.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, _PROTOCOL).dump(message)
    # What pickle raises for a lock, an open file, or an object whose class refuses it.
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"a setting holds a value that cannot be sent to another process ({summary_of(error)}); pass "
            "what makes it instead, such as a path, or its import path."
        ) from None
    return buffer.getvalue()


def pickled(message: object) -> bytes:
    """A message that holds only data."""
    return pickle.dumps(message, _PROTOCOL)

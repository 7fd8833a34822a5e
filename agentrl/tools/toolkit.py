"""Tools with a life of their own: something is opened for them, and must be closed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from agentrl.tools.base import Tool


class Toolkit(ABC):
    """Tools that hold something: an interpreter, a connection, an index.

    An environment lists it beside its functions, `tools = (PythonTool(), lookup)`, and opens `episode()`
    when it is reset. By itself:

        async with PythonTool().episode() as (python,):
            print(await python.invoke({"code": "print(6 * 7)"}))

    One toolkit serves all episodes, many at a time. What they share belongs into a
    `agentrl.tools.Shared`; what an episode remembers is made in `episode()`, so siblings never meet it.
    """

    @abstractmethod
    def episode(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """The tools for one episode; on leaving, nothing that the episode held is left."""

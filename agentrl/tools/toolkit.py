"""Tools with resources: they are opened for an episode and closed after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from agentrl.tools.base import Tool
from agentrl.types.seams import ToolSchema


class Toolkit(ABC):
    """Tools that hold a resource: an interpreter, a connection, an index.

    An environment lists it among its tools, `tools = (PythonTool(), lookup)`, and opens `episode()` at each
    reset. Without an environment:

        async with PythonTool().episode() as (python,):
            print(await python.invoke({"code": "print(6 * 7)"}))

    One toolkit serves all episodes, many at a time. Resources that they share belong into an
    `agentrl.tools.Shared`; the state of an episode is created in `episode()`, so no other episode sees it.
    """

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of its tools, as far as they are known before an episode."""
        return ()

    @abstractmethod
    def episode(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """The tools of one episode; leaving the context releases all that the episode held."""

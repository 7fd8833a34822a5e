"""A server that somebody else starts and ends."""

from __future__ import annotations

import asyncio

from agentrl.engine.sglang.control import Server
from agentrl.errors import EngineUnavailableError

_LOOK_AGAIN_S = 1.0
_ANSWER_S = 30.0


class ExternalServer:
    """A server by its address, for a fleet: it is waited for, where ours would be started again.

    first_wait_s: how long (seconds).
    """

    role = "regular"

    def __init__(self, url: str, first_wait_s: float) -> None:
        self.name = self.url = url
        self._first_wait_s = first_wait_s

    @property
    def running(self) -> bool:
        """Of a process elsewhere nothing is known but what its server says of itself."""
        return True

    @property
    def returncode(self) -> int | None:
        """Nothing is known of it."""
        return None

    async def start(self) -> None:
        """Wait until it is well.

        Raises:
            EngineUnavailableError: it is not, in all that time.
        """
        server = Server(self.url)
        try:
            async with asyncio.timeout(self._first_wait_s):
                while not await server.healthy(_ANSWER_S):
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.url} was not well in {self._first_wait_s:g} s; start it again."
            ) from None
        finally:
            await server.close()

    async def stop(self) -> None:
        """It is not ours to stop."""

"""What servers and routers have in common: a port, a log, and a process that may be started again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.engine.sglang.launch.guarded import GuardedProcess, Program
from agentrl.engine.sglang.launch.ports import HOST, is_free
from agentrl.errors import EngineUnavailableError


class Listener(ABC):
    """A program that listens at a port of this machine. It may end and be started again at the same one.

    name: names its log file, log. Used by one event loop: it ends with the thread of that loop.
    """

    def __init__(self, name: str, port: int, log_folder: Path) -> None:
        self.name = name
        self.port = port
        self.log = log_folder / f"{name}.log"
        self._process: GuardedProcess | None = None

    @property
    def url(self) -> str:
        """Its address, whether it runs or not."""
        return f"http://{HOST}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether its process, or anything that it started, runs. One that hangs runs, too."""
        return self._process is not None and self._process.running

    @property
    def returncode(self) -> int | None:
        """The exit code of the last run: 128 + N where signal N ended it, 0 where `stop` did.

        None: it runs, or was never started.
        """
        return None if self._process is None else self._process.returncode

    @abstractmethod
    async def start(self) -> None:
        """Start it, again where it runs, and wait until it answers. Interrupted, it leaves nothing.

        Raises:
            EngineUnavailableError: it ended, or did not answer in time; with the last lines of its log.
        """

    def ask_to_end(self) -> None:
        """Have it ended, without waiting for that."""
        if self._process is not None:
            self._process.ask_to_end()

    async def stop(self) -> None:
        """End it and all that it started, and wait until they are gone. Fine where nothing runs."""
        if self._process is not None:
            await self._process.stop()

    def last_words(self) -> str:
        """The last lines of its log, in words for a person."""
        return f"{self.name} was never started." if self._process is None else self._process.last_words()

    async def _bring_up(
        self, command: Sequence[str], environment: Mapping[str, str], *, grace_s: float, within_s: float
    ) -> None:
        await self.stop()
        if not is_free(self.port):
            raise EngineUnavailableError(
                f"{self.name} cannot listen at {self.url}: another process does; end that one."
            )
        self._process = GuardedProcess(Program(self.name, command, environment, self.log, grace_s))
        await self._process.brought_up(self.url, within_s)

"""The writing side of the journal: one thread serialises, compresses and writes."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from agentrl.errors import UserError
from agentrl.observe import members
from agentrl.observe.journal import SUFFIX, Entry, to_line
from agentrl.types import Turn

_MEMBER_BYTES: Final = 1 << 20
"""What the episodes of one member hold in memory, about: a crash loses no more of what was being written."""
_MOST_PENDING_BYTES: Final = 1 << 30


class _Part(NamedTuple):
    """Entries that become one member. written: done when they are on disk, or have been given up."""

    written: Future[None]
    num_bytes: int


class Journal:
    """Writes the episodes of one run. Whatever interrupts it, the files hold whole entries, each once.

    Writing means to hand over: one thread does the rest, in order. It takes turns with the event loop and
    never holds it for the length of a whole episode.

    consumes: entries. waits for: the thread, where more than `most_pending_bytes` of episodes lie before it,
    and in `flush`. unblocked by: the disk. on cancellation: what was handed over is written all the same. on
    shutdown: `close`, or else the interpreter's exit, waits until all is written.

    Where the disk fails, nothing is written any more, and each later call says so.
    """

    def __init__(self, run_dir: Path, *, most_pending_bytes: int = _MOST_PENDING_BYTES) -> None:
        self._folder = run_dir / "trajectories"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._most_pending_bytes = most_pending_bytes
        self._thread = ThreadPoolExecutor(1, "agentrl-journal")
        self._pending: deque[_Part] = deque()
        # Only the thread writes these.
        self._ends: dict[Path, int] = {}
        self._problem = ""
        self._num_lost = 0

    async def __aenter__(self) -> Journal:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def write_step(self, step: int, entries: Iterable[Entry]) -> Path:
        """Add episodes of a training step and return their file.

        Raises:
            UserError: the disk has failed.
        """
        return await self._write(f"step_{step:06d}", entries)

    async def write_eval(self, name: str, step: int, entries: Iterable[Entry]) -> Path:
        """Add episodes of the evaluation `name` after `step` and return their file.

        Raises:
            UserError: the disk has failed.
        """
        safe = re.sub(r"[^A-Za-z0-9.-]+", "-", name)
        return await self._write(f"eval_{safe}_{step:06d}", entries)

    async def flush(self) -> None:
        """Wait until all that was handed over is on disk.

        Raises:
            UserError: some of it will never be.
        """
        await self._until(0)

    async def close(self) -> None:
        """Flush and end the thread.

        Raises:
            UserError: some of what was handed over is not on disk.
        """
        try:
            await self.flush()
        finally:
            self._thread.shutdown(wait=False)

    async def _write(self, name: str, entries: Iterable[Entry]) -> Path:
        path = self._folder / f"{name}{SUFFIX}"
        # All of it before the first wait: who is cancelled while waiting has lost nothing.
        for part, num_bytes in _parts(list(entries)):
            self._pending.append(_Part(self._thread.submit(self._append, path, part), num_bytes))
        await self._until(self._most_pending_bytes)
        return path

    async def _until(self, most_bytes: int) -> None:
        """Wait until at most so much is pending, and nothing at all for 0."""
        while self._settle() > (0 if self._problem else most_bytes):
            # Unlike an awaited future, one that is waited for is not cancelled with its waiter.
            await asyncio.wait([asyncio.wrap_future(self._pending[0].written)])
        if self._problem and not self._pending:
            raise UserError(f"{self._problem} {self._num_lost} episodes are not in the journal.")

    def _settle(self) -> int:
        """Forget what is written, and return what is pending (bytes)."""
        while self._pending and self._pending[0].written.done():
            self._pending.popleft().written.result()
        return sum(part.num_bytes for part in self._pending)

    def _append(self, path: Path, entries: Sequence[Entry]) -> None:
        """What the thread does."""
        if not self._problem:
            try:
                end = self._ends[path] if path in self._ends else members.whole_end(path)
                self._ends[path] = members.append(path, map(to_line, entries), at=end)
                return
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                self._problem = f"{path} cannot be written ({why}); make room, or choose another output_dir."
        self._num_lost += len(entries)


def _parts(entries: Sequence[Entry]) -> Iterator[tuple[Sequence[Entry], int]]:
    """The entries in parts of about one member, each with what it holds (bytes)."""
    part: list[Entry] = []
    total = 0
    for entry in entries:
        part.append(entry)
        total += _num_bytes(entry)
        if total >= _MEMBER_BYTES:
            yield part, total
            part, total = [], 0
    if part:
        yield part, total


def _num_bytes(entry: Entry) -> int:
    """About what an episode holds in memory: its arrays and its words; 1 at least."""
    return 1 + sum(_held(turn) for one in entry.episode.trajectories for turn in one.turns)


def _held(turn: Turn) -> int:
    words = sum(len(message.text) for message in (*turn.observation, turn.action))
    if turn.tokens is None:
        return words
    sampled, extras = turn.tokens.completion, turn.tokens.completion.extras.values()
    arrays = (turn.tokens.world_ids, sampled.token_ids, sampled.logprobs, sampled.versions)
    return words + sum(array.nbytes for array in arrays) + sum(extra.values.nbytes for extra in extras)

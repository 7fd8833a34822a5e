"""The writing side of the journal: one thread serialises, compresses and writes."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from agentrl.errors import DiskError
from agentrl.records import members
from agentrl.records.journal import SUFFIX, Entry, to_line
from agentrl.types import Turn

_MEMBER_BYTES: Final = 1 << 20
"""The approximate size of one member's episodes in memory: a crash while writing loses at most one member."""
_MAX_PENDING_BYTES: Final = 1 << 30
_OBJECT_BYTES: Final = 4096
"""The objects of an episode, without its arrays and its text: a short one is some ten messages and turns."""


def file_name(name: str) -> str:
    """The name of an evaluation in the names of its files."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name)


def eval_name(name: str, step: int) -> str:
    """The name of the file of the evaluation `name` after `step`, without its suffix."""
    return f"eval_{file_name(name)}_{step:06d}"


class _Part(NamedTuple):
    """Entries that become one member. written: done when they are on disk, or writing has failed."""

    written: Future[None]
    num_bytes: int


class Journal:
    """Writes the episodes of one run. After any interruption the files hold complete entries, each once.

    The write methods enqueue entries; one thread serialises and writes them in order. It releases the GIL in
    between, so that the event loop is never blocked for the duration of an entire episode.

    consumes: entries. waits for: the thread, where more than `max_pending_bytes` of episodes are pending, and
    in `flush`. unblocked by: the disk. on cancellation: pending entries are written all the same. on
    shutdown: `close`, or else the interpreter's exit, waits until all entries are written.

    Where the disk fails, nothing more is written, and every later call raises.
    """

    def __init__(self, run_dir: Path, *, max_pending_bytes: int = _MAX_PENDING_BYTES) -> None:
        self._folder = run_dir / "trajectories"
        self._max_pending_bytes = max_pending_bytes
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
            DiskError: the disk has failed.
        """
        return await self._write(f"step_{step:06d}", entries)

    async def write_eval(self, name: str, step: int, entries: Iterable[Entry]) -> Path:
        """Add episodes of the evaluation `name` after `step` and return their file.

        Raises:
            DiskError: the disk has failed.
        """
        return await self._write(eval_name(name, step), entries)

    def run(self, work: Callable[[], None]) -> None:
        """Have the thread do other work, after all that is pending now; nobody learns of an exception."""
        self._thread.submit(work)

    async def flush(self) -> None:
        """Wait until all pending entries are on disk.

        Raises:
            DiskError: some of them could not be written.
        """
        await self._until(0)

    async def close(self) -> None:
        """Flush and end the thread.

        Raises:
            DiskError: some entries could not be written.
        """
        try:
            await self.flush()
        finally:
            self._thread.shutdown(wait=False)

    async def _write(self, name: str, entries: Iterable[Entry]) -> Path:
        path = self._folder / f"{name}{SUFFIX}"
        # All entries are submitted before the first wait, so that a cancellation loses none.
        for part, num_bytes in _parts(list(entries)):
            self._pending.append(_Part(self._thread.submit(self._append, path, part), num_bytes))
        await self._until(self._max_pending_bytes)
        return path

    async def _until(self, max_bytes: int) -> None:
        """Wait until at most `max_bytes` are pending."""
        while self._settle() > (0 if self._problem else max_bytes):
            # asyncio.wait does not cancel the future when the waiting task is cancelled; await would.
            await asyncio.wait([asyncio.wrap_future(self._pending[0].written)])
        if self._problem and not self._pending:
            raise DiskError(f"{self._problem} {self._num_lost} episodes are not in the journal.")

    def _settle(self) -> int:
        """Remove written parts, and return the size of the pending ones (bytes)."""
        while self._pending and self._pending[0].written.done():
            self._pending.popleft().written.result()
        return sum(part.num_bytes for part in self._pending)

    def _append(self, path: Path, entries: Sequence[Entry]) -> None:
        """Write one part; runs in the thread."""
        if not self._problem:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                end = self._ends[path] if path in self._ends else members.end_of_members(path)
                self._ends[path] = members.append(path, map(to_line, entries), at=end)
                return
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                self._problem = (
                    f"{path} cannot be written ({reason}); make room, or choose another output_dir."
                )
        self._num_lost += len(entries)


def _parts(entries: Sequence[Entry]) -> Iterator[tuple[Sequence[Entry], int]]:
    """The entries in parts of about one member, each with its size in memory (bytes)."""
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
    """The approximate size of an episode in memory: its objects, its arrays and its text."""
    return _OBJECT_BYTES + sum(
        _turn_bytes(turn) for part in entry.episode.trajectories for turn in part.turns
    )


def _turn_bytes(turn: Turn) -> int:
    num_chars = sum(len(message.text) for message in (*turn.observation, turn.action))
    if turn.tokens is None:
        return num_chars
    sampled = turn.tokens.completion
    extras = (*sampled.extras.values(), *sampled.prompt_extras.values())
    arrays = (turn.tokens.world_ids, sampled.token_ids, sampled.logprobs, sampled.versions)
    return num_chars + sum(array.nbytes for array in arrays) + sum(extra.values.nbytes for extra in extras)

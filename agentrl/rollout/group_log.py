"""What the groups in flight have played, turn by turn, in a file that outlives the run's process."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from agentrl.rollout.group import GroupStep
from agentrl.rollout.saved import Line, SavedGroups, StepLine, head_and_state, read_lines, to_line
from agentrl.runtime.files import write_bytes

_MAX_BYTES: Final = 1 << 30
"""Of the lines in memory, and of what is added to a file (bytes): an episode beyond them is kept in part."""
_MAX_WAITING: Final = 50_000
"""Of the steps that wait for the thread (count)."""


@dataclass(slots=True)
class _Kept:
    """A line in memory. newest: the newest version that it depends on. step: which one; None = another line.

    head, state: see `head_and_state`; of another line its bytes, and none.
    """

    newest: int
    head: bytes
    state: bytes = b""
    step: StepLine | None = None

    @classmethod
    def of(cls, line: Line) -> _Kept:
        """Of a line."""
        if line.step is None:
            return cls(0, to_line(line))
        step = line.step
        # The arrays are not needed any more.
        place = StepLine(step.sibling, step.attempt, step.version, step.before)
        return cls(step.newest, *head_and_state(line), place)

    @property
    def line(self) -> bytes:
        """The line."""
        return self.head if self.step is None else b'%b,"state":%b}}\n' % (self.head, self.state)

    @property
    def num_bytes(self) -> int:
        """Its size (bytes)."""
        return len(self.head) + len(self.state)


class GroupLog:
    """Keeps what groups in flight have played, so that a run that was killed goes on with them.

    The file is beside the checkpoint from which the run would resume, and has what can be used there: turns
    of versions up to that of its weights. The next checkpoint has another file, which begins with the groups
    that are then in flight: so a file grows by what is played until there are newer weights. Of all but the
    last turn of an episode, only the tokens are kept, and no state.

    consumes: steps of groups. waits for: nothing. One thread serialises and writes them, in order; it has to
    run one call after the other, `run` adds one. Where the disk takes no more, or `max_bytes` are kept, what
    comes is left out, which costs a resumed run the time to play it again.

    on_event: called with a sentence where the disk takes no more; from that thread.
    """

    def __init__(
        self,
        run: Callable[[Callable[[], None]], object],
        on_event: Callable[[str], None],
        *,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._run, self._on_event, self._max_bytes = run, on_event, max_bytes
        # Of a thread that is late, the oldest are left out.
        self._inbox: deque[GroupStep] = deque(maxlen=_MAX_WAITING)
        self._is_due = False
        # Only the thread uses these.
        self._kept: dict[int, list[_Kept]] = {}
        self._num_bytes = self._num_written = 0
        self._file: int | None = None
        self._version = 0

    def __del__(self) -> None:
        # The thread that uses the file has ended, or ends with the process.
        self._close()

    def add(self, step: GroupStep) -> None:
        """Keep a step, and write it where the file may have it."""
        self._inbox.append(step)
        if not self._is_due:
            self._is_due = True
            self._run(self._drain)

    def keep(self, pending: Collection[int], next_ordinal: int) -> None:
        """Forget groups that were trained or dropped: those before `next_ordinal` but the pending ones."""
        self._run(partial(self._forget, frozenset(pending), next_ordinal))

    def begin(self, path: Path, version: int) -> None:
        """Go on in another file, with all that is kept.

        version: of the weights of its checkpoint.
        """
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._report(error)
        else:
            self._run(partial(self._begin, file, version))

    def resume(self, path: Path, version: int) -> SavedGroups:
        """The groups of a file, in which this goes on; before anything is added.

        version: of the weights of its checkpoint.
        """
        used, saved = read_lines(path, version=version, on_event=self._on_event)
        for line in used:
            self._keep(line.ordinal, _Kept.of(line))
        try:
            write_bytes(path, b"".join(self._lines()))
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._report(error)
        else:
            self._file, self._version = file, version
        return saved

    def _drain(self) -> None:
        self._is_due = False
        while self._inbox:
            step = self._inbox.popleft()
            try:
                kept = _Kept.of(Line(step.ordinal, step=StepLine.of(step)))
            except (ValueError, RecursionError):
                continue  # a value that is no JSON: its episode is kept up to here
            if self._num_bytes + kept.num_bytes > self._max_bytes:
                continue
            self._keep(step.ordinal, kept)
            if kept.newest <= self._version:
                self._write(kept.line)

    def _keep(self, ordinal: int, kept: _Kept) -> None:
        """Keep a line in memory, in place of those that it makes needless."""
        own, step = self._kept.setdefault(ordinal, []), kept.step
        if step is not None:
            for before in own:
                if before.step is not None and before.step.sibling == step.sibling:
                    self._num_bytes -= len(before.state) - len(b"null")
                    before.state = b"null"
        own.append(kept)
        self._num_bytes += kept.num_bytes

    def _forget(self, pending: frozenset[int], next_ordinal: int) -> None:
        for ordinal in [o for o in self._kept if o < next_ordinal and o not in pending]:
            self._num_bytes -= sum(kept.num_bytes for kept in self._kept.pop(ordinal))

    def _begin(self, file: int, version: int) -> None:
        self._close()
        self._file, self._version, self._num_written = file, version, 0
        for line in self._lines():
            self._write(line)

    def _lines(self) -> Iterator[bytes]:
        return (kept.line for own in self._kept.values() for kept in own)

    def _write(self, line: bytes) -> None:
        if self._file is None or self._num_written + len(line) > self._max_bytes:
            return
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._close()
            self._report(error)
        self._num_written += len(line)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _report(self, error: OSError) -> None:
        self._on_event(
            f"Warning: groups in flight are not kept ({error.strerror or error}): killed now, the run would "
            "play them again; make room on the disk."
        )

"""What a rank does inside a call that takes long, told to its driver: `report_phase("loading weights")`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple


class Entered(NamedTuple):
    """A message of a rank: a phase of its call begins. The call's reply ends the last one."""

    phase: str


def report_phase(phase: str) -> None:
    """A phase begins; where nobody has asked for them, this does nothing."""
    _send.get()(Entered(phase))


@contextmanager
def reporting(send: Callable[[object], None]) -> Iterator[None]:
    """In this block, phases are sent as messages."""
    token = _send.set(send)
    try:
        yield
    finally:
        _send.reset(token)


def _ignore(message: object) -> None:
    del message


_send: Final[ContextVar[Callable[[object], None]]] = ContextVar("agentrl_phases", default=_ignore)

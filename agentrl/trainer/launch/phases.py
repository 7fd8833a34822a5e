"""What a rank does inside a call that takes long, told to its driver: `report_phase("loading weights")`."""

from __future__ import annotations

from typing import NamedTuple

from agentrl.processes.hosted import tell


class Entered(NamedTuple):
    """A message of a rank: a phase of its call begins. The call's reply ends the last one."""

    phase: str


def report_phase(phase: str) -> None:
    """A phase begins; in the driver's own process, this does nothing."""
    tell(Entered(phase))

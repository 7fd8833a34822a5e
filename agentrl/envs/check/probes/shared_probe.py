"""Checks that the shared resources of tools close when they are released, and leave nothing open."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from agentrl.envs.check.findings import LEAVES, ProbeResult, error
from agentrl.envs.check.traces import Trace, leftovers
from agentrl.errors import StageError
from agentrl.runtime.stage import stage
from agentrl.tools import release_shared

_CLOSE_TIMEOUT_S = 30.0
# Not threads and open files: some libraries keep them from their first use until the process ends.
_CLOSED = ("process", "socket", "task")


async def probe_release(before: Counter[Trace], folder: Path) -> ProbeResult:
    """Release shared resources and compare with `before`, the state from before the check."""
    try:
        async with stage("close", _CLOSE_TIMEOUT_S):
            await release_shared()
    except StageError as broken:
        text = f"what the tools share cannot be closed: {broken.detail}; mend where `Shared` closes it."
        return ProbeResult((error("crash", text),))
    leaks = [trace for trace in await leftovers(before, folder) if trace.kind in _CLOSED]
    if not leaks:
        return ProbeResult()
    kind, name = leaks[0]
    text = (
        f"after all episodes, and after what their tools share was closed, there is a {kind} left ({name}, "
        f"{len(leaks)} in all); let go of it where `Shared` closes what it opened."
    )
    return ProbeResult((error(LEAVES[kind], text),))

"""What the tools of all episodes share is closed when it is released, and leaves nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from agentrl.envs.check.report import Probed, error
from agentrl.envs.check.traces import Trace, left_behind
from agentrl.errors import StageError, stage
from agentrl.tools import release_shared

_CLOSE_TIMEOUT_S = 30.0
# Not threads and open files: libraries keep some for as long as the program runs, from their first use on.
_CLOSED = ("process", "socket", "task")


async def probe_release(before: Counter[Trace], folder: Path) -> Probed:
    """Release what is shared and compare with `before`, the picture from before the check."""
    try:
        async with stage("close", _CLOSE_TIMEOUT_S):
            await release_shared()
    except StageError as broken:
        text = f"what the tools share cannot be closed: {broken.detail}; mend where `Shared` closes it."
        return Probed((error("crash", text),))
    left = [trace for trace in await left_behind(before, folder) if trace.kind in _CLOSED]
    if not left:
        return Probed()
    kind, name = left[0]
    text = (
        f"after all episodes, and after what their tools share was closed, there is a {kind} left ({name}, "
        f"{len(left)} in all); let go of it where `Shared` closes what it opened."
    )
    return Probed((error(f"leaves-{kind}", text),))

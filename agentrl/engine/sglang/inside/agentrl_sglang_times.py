"""A plugin of SGLang for servers that measure: a reply says when its prompt was computed.

SGLang 0.5.15 sends that from its scheduler through its detokenizer, which passes on what a flag allows, and
does not send the flag.

SGLang calls `register`, an entry point, in each process of a server. This module imports nothing of agentrl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

_PLACE = "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.__getstate__"
_FLAG = "enable_metrics"


class _Stats(Protocol):
    enable_metrics: bool


def register() -> None:
    """Have the flag sent when SGLang's modules are there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PLACE, _with_flag, HookType.AROUND)


def _with_flag(original: Callable[[_Stats], dict[str, object]], stats: _Stats) -> dict[str, object]:
    """What is sent of a request's times."""
    state = original(stats)
    return {**state, _FLAG: True} if state else state

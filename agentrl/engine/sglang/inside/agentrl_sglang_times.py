"""A plugin of SGLang for servers that measure: corrects what 0.5.15 does with `--enable-metrics`.

- A reply does not say when its prompt was computed: that comes from the scheduler through the detokenizer,
  which passes on what a flag allows, and the flag is not sent.
- Routes that FastAPI 0.165 keeps in a router of their own, as `/v1/loads` is, have no path to count them
  under: whoever asks there is answered 500.

SGLang calls `register`, an entry point, in each process of a server. This module imports nothing of agentrl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

_ROUTE = "sglang.srt.utils.common._get_fastapi_request_path"
_PLACE = "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats.__getstate__"
_FLAG = "enable_metrics"


class _Stats(Protocol):
    enable_metrics: bool


class _URL(Protocol):
    path: str


class _Request(Protocol):
    url: _URL


def register() -> None:
    """Have both corrected when SGLang's modules are there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PLACE, _with_flag, HookType.AROUND)
    HookRegistry.register(_ROUTE, _with_path, HookType.AROUND)


def _with_flag(original: Callable[[_Stats], dict[str, object]], stats: _Stats) -> dict[str, object]:
    """What is sent of a request's times."""
    state = original(stats)
    return {**state, _FLAG: True} if state else state


def _with_path(original: Callable[[_Request], tuple[str, bool]], request: _Request) -> tuple[str, bool]:
    """The path that a request is counted under, and whether there is a route for it."""
    try:
        return original(request)
    except AttributeError:
        return request.url.path, True

"""A plugin of SGLang for servers behind sglang-router: experts are asked for by what it passes on.

sglang-router 0.3.2 drops the fields of a request that it does not know, `return_routed_experts` among them.
`session_params` it passes on as they are: {"routed_experts_start_len": 4} there has the place of both fields.

SGLang calls `register`, an entry point, in each process of a server. This module imports nothing of agentrl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

_PLACE = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
_START = "routed_experts_start_len"


class _Request(Protocol):
    session_params: object
    return_routed_experts: bool
    routed_experts_start_len: int


def register() -> None:
    """Have the fields set when SGLang's modules are there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PLACE, _with_experts, HookType.AROUND)


def _with_experts(original: Callable[[_Request], None], request: _Request) -> None:
    """A request asks for experts by its own fields, from the place that its session names."""
    asked = request.session_params
    if isinstance(asked, dict) and set(asked) == {_START} and type(start := asked[_START]) is int:
        request.session_params = None
        request.return_routed_experts, request.routed_experts_start_len = True, start
    original(request)

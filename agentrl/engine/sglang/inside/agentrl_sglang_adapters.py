"""A plugin of SGLang for servers whose adapters change: corrects what 0.5.15 does with them.

- A request that is aborted while it waits counts as one that uses its adapter, for ever. That adapter is
  then never unloaded, and, behind it, no other is loaded.
- The memory of adapters is pinned, for copies to a card, which torch refuses where there is none.

SGLang calls `register`, an entry point, in each process of a server. This module imports nothing of agentrl.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

_MAKERS = ("arange", "empty", "full", "ones", "tensor", "zeros")


class _Request(Protocol):
    lora_path: str | None
    lora_id: str


class _State(Protocol):
    obj: _Request


class _Registry(Protocol):
    async def release(self, lora_id: str) -> None: ...


class _Manager(Protocol):
    rid_to_state: Mapping[str, _State]
    lora_registry: _Registry


class _Abort(Protocol):
    rid: str
    finished_reason: Mapping[str, object] | None


def register() -> None:
    """Have both corrected when SGLang's modules are there."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    place = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req"
    HookRegistry.register(place, _aborted, HookType.AROUND)
    if not torch.cuda.is_available():
        for name in _MAKERS:
            setattr(torch, name, _unpinned(getattr(torch, name)))
        for name, stays in {"pin_memory": _itself}.items():
            setattr(torch.Tensor, name, stays)


def _aborted(original: Callable[[_Manager, _Abort], None], manager: _Manager, message: _Abort) -> None:
    """Release the adapter of the request; where the abort has a status, whoever waits for it does."""
    state = manager.rid_to_state.get(message.rid)
    original(manager, message)
    if state is None or message.rid in manager.rid_to_state or not state.obj.lora_path:
        return
    if not (message.finished_reason or {}).get("status_code"):
        _releasing.add(task := asyncio.ensure_future(manager.lora_registry.release(state.obj.lora_id)))
        task.add_done_callback(_releasing.discard)


_releasing: set[asyncio.Future[None]] = set()


def _unpinned(make: Callable[..., object]) -> Callable[..., object]:
    def made(*args: object, pin_memory: bool = False, **options: object) -> object:
        del pin_memory
        return make(*args, **options)

    return made


def _itself(tensor: object, *_: object) -> object:
    return tensor

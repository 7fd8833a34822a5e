"""On the import path of a server on the CPU: its adapters are kept in plain memory.

SGLang 0.5.15 computes with adapters on the CPU (lora_backend = torch_native), and pins the memory of them for
copies to a card; torch refuses that where there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


def _unpinned(make: Callable[..., object]) -> Callable[..., object]:
    def made(*args: object, pin_memory: bool = False, **options: object) -> object:
        return make(*args, **options)

    return made


class _Patch(MetaPathFinder):
    """Changes torch when SGLang's adapters are imported: before, torch is not."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name == "sglang.srt.lora":
            sys.meta_path.remove(self)
            import torch

            for function in ("tensor", "zeros", "ones", "empty", "full", "arange"):
                setattr(torch, function, _unpinned(getattr(torch, function)))
            torch.Tensor.pin_memory = lambda tensor, device=None: tensor
        return None


sys.meta_path.insert(0, _Patch())

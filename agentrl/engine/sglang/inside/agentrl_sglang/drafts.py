"""What belongs to the model that a server drafts with, where that is a layer of the policy.

SGLang calls the loader for it first, and then for the policy, with the same request.
"""

from __future__ import annotations

from collections.abc import Iterable

from .locations import Model
from .tensors import SentTensor

_BLOCK = "model.decoder."
_BESIDE = ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")


class Share:
    """Of a policy's tensors those that a model has to hold, by its own names.

    ahead: what the names of the layers begin with that draft; none where no draft is sent.
    """

    def __init__(self, model: Model, ahead: Iterable[object]) -> None:
        self.ahead = tuple(str(begin) for begin in ahead)
        self._drafts = any(name.startswith(_BLOCK) for name, _ in model.named_parameters())

    def holds(self, name: str) -> bool:
        """Whether a tensor is one of them."""
        return name.startswith(self.ahead) == self._drafts

    def of(self, tensors: Iterable[SentTensor]) -> list[SentTensor]:
        """Those of some tensors, renamed."""
        return [
            tensor._replace(name=self.name_of(tensor.name)) for tensor in tensors if self.holds(tensor.name)
        ]

    def name_of(self, name: str) -> str:
        """The model's name of a tensor that it holds: model.layers.61.enorm.weight -> model.enorm.weight."""
        if not self._drafts:
            return name
        below = name.split(".", 3)[3]
        return f"model.{below}" if below.startswith(_BESIDE) else f"{_BLOCK}{below}"

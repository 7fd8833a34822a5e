"""What belongs to the model that a server drafts with, where that is a layer of the policy.

SGLang calls the loader for it first, and then for the policy, with the same request.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from .locations import Model
from .tensors import SentTensor

_BESIDE = {
    "model.decoder.": ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm."),
    "model.mtp_block.": ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm."),
}
"""By what the names of a draft's layer begin with (the last are MiMo's): what it has beside that layer."""


class Share:
    """Of a policy's tensors those that a model has to hold, by its own names.

    ahead: what the names of the layers begin with that draft; none where no draft is sent.
    """

    def __init__(self, model: Model, ahead: Iterable[object]) -> None:
        self.ahead = tuple(str(begin) for begin in ahead)
        self._model = model

    def holds(self, name: str) -> bool:
        """Whether a tensor is one of them."""
        return name.startswith(self.ahead) == (self._block is not None)

    @cached_property
    def _block(self) -> str | None:
        """What the names of a draft's layer begin with, in this model; a later version asks for none."""
        names = [name for name, _ in self._model.named_parameters()]
        return next((block for block in _BESIDE if any(name.startswith(block) for name in names)), None)

    def of(self, tensors: Iterable[SentTensor]) -> list[SentTensor]:
        """Those of some tensors, renamed."""
        return [
            tensor._replace(name=self.name_of(tensor.name)) for tensor in tensors if self.holds(tensor.name)
        ]

    def name_of(self, name: str) -> str:
        """The model's name of a tensor that it holds: model.layers.61.enorm.weight -> model.enorm.weight."""
        if self._block is None:
            return name
        below = name.split(".", 3)[3]
        return f"model.{below}" if below.startswith(_BESIDE[self._block]) else f"{self._block}{below}"

"""The routers of transformers' mixtures of experts: what they choose is seen, or chosen in their place.

Whatever a family does with its scores, its router takes the k best of E at last. That is where another choice
comes in: weights of the outputs are then computed from the router's own scores of the experts so chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from agentrl.types import ExpertLayers
from agentrl.weights.hf.source import EXPERTS

T = TypeVar("T")

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_BIAS = "e_score_correction_bias"
"""What routers have whose scores are sigmoids."""
_TOPK = (torch.topk, Tensor.topk)


class RoutingPass(Protocol):
    """What happens to the choice of routers in a pass. layer: its place among the layers of experts."""

    def chosen(self, layer: int, own_tk: Tensor) -> Tensor:
        """The experts that count, int64 [t, k], in place of the router's own."""

    def scored(self, layer: int, logits_tE: Tensor, chosen_tk: Tensor, weights_tk: Tensor) -> Tensor:
        """The weights of the experts' outputs: those of the router, from its logits and the experts that
        counted, whose backward pass may do more."""


class ExpertSizes(NamedTuple):
    """layers: those with experts. experts: of such a layer (count)."""

    layers: ExpertLayers
    experts: int


def expert_sizes(config: PreTrainedConfig) -> ExpertSizes | None:
    """The layers of experts of a model, by the fields that families have for it; None = it has none."""
    by_layer = experts_by_layer(config)
    numbers = [layer for layer, number in enumerate(by_layer) if number]
    k = config.get_text_config().to_dict().get("num_experts_per_tok")
    if not numbers or k is None:
        return None
    return ExpertSizes(ExpertLayers(tuple(numbers), len(by_layer), int(k)), max(by_layer))


def experts_by_layer(config: PreTrainedConfig) -> tuple[int, ...]:
    """The experts of each layer; 0 = it has a feed-forward block."""
    fields = config.get_text_config().to_dict()
    layers = range(int(fields.get("num_hidden_layers") or 0))
    number = next((int(fields[name]) for name in EXPERTS if fields.get(name) is not None), 0)
    first, every = int(fields.get("first_k_dense_replace") or 0), int(fields.get("decoder_sparse_step") or 1)
    dense = {*range(first), *(fields.get("mlp_only_layers") or ())}
    return tuple(0 if layer in dense or (layer + 1) % every else number for layer in layers)


class _Choice(TorchFunctionMode):
    """While a router runs: the k best of its E scores are those that a pass says."""

    def __init__(self, passed: RoutingPass, layer: int, experts: int, k: int) -> None:
        super().__init__()
        self._passed, self._layer, self._experts, self._k = passed, layer, experts, k

    def __torch_function__(
        self,
        func: object,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert callable(func)
        out: object = func(*args, **(kwargs or {}))
        scores = args[0] if args else None
        if func not in _TOPK or not isinstance(out, tuple) or not isinstance(scores, Tensor):
            return out
        own_tk = out[1]
        # Families that choose groups of experts first take the best of fewer scores there.
        if scores.ndim != 2 or scores.shape[1] != self._experts or own_tk.shape[1] != self._k:
            return out
        chosen_tk = self._passed.chosen(self._layer, own_tk)
        return torch.return_types.topk((scores.gather(1, chosen_tk), chosen_tk))


class Routers:
    """The routers of a model, in the order of its layers. layers: of experts. experts: of each (count).

    is_sigmoid: their scores are sigmoids of their logits, not a softmax of them.

    passed: what happens to their choices from now on; None = they are left to themselves.
    """

    def __init__(self, routers: Sequence[nn.Module], sizes: ExpertSizes, *, is_sigmoid: bool) -> None:
        self.passed: RoutingPass | None = None
        self.layers, self.experts = sizes
        self.is_sigmoid = is_sigmoid
        self._active: list[ExitStack] = []
        for layer, router in enumerate(routers):
            self._attach(router, layer)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers | None:
        """Those of a model; None = it has no layers of experts, or routers of another kind."""
        found = []
        for name, module in model.named_modules():
            place = _LAYER.search(name)
            if place is not None and _is_router(module):
                found.append((int(place[1]), module))
        sizes = expert_sizes(model.config)
        if sizes is None or [number for number, _ in found] != [*sizes.layers.numbers]:
            return None
        expected = (sizes.experts, sizes.layers.k)
        if any((module.num_experts, module.top_k) != expected for _, module in found):
            return None
        # MiniMax-M2 has the bias beside its router.
        is_sigmoid = any(hasattr(module, _BIAS) for module in model.modules())
        return cls([module for _, module in found], sizes, is_sigmoid=is_sigmoid)

    def run(self, passed: RoutingPass | None, function: Callable[..., T], *args: object) -> T:
        """What a function of the layers gives, while the choices of routers are subject to `passed`."""
        before, self.passed = self.passed, passed
        try:
            return function(*args)
        finally:
            self.passed = before

    def _attach(self, router: nn.Module, layer: int) -> None:
        def enter(module: nn.Module, _inputs: object) -> None:
            # A copy of the model has these hooks, too, and is not seen.
            if self.passed is not None and module is router:
                active = ExitStack()
                active.enter_context(_Choice(self.passed, layer, self.experts, self.layers.k))
                self._active.append(active)

        def leave(module: nn.Module, _inputs: object, outputs: object) -> object:
            if not self._active or module is not router:
                return None
            self._active.pop().close()
            if self.passed is not None and isinstance(outputs, tuple) and len(outputs) == 3:
                logits_tE, weights_tk, chosen_tk = outputs
                weights_tk = _weights_of(router, logits_tE, chosen_tk, weights_tk)
                return logits_tE, self.passed.scored(layer, logits_tE, chosen_tk, weights_tk), chosen_tk
            return None

        router.register_forward_pre_hook(enter)
        router.register_forward_hook(leave, always_call=True)


def _weights_of(router: nn.Module, logits_tE: Tensor, chosen_tk: Tensor, weights_tk: Tensor) -> Tensor:
    """Those of the scores: DeepSeek-V2 takes them where the scores of other groups have become 0."""
    if getattr(router, "topk_method", None) != "group_limited_greedy":
        return weights_tk
    scale = router.routed_scaling_factor
    assert isinstance(scale, float)
    return logits_tE.softmax(-1, dtype=torch.float32).gather(1, chosen_tk) * scale


def _is_router(module: nn.Module) -> bool:
    experts, k, weight = (getattr(module, name, None) for name in ("num_experts", "top_k", "weight"))
    has_sizes = isinstance(experts, int) and isinstance(k, int) and isinstance(weight, nn.Parameter)
    return has_sizes and "Router" in type(module).__name__ and weight is not None and len(weight) == experts

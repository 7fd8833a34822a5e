"""Offloading: what a device does not need now is copied to the CPU's memory, and back before use.

An optimizer's state may be there for good, and its steps computed there (`CpuAdamW`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from agentrl.runtime.collector import freed_bytes

PINNED_BYTES = 64 << 20
"""Pinned memory is allocated in buffers of this size: torch rounds an allocation up to a power of two."""

Tensors = Callable[[], Iterable[Tensor]]


class _OffloadedStorage(NamedTuple):
    """A storage that is empty now, its size when onloaded, and copies of its bytes."""

    storage: torch.UntypedStorage
    num_bytes: int
    pieces: Sequence[Tensor]


class Offloadable:
    """The memory of some tensors, which is freed by `offload` and allocated again by `onload`.

    tensors, scratch: called each time, since an optimizer creates its tensors in its first step. The contents
    of `scratch` are lost: their user overwrites them. Views of one storage are moved once, together.
    """

    def __init__(self, tensors: Tensors, scratch: Tensors = tuple) -> None:
        self._tensors, self._scratch = tensors, scratch
        self._offloaded: list[_OffloadedStorage] = []
        self._pinned: list[Tensor] = []
        self.is_offloaded = False

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """Have the tensors for the block; where they were offloaded, they are so again afterwards."""
        if not self.is_offloaded:
            yield
            return
        self.onload()
        try:
            yield
        finally:
            self.offload()

    def offload(self) -> None:
        """Copy the tensors to the CPU, and free their memory."""
        if self.is_offloaded:
            return
        self.is_offloaded = True
        scratch = _storages(self._scratch()).values()
        self._offloaded = [_OffloadedStorage(storage, storage.nbytes(), ()) for storage in scratch]
        used = 0
        for storage in _storages(self._tensors()).values():
            pieces = self._copy_to_pinned(_bytes_of(storage), used)
            used += storage.nbytes()
            self._offloaded.append(_OffloadedStorage(storage, storage.nbytes(), pieces))
        for offloaded in self._offloaded:
            offloaded.storage.resize_(0)

    def onload(self) -> None:
        """Allocate the tensors' memory, and copy them back."""
        for storage, num_bytes, pieces in self._offloaded:
            storage.resize_(num_bytes)
            bytes_ = _bytes_of(storage)
            for piece in pieces:
                bytes_[: len(piece)].copy_(piece)
                bytes_ = bytes_[len(piece) :]
        self._offloaded = []
        self.is_offloaded = False

    def _copy_to_pinned(self, bytes_: Tensor, start: int) -> list[Tensor]:
        """Copy bytes to offset `start` of the pinned buffers, which are reused from one call to the next."""
        pieces = []
        while len(bytes_):
            number, at = divmod(start, PINNED_BYTES)
            if number == len(self._pinned):
                self._pinned.append(torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=bytes_.is_cuda))
            target = self._pinned[number][at : at + len(bytes_)]
            pieces.append(target.copy_(bytes_[: len(target)]))
            bytes_, start = bytes_[len(target) :], start + len(target)
        return pieces


class NetworkMemory:
    """The memory of one network: its parameters, and what only a step of it needs.

    others: the optimizer's tensors. Those that share memory with a parameter count as parameters. scratch:
    gradients; see `Offloadable`.
    """

    def __init__(self, parameters: Tensors, others: Tensors = tuple, scratch: Tensors = tuple) -> None:
        self._parameters = Offloadable(parameters)

        def only_others() -> Iterator[Tensor]:
            shared = _storages(parameters()).keys()
            return (tensor for tensor in others() if tensor.untyped_storage().data_ptr() not in shared)

        self._others = Offloadable(only_others, scratch)

    def offload(self) -> None:
        """Free all of it."""
        # While the parameters are there, memory that they share is recognized.
        self._others.offload()
        self._parameters.offload()

    def onload(self) -> None:
        """Allocate all of it."""
        self._parameters.onload()
        self._others.onload()

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """Have all of it for the block."""
        with self._parameters.onloaded(), self._others.onloaded():
            yield

    @contextmanager
    def parameters_onloaded(self) -> Iterator[None]:
        """Have the parameters for the block, whatever else is offloaded."""
        with self._parameters.onloaded():
            yield


class CpuShard(NamedTuple):
    """A rank's part, in the CPU's memory, of a tensor that ranks share as they do a parameter."""

    part: Tensor
    parameter: DTensor

    def whole(self) -> Tensor:
        """All of it, on the device; every rank calls it."""
        like, part = self.parameter, self.part.to(self.parameter.to_local().device)
        placed = (like.device_mesh, like.placements)
        shared = DTensor.from_local(part, *placed, run_check=False, shape=like.shape, stride=like.stride())
        return shared.full_tensor()


class _Rates(NamedTuple):
    """The settings of some parameters of AdamW in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool


class AdamSettings(TypedDict, total=False):
    """Those of an optimizer that all groups without their own share."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class CpuAdamW(torch.optim.AdamW):
    """AdamW in the CPU's memory: weights in fp32, means, and the steps, which the CPU computes.

    A parameter's gradient is copied there, one at a time, and its new values back to the device. The state
    is as AdamW's.

    groups: as for AdamW; what they lack is in `shared`. written: by a parameter that stands for its
    copy here alone, and loses its memory: what is written in its place.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, object]],
        written: Mapping[Tensor, Tensor] | None = None,
        **shared: Unpack[AdamSettings],
    ) -> None:
        # Both places compute by one kernel, and a saved state says which.
        super().__init__([{**group, "params": []} for group in groups], fused=True, **shared)
        # Those of ranks that share an optimizer are views of what they share, which torch itself refuses.
        for own, group in zip(self.param_groups, groups, strict=True):
            own["params"] = group["params"]
        self._written = written or {}
        self.copies = {
            p: own_part(p).detach().to("cpu", torch.float32, copy=True)
            for group in self.param_groups
            for p in group["params"]
        }
        for parameter in self._written:
            parameter.untyped_storage().resize_(0)
        self._buffer: Tensor | None = None

    def refresh(self) -> None:
        """Take the values of parameters that were loaded."""
        for parameter, copy in self.copies.items():
            if parameter not in self._written:
                copy.copy_(own_part(parameter))

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients, those that `closure` computes, where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            is_decoupled = group["decoupled_weight_decay"]
            rates = _Rates(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], is_decoupled)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, own_part(parameter.grad), rates)
        return loss

    def state_dict(self) -> dict[str, object]:
        """AdamW's; parts of what ranks share are `CpuShard`s."""
        saved: dict[str, object] = super().state_dict()
        states = {
            number: {name: _shared(tensor, p) for name, tensor in self.state[p].items()}
            for number, p in enumerate(self.copies)
            if p in self.state
        }
        return {**saved, "state": states}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Take a state, of which ranks have their parts, and the values of the parameters.

        Raises:
            ValueError: it is of other parameters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self.refresh()
        states = state_dict["state"]
        assert isinstance(states, dict)
        for number, (parameter, copy) in enumerate(self.copies.items()):
            self.state[parameter] = {name: tensor.clone() for name, tensor in states.get(number, {}).items()}
            if any(tensor.ndim and tensor.shape != copy.shape for tensor in self.state[parameter].values()):
                raise ValueError(f"a parameter is {tuple(copy.shape)}, its saved means are not")

    def begin(self, parameter: Tensor, *, steps: int) -> dict[str, Tensor]:
        """Means of 0 after so many steps."""
        copy = self.copies[parameter]
        means = {"exp_avg": torch.zeros_like(copy), "exp_avg_sq": torch.zeros_like(copy)}
        state = self.state[parameter] = {"step": torch.tensor(float(steps)), **means}
        return state

    def _step(self, parameter: Tensor, gradient: Tensor, rates: _Rates) -> None:
        copy, state = self.copies[parameter], self.state[parameter] or self.begin(parameter, steps=0)
        target = own_part(self._written.get(parameter, parameter))
        buffer = self._buffer_of(copy, target.device)
        buffer.copy_(gradient)
        adam(
            *([copy], [buffer], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]]),
            lr=rates.lr,
            beta1=rates.beta1,
            beta2=rates.beta2,
            weight_decay=rates.weight_decay,
            eps=rates.eps,
            amsgrad=False,
            maximize=False,
            fused=True,
            decoupled_weight_decay=rates.is_decoupled,
        )
        target.copy_(buffer.copy_(copy))

    def _buffer_of(self, copy: Tensor, device: torch.device) -> Tensor:
        """Memory of a copy's shape that a device reaches fast, until the next call."""
        if self._buffer is None:
            largest = max(each.numel() for each in self.copies.values())
            self._buffer = torch.empty(largest, pin_memory=device.type == "cuda")
        return self._buffer[: copy.numel()].view(copy.shape)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that ranks share, or all of another one."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _shared(tensor: Tensor, parameter: Tensor) -> Tensor | CpuShard:
    is_part = isinstance(parameter, DTensor) and tensor.ndim
    return CpuShard(tensor, parameter) if is_part and isinstance(parameter, DTensor) else tensor


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory of its own, so that offloading frees some: the CPU's is the host's."""
    return device.type != "cpu"


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a GPU, whoever uses the rest (bytes); None = the device is the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def offloaded_bytes(device: torch.device, offload: Callable[[], None]) -> int:
    """Call `offload`, and return the memory that the device got back, for other processes, too (bytes)."""
    if device.type != "cuda":
        return freed_bytes(offload)
    before = torch.cuda.memory_reserved(device)
    offload()
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved(device)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """By their address. CPU memory that numpy shares cannot be resized; it is not offloaded."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in storages if storage.resizable()}


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

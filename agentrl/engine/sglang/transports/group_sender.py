"""Rank 0 of a process group that weights are broadcast in: work on a snapshot, in the process that has it.

The other ranks are servers. torch's default group of that process is neither used nor needed. All functions
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from agentrl.engine.sglang.control import UpdateGroup
from agentrl.errors import EngineUnavailableError
from agentrl.processes.interfaces import use_interface_to
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.codec import slices, torch_dtype

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class Communicator(Protocol):
    """The common interface of gloo and NCCL."""

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work:
        """Send to all ranks."""

    def abort(self) -> None:
        """Close the connections, also during a collective."""


_joined: dict[str, Communicator] = {}
"""The groups of this process, by name."""


def join(group: UpdateGroup, timeout_s: float, buckets: Sequence[Bucket]) -> None:
    """Join as rank 0, under the store prefixes of torch's own groups; blocks until all ranks have joined.

    torch's own functions would register the group with the trainer's groups, or split it from them.

    Raises:
        EngineUnavailableError: not all of them joined in time.
    """
    del buckets
    timeout = timedelta(seconds=timeout_s)
    use_interface_to(group.host)
    try:
        store = TCPStore(group.host, group.port, is_master=False, timeout=timeout, wait_for_workers=False)
        group_store = PrefixStore(f"{group.name}/", PrefixStore(group.name, store))
        device_store = PrefixStore(f"{_DEVICES[group.backend]}/", group_store)
        if group.backend == "gloo":
            communicator = cast("Communicator", ProcessGroupGloo(device_store, 0, group.size, timeout))
        else:
            communicator = _nccl(device_store, group.size, timeout)
    except RuntimeError as error:
        raise EngineUnavailableError(f"not all servers joined the process group: {error}") from error
    _joined[group.name] = communicator


def broadcast(group: UpdateGroup, number: int, timeout_s: float, buckets: Sequence[Bucket]) -> None:
    """Send the tensors of a bucket, in the order of `in_order`. number: of the bucket.

    Raises:
        EngineUnavailableError: a member left the group, or it took too long.
    """
    bucket = buckets[number]
    tensor = torch.from_numpy(_flattened(bucket)).to(_DEVICES[group.backend])
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=timeout_s)
    try:
        _joined[group.name].broadcast([tensor], options).wait(timedelta(seconds=timeout_s))
        if tensor.is_cuda:
            torch.cuda.synchronize()
    except (KeyError, RuntimeError) as error:
        raise EngineUnavailableError(f"a member left the process group: {error}") from error


def leave(group: UpdateGroup, buckets: Sequence[Bucket]) -> None:
    """Close the connections of the group, also while another thread broadcasts."""
    del buckets
    with suppress(KeyError):
        _joined.pop(group.name).abort()


def in_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Tensors so that each is aligned to its dtype, end to end: SGLang takes views of what it receives."""
    return sorted(specs, key=lambda spec: -torch_dtype(spec.dtype).itemsize)


def _flattened(bucket: Bucket) -> npt.NDArray[np.uint8]:
    ordered = in_order(bucket.tensors)
    if ordered == list(bucket.tensors):
        return bucket.data
    data = {spec.name: piece for spec, piece in slices(bucket)}
    return np.concatenate([data[spec.name] for spec in ordered])


def _nccl(store: PrefixStore, size: int, timeout: timedelta) -> Communicator:
    # Only builds for GPUs have this class.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast("Communicator", ProcessGroupNCCL(store, 0, size, options))

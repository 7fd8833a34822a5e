"""A trainer's state as a directory: a trainer that loads it continues bit for bit.

trainer.json                                the layout, and the optimizers' steps
policy/                                     the policy's weights and its optimizer
critic/                                     the same of a critic
reference/                                  the weights of a reference that moves

With Megatron each folder holds the shards and the optimizer parts of every rank (`megatron/files/saving`),
with torch state.pt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.errors import ConfigError, ModelLoadError
from agentrl.runtime.ownership import read_file
from agentrl.trainer.offload import CpuShard
from agentrl.trainer.plan import Done, Plan
from agentrl.trainer.summary import FOLDERS, MUON, Dtype, RankLayout, SavedDone, SavedTrainer
from agentrl.types import ScoreRole

ABOUT = "trainer.json"


class StateCopy:
    """Copies of a network's tensors on the CPU; those that share memory share the copy.

    All tensors must exist at the same time; one that ranks share is gathered: every rank takes part. buffers:
    memory of earlier copies, which is overwritten: new memory costs more time than the copy.
    """

    def __init__(self, buffers: Mapping[Hashable, Tensor]) -> None:
        self._earlier = buffers
        self.buffers: dict[Hashable, Tensor] = {}

    def __call__(self, tensor: Tensor | CpuShard) -> Tensor:
        """The copy of a tensor."""
        if isinstance(tensor, CpuShard):
            return self._copied(tensor.part, tensor.whole())
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            return self._copied(tensor.to_local(), tensor.full_tensor())
        return self._copied(tensor, tensor)

    def _copied(self, part: Tensor, tensor: Tensor) -> Tensor:
        """part: what is there of the tensor between two copies."""
        memory = (part.device, part.data_ptr(), part.dtype, tensor.shape, tensor.stride())
        if memory not in self.buffers or not tensor.numel():
            buffer = self._earlier.get(memory)
            if buffer is None or not tensor.numel():
                buffer = torch.empty_like(tensor, device="cpu", requires_grad=False)
            self.buffers[memory] = buffer.copy_(tensor)
        return self.buffers[memory]


class StateWriter:
    """A rank's thread that writes copies of its state, while the rank trains on.

    The memory of the copies is kept for the next ones: it is needed during steps in any case, while a copy is
    written.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "agentrl-state")
        self._last: Future[None] | None = None
        self._copies: dict[ScoreRole, StateCopy] = {}

    def copy_of(self, role: ScoreRole) -> StateCopy:
        """The copy of a network for the next `start`; not in the memory of one that is being written."""
        is_free = role in self._copies and (self._last is None or self._last.done())
        self._copies[role] = StateCopy(self._copies[role].buffers if is_free else {})
        return self._copies[role]

    def start(self, write: Callable[[], None]) -> None:
        """Write in the thread, after the write before it. What `write` uses must not change meanwhile."""
        self._last = self._thread.submit(write)

    def is_done(self) -> bool | OSError:
        """Whether all is written; the error of a disk that did not take it."""
        if self._last is None or not self._last.done():
            return self._last is None
        last, self._last = self._last, None
        error = last.exception()
        if isinstance(error, OSError):
            # It does not end the rank, whose training needs no disk.
            return error
        return last.result() is None


def write_summary(folder: Path, plan: Plan, steps: int, done: Mapping[ScoreRole, Done]) -> None:
    """Write trainer.json, in a folder that the ranks have filled."""
    done_by_folder = {
        FOLDERS[role]: SavedDone(steps=counts.steps, skipped=counts.skipped) for role, counts in done.items()
    }
    saved = SavedTrainer(
        dtype=dtype_of(plan), layout=dict(plan.layout_facts), steps=steps, done=done_by_folder
    )
    (folder / ABOUT).write_text(json.dumps(saved.model_dump(), indent=2) + "\n", encoding="utf-8")


def read_summary(folder: Path, plan: Plan) -> SavedTrainer:
    """The summary of a saved trainer, checked against the plan.

    Raises:
        ModelLoadError: it is no such directory.
        ConfigError: it was saved with other networks, or by another optimizer.
    """
    path = folder / ABOUT
    try:
        saved = SavedTrainer.model_validate_json(read_file(path))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); name what a trainer has saved.") from None
    except ValidationError as error:
        raise ModelLoadError(f"{path} is not as a trainer writes it ({error.errors()[0]['msg']}).") from None
    keys, sizes = saved.layout.keys() - {MUON}, saved.layout.values()
    if not saved.is_of_torch and (keys != {*RankLayout._fields} or min(sizes, default=0) < 0):
        raise ModelLoadError(f"{path} is not as a trainer writes it (layout); name what a trainer has saved.")
    # Another layout, and the other trainer, read it through `elsewhere`; another optimizer has other means.
    for name, theirs, own in (
        ("muon", saved.layout.get(MUON, 0), plan.layout_facts.get(MUON, 0)),
        ("networks", sorted(saved.done), _networks(plan)),
    ):
        if theirs != own:
            raise ConfigError(
                f"{folder} was saved with {name} = {_printable(theirs)}, this trainer has "
                f"{_printable(own)}; go on with the settings that it was saved with."
            )
    return saved


def done_of(saved: SavedTrainer) -> dict[ScoreRole, Done]:
    """What each network's optimizer did."""
    roles = {folder: role for role, folder in FOLDERS.items()}
    return {roles[name]: Done(counts.steps, counts.skipped) for name, counts in saved.done.items()}


def is_own(saved: SavedTrainer, plan: Plan) -> bool:
    """Whether ranks of this plan would save the same files."""
    return (saved.dtype, saved.layout) == (dtype_of(plan), dict(plan.layout_facts))


def _networks(plan: Plan) -> list[str]:
    return sorted(FOLDERS[role] for role in ("old", "values") if role == "old" or plan.critic is not None)


def dtype_of(plan: Plan) -> Dtype:
    """The dtype of the weights that are saved."""
    return "bfloat16" if plan.publishes_bf16 else "float32"


def _printable(value: object) -> object:
    return " and ".join(value) if isinstance(value, list) else value

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
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.config import Section
from agentrl.errors import ConfigError, ModelLoadError
from agentrl.runtime.ownership import read_file
from agentrl.trainer.plan import Done, Plan
from agentrl.types import ScoreRole

ABOUT = "trainer.json"
FOLDERS: Mapping[ScoreRole, str] = {"old": "policy", "values": "critic", "ref": "reference"}
"""The folder of each network that changes."""

Dtype = Literal["float32", "bfloat16"]


class SavedDone(Section):
    """An optimizer's steps."""

    steps: int
    """Steps (count)."""
    skipped: int
    """Those that changed no weights (count)."""


class SavedTrainer(Section):
    """The contents of trainer.json."""

    format: Literal[1] = 1
    """The version of this directory's format."""
    dtype: Dtype
    """The dtype of the weights."""
    layout: dict[str, int]
    """The settings that the files depend on, by name."""
    steps: int
    """Updates that the trainer made (count)."""
    done: dict[str, SavedDone]
    """The steps of each network's optimizer."""


class StateCopy:
    """Copies of a network's tensors on the CPU; those that share memory share the copy.

    All tensors must exist at the same time; one that ranks share is gathered: every rank takes part. buffers:
    memory of earlier copies, which is overwritten: new memory costs more time than the copy.
    """

    def __init__(self, buffers: Mapping[Hashable, Tensor]) -> None:
        self._earlier = buffers
        self.buffers: dict[Hashable, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor."""
        part, tensor = tensor, tensor.detach()
        if isinstance(tensor, DTensor):
            part, tensor = tensor.to_local(), tensor.full_tensor()
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


def read_summary(folder: Path, plan: Plan) -> tuple[int, dict[ScoreRole, Done]]:
    """The saved trainer's updates, and the steps of each optimizer; checks them against the plan.

    Raises:
        ModelLoadError: it is no such directory.
        ConfigError: it was saved under another layout, or with other networks.
    """
    path = folder / ABOUT
    try:
        saved = SavedTrainer.model_validate_json(read_file(path))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); name what a trainer has saved.") from None
    except ValidationError as error:
        raise ModelLoadError(f"{path} is not as a trainer writes it ({error.errors()[0]['msg']}).") from None
    own_settings = {"dtype": dtype_of(plan), **plan.layout_facts, "networks": _networks(plan)}
    saved_settings = {"dtype": saved.dtype, **saved.layout, "networks": sorted(saved.done)}
    for name, value in own_settings.items():
        if saved_settings.get(name) != value:
            raise ConfigError(
                f"{folder} was saved with {name} = {_printable(saved_settings.get(name))}, this trainer has "
                f"{_printable(value)}; go on with the settings that it was saved with."
            )
    roles = {folder: role for role, folder in FOLDERS.items()}
    done = {roles[name]: Done(counts.steps, counts.skipped) for name, counts in saved.done.items()}
    return saved.steps, done


def _networks(plan: Plan) -> list[str]:
    return sorted(FOLDERS[role] for role in ("old", "values") if role == "old" or plan.critic is not None)


def dtype_of(plan: Plan) -> Dtype:
    """The dtype of the weights that are saved."""
    return "bfloat16" if plan.publishes_bf16 else "float32"


def _printable(value: object) -> object:
    return " and ".join(value) if isinstance(value, list) else value

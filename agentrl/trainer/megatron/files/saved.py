"""All that a trainer knows, as a directory: another one goes on from it as if nothing had been between.

trainer.json                                what it is: the layout, and what the optimizers did
policy/                                     a Megatron directory: see `sharded`
policy/optimizer/rank-00000.safetensors     what rank 0 keeps of its parameters, flat, with AdamW's means
critic/                                     the same of a critic
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from agentrl.config import Section
from agentrl.errors import ConfigError, ModelLoadError
from agentrl.trainer.megatron.files.sharded import About, Dtype, SavedLayout, begin_directory
from agentrl.trainer.megatron.plan import Done, Plan
from agentrl.types import ScoreRole

ABOUT = "trainer.json"
FOLDERS: Mapping[ScoreRole, str] = {"old": "policy", "values": "critic"}
"""Where each network that learns is."""

_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "context_parallel_size",
    "data_parallel_size",
    "shares_the_optimizer",
)


class SavedDone(Section):
    """What an optimizer did."""

    steps: int
    """Steps (count)."""
    skipped: int
    """Those that changed nothing (count)."""


class SavedTrainer(Section):
    """What trainer.json says."""

    format: Literal[1] = 1
    """Of this directory; another one would be read otherwise."""
    dtype: Dtype
    """Of the weights."""
    layout: dict[str, int]
    """What the files depend on: settings of the section `megatron`, by name."""
    steps: int
    """Updates that the trainer made (count)."""
    done: dict[str, SavedDone]
    """What the optimizer of each network did."""


def begin(folder: Path, plan: Plan) -> None:
    """Make a trainer's directory, into which the ranks may write."""
    layout = SavedLayout(tensor_model_parallel_size=plan.layout.tensor_model_parallel_size)
    folder.mkdir()
    begin_directory(
        folder / FOLDERS["old"], About(dtype=_dtype(plan), layout=layout), like=Path(plan.models["old"])
    )
    if plan.critic is not None:
        (folder / FOLDERS["values"]).mkdir()


def finish(folder: Path, plan: Plan, steps: int, done: Mapping[ScoreRole, Done]) -> None:
    """Write what the ranks have not: what all of it is."""
    told = {FOLDERS[role]: SavedDone(steps=one.steps, skipped=one.skipped) for role, one in done.items()}
    saved = SavedTrainer(dtype=_dtype(plan), layout=_layout(plan), steps=steps, done=told)
    (folder / ABOUT).write_text(json.dumps(saved.model_dump(), indent=2) + "\n", encoding="utf-8")


def opened(folder: Path, plan: Plan) -> tuple[int, dict[ScoreRole, Done]]:
    """The updates that the saved trainer made, and what each optimizer did, where this plan fits to them.

    Raises:
        ModelLoadError: it is no such directory.
        ConfigError: it was saved under another layout, or with other networks.
    """
    path = folder / ABOUT
    try:
        saved = SavedTrainer.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); name what a trainer has saved.") from None
    except ValidationError as error:
        raise ModelLoadError(f"{path} is not as a trainer writes it ({error.errors()[0]['msg']}).") from None
    wanted = {"dtype": _dtype(plan), **_layout(plan), "networks": _networks(plan)}
    found = {"dtype": saved.dtype, **saved.layout, "networks": sorted(saved.done)}
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ConfigError(
                f"{folder} was saved with {name} = {_told(found.get(name))}, this trainer has "
                f"{_told(value)}; go on with the settings that it was saved with."
            )
    roles = {folder: role for role, folder in FOLDERS.items()}
    return saved.steps, {roles[name]: Done(one.steps, one.skipped) for name, one in saved.done.items()}


def _networks(plan: Plan) -> list[str]:
    return sorted(FOLDERS[role] for role in ("old", "values") if role == "old" or plan.critic is not None)


def _layout(plan: Plan) -> dict[str, int]:
    return {name: int(getattr(plan.layout, name)) for name in _LAYOUT}


def _dtype(plan: Plan) -> Dtype:
    return "bfloat16" if plan.config.bf16 else "float32"


def _told(value: object) -> object:
    return " and ".join(value) if isinstance(value, list) else value

"""All that a trainer knows, as a directory: another one goes on from it as if nothing had been between.

trainer.json                                what it is: the layout, and what the optimizers did
policy/                                     the policy's weights and its optimizer
critic/                                     the same of a critic

With Megatron each holds the shards and the optimizer parts of every rank (`megatron/files/saving`), with
torch state.pt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from agentrl.config import Section
from agentrl.errors import ConfigError, ModelLoadError
from agentrl.trainer.plan import Done, Plan
from agentrl.types import ScoreRole

ABOUT = "trainer.json"
FOLDERS: Mapping[ScoreRole, str] = {"old": "policy", "values": "critic"}
"""Where each network that learns is."""

Dtype = Literal["float32", "bfloat16"]


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
    """What the files depend on: settings, by name."""
    steps: int
    """Updates that the trainer made (count)."""
    done: dict[str, SavedDone]
    """What the optimizer of each network did."""


def finish(folder: Path, plan: Plan, steps: int, done: Mapping[ScoreRole, Done]) -> None:
    """Write what the ranks have not: what all of it is."""
    done_by_folder = {
        FOLDERS[role]: SavedDone(steps=one.steps, skipped=one.skipped) for role, one in done.items()
    }
    saved = SavedTrainer(
        dtype=dtype_of(plan), layout=dict(plan.layout_facts), steps=steps, done=done_by_folder
    )
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
    wanted = {"dtype": dtype_of(plan), **plan.layout_facts, "networks": _networks(plan)}
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


def dtype_of(plan: Plan) -> Dtype:
    """Of the weights that are saved."""
    return "bfloat16" if plan.publishes_bf16 else "float32"


def _told(value: object) -> object:
    return " and ".join(value) if isinstance(value, list) else value

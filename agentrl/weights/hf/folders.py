"""Whether a folder holds a model, told without transformers."""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.errors import ModelLoadError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_has_config(directory: Path) -> None:
    """Check that a folder has the config of a model.

    Raises:
        ModelLoadError: it has none; the message says what to name.
    """
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{directory} holds no config.json; {model_remedy(directory)}.")


def model_remedy(directory: Path) -> str:
    """What to name where a folder holds no model."""
    if (directory / "checkpoint" / "config.json").is_file():
        return f"it is a run, whose model is {directory / 'checkpoint'}"
    if not directory.parent.exists() and _HUB_ID.fullmatch(str(directory)):
        folder = Path("models") / directory.name
        return f"name a folder: download {directory} from the Hub into {folder}, and name that"
    return "name a Hugging Face model directory"

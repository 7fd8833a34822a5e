"""A model directory appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.weights.quiet import quiet_transformers


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: str) -> None:
    """Write a Hugging Face directory beside `directory`, then put it in its place.

    What was there before is kept until the new one is complete; leftovers of a write that was
    interrupted are cleared by the next.
    """
    target = Path(directory).absolute()
    coming, going = (target.with_name(f".{target.name}.{state}") for state in ("coming", "going"))
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (coming, going):
        shutil.rmtree(leftover, ignore_errors=True)
    with quiet_transformers():
        model.save_pretrained(coming)
    tokenizer.save_pretrained(coming)
    if target.exists():
        os.replace(target, going)
    os.replace(coming, target)
    shutil.rmtree(going, ignore_errors=True)

"""A trained model as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.runtime.files import SystemErrors
from agentrl.weights.hf.directory import atomic_directory
from agentrl.weights.quiet import quiet_transformers


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: str) -> None:
    """Write model and tokenizer as a Hugging Face directory, atomically.

    Raises:
        OSError: the disk did not take it.
    """
    with atomic_directory(Path(directory)) as partial, SystemErrors(Path(directory)):
        with quiet_transformers():
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)

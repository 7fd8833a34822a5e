"""The texts of the tokens in a journal, by the tokenizer of the run that wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from agentrl.config import read_written
from agentrl.runtime.extras import TRAINING, require

_DIRECTORIES: Final = ("checkpoint-warm-start", "model", "checkpoint")
"""Directories of models in a run's folder, all with one tokenizer."""
_FILES: Final = ("tokenizer.json", "tokenizer_config.json")
_WORD_BEGINS: Final = "▁"


def token_texts(home: Path, tokenizer: str | None = None) -> Callable[[int], str] | None:
    """The function from a token id to its text, for the journal in a run's folder.

    Args:
        tokenizer: a model directory to take instead of the run's own.

    Returns:
        None where no tokenizer is there, or where the packages that read one are missing.

    Raises:
        ModelLoadError: `tokenizer`, or the run's model directory, holds none that can be read.
        MissingExtraError: `tokenizer` is named, and the packages that read it are missing.
    """
    if tokenizer is not None:
        require("reading a tokenizer", *TRAINING)
        return _opened(Path(tokenizer))
    found = model_directories(home)
    directory = next((path for path in found if any((path / name).exists() for name in _FILES)), None)
    if directory is None or any(find_spec(module) is None for module in TRAINING):
        return None
    return _opened(directory)


def model_directories(home: Path) -> Iterator[Path]:
    """Where the model of a run's folder may be, by whose tokenizer the tokens of its journal are read."""
    yield from (home / name for name in _DIRECTORIES)
    if (path := named_model(home)) is not None:
        yield Path(path)


def named_model(home: Path) -> str | None:
    """The directory of the model that the run in a folder began with; None = it names none."""
    config = home / "config.toml"
    section = read_written(config).get("model") if config.exists() else None
    path = section.get("hf_checkpoint") if isinstance(section, dict) else section
    return path if isinstance(path, str) else None


def _opened(directory: Path) -> Callable[[int], str]:
    from agentrl.weights.hf.source import open_tokenizer

    tokenizer = open_tokenizer(directory)
    size = len(tokenizer)

    def text_of(id: int) -> str:
        if not 0 <= id < size:
            return f"⟨{id}⟩"
        text = str(tokenizer.decode([id], skip_special_tokens=False))
        # Some decoders drop the blank at the beginning of a text.
        begins_word = str(tokenizer.convert_ids_to_tokens(id)).startswith(_WORD_BEGINS)
        return f" {text}" if begins_word and not text.startswith(" ") else text

    return text_of

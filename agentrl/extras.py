"""What an installation may lack: the package's extras, and the sentence that names the one to install."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from agentrl.errors import MissingExtraError

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "torch": "torch",
        "transformers": "transformers",
        "tokenizers": "tokenizers",
        "safetensors": "safetensors",
        "renderers": "renderers",
        "httpx": "httpx",
        "xxhash": "xxhash",
        "matplotlib": "matplotlib",
        "tensorboard": "tensorboard",
    },
    "mcp": {"mcp": "mcp"},
    "megatron": {"megatron": "megatron-core"},
    "pettingzoo": {"pettingzoo": "pettingzoo", "pygame": "pygame-ce"},
    "reasoning-gym": {"reasoning_gym": "reasoning-gym"},
    "search": {"faiss": "faiss-cpu", "sentence_transformers": "sentence-transformers"},
}
"""By extra, as pyproject.toml declares them: each module that it brings, and the package that holds it."""

TRAINING = tuple(EXTRAS["train"])
"""The modules that an open model needs."""


def require(what: str, *modules: str) -> None:
    """Check that modules of extras are installed, without importing them.

    what: what needs them, as the subject of a sentence ("training").

    Raises:
        MissingExtraError: one is not; the sentence names the first, and its extra.
    """
    for module in modules:
        if find_spec(module) is None:
            raise _missing(what, module)


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The same sentence for an import that has failed; None where no extra brings that module."""
    module = (error.name or "").partition(".")[0]
    known = any(module in modules for modules in EXTRAS.values())
    return _missing("this", module) if known and find_spec(module) is None else None


def _missing(what: str, module: str) -> MissingExtraError:
    extra, package = next((extra, held[module]) for extra, held in EXTRAS.items() if module in held)
    return MissingExtraError(f"{what} needs {package}: pip install 'agentrl[{extra}]'.")

"""The package's optional dependencies, and the error message that names the extra to install."""

from __future__ import annotations

import sys
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
        "yaml": "PyYAML",
    },
    "agentdojo": {"agentdojo": "agentdojo"},
    "data": {"pyarrow": "pyarrow"},
    "gguf": {"gguf": "gguf"},
    "ifeval": {"langdetect": "langdetect"},
    "lora": {"peft": "peft"},
    "math": {"math_verify": "math-verify"},
    "mcp": {"mcp": "mcp"},
    "megatron": {"megatron": "megatron-core"},
    "minigrid": {"minigrid": "minigrid"},
    "openenv": {"uvloop": "uvloop", "websockets": "websockets"},
    "pettingzoo": {"pettingzoo": "pettingzoo", "pygame": "pygame-ce"},
    "prometheus": {"prometheus_client": "prometheus-client"},
    "ray": {"ray": "ray"},
    "reasoning-gym": {"reasoning_gym": "reasoning-gym"},
    "textarena": {"textarena": "textarena"},
    "verifiers": {"verifiers": "verifiers"},
    "wandb": {"wandb": "wandb"},
    "search": {"faiss": "faiss-cpu", "sentence_transformers": "sentence-transformers"},
}
"""By extra, as pyproject.toml declares them: each module, and the package that contains it."""

_PYTHON_BELOW: Mapping[str, tuple[int, int]] = {"megatron": (3, 13)}
"""By extra: the first version of Python that its packages are not made for, and for which it is empty."""

PYTHON = sys.version_info[:2]

TRAINING = tuple(EXTRAS["train"])
"""The modules that are needed to load a model."""


def require(what: str, *modules: str) -> None:
    """Check that modules of extras are installed, without importing them.

    what: the feature that needs them, as the subject of a sentence ("training").

    Raises:
        MissingExtraError: a module is missing; the message names the first, and its extra.
    """
    for module in modules:
        if find_spec(module) is None:
            raise _missing(what, module)


def require_extras(what: str, *extras: str) -> None:
    """Check that extras are installed, without importing them; names of other things are left out.

    what: as in `require`.

    Raises:
        MissingExtraError: one is not; the message names it.
    """
    for extra in extras:
        require(what, *EXTRAS.get(extra, ()))


def is_installed(extra: str) -> bool:
    """Whether all modules of an extra are installed; none is imported."""
    return all(find_spec(module) is not None for module in EXTRAS[extra])


def missing_extra(error: ModuleNotFoundError, what: str = "this") -> MissingExtraError | None:
    """The same error for a failed import; None where no extra contains that module.

    what: the feature that needs it, as the subject of a sentence.
    """
    module = (error.name or "").partition(".")[0]
    is_optional = any(module in modules for modules in EXTRAS.values())
    return _missing(what, module) if is_optional and find_spec(module) is None else None


def _missing(what: str, module: str) -> MissingExtraError:
    extra, package = next(
        (extra, packages[module]) for extra, packages in EXTRAS.items() if module in packages
    )
    below = _PYTHON_BELOW.get(extra)
    if below is not None and below <= PYTHON:
        where = f"is not made for Python {below[0]}.{below[1]} or newer; install agentrl for an older one"
        return MissingExtraError(f"{what} needs {package}, which {where}.")
    return MissingExtraError(f"{what} needs {package}: pip install 'agentrl[{extra}]'.")

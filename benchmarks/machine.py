"""A description of the machine, for the JSON of a benchmark."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from agentrl.types import JSON

_PACKAGES = ("agentrl", "torch", "transformers", "numpy")


def machine() -> dict[str, JSON]:
    """Python, processor architecture, cores, and the versions of the main packages."""
    versions: dict[str, JSON] = {name: version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **versions,
    }

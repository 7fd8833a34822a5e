"""A description of the machine and of other interpreters, for the JSON of a benchmark."""

from __future__ import annotations

import asyncio
import json
import os
import platform
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from agentrl.errors import ConfigError
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


async def interpreter_versions(
    python: Path, program: str, packages: Sequence[str], remedy: str
) -> dict[str, JSON]:
    """The versions of another interpreter and of `packages` that are installed for it.

    program: what it has to run, for the error. remedy: the end of that sentence, what to do.

    Raises:
        ConfigError: it cannot be run, or lacks one of the packages.
    """
    code = (
        "import json, platform; from importlib.metadata import distributions\n"
        "versions = {package.metadata['Name'].lower(): package.version for package in distributions()}\n"
        "print(json.dumps({**versions, 'python': platform.python_version()}))"
    )
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", code, stdout=PIPE, stderr=DEVNULL, stdin=DEVNULL
        )
    except OSError as error:
        raise ConfigError(f"{python} does not run {program} ({error.strerror}); {remedy}") from error
    out, _ = await process.communicate()
    versions: dict[str, JSON] = json.loads(out) if process.returncode == 0 else {}
    if missing := [name for name in packages if name not in versions]:
        raise ConfigError(f"{python} does not run {program} (it lacks {', '.join(missing)}); {remedy}")
    return {name: versions[name] for name in ("python", *packages)}

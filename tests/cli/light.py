"""A process that has the core of agentrl alone: every module of another package is missing in it."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.source import ROOT, requirements

# None in sys.modules is how Python itself marks a module that cannot be imported.
LIGHT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
sys.path.insert(0, {root!r})
{code}
"""
COMMAND = "from agentrl.cli import main; main(sys.argv[1:])"


@cache
def core() -> frozenset[str]:
    """The distributions that `pip install agentrl` brings, by what each says that it needs."""
    names: set[str] = set()
    waiting = list(requirements())
    for requirement in waiting:
        name = canonicalize_name(requirement.name)
        if name in names or (
            requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue  # a typo in pyproject.toml is seen by `make install`
        names.add(name)
        waiting += map(Requirement, needs)
    return frozenset(names)


@cache
def missing() -> tuple[str, ...]:
    """The modules at the top that are installed here and would not be there."""
    owners = packages_distributions()
    kept = core() | {"agentrl"}
    names = (name for name, held in owners.items() if not kept & {canonicalize_name(owner) for owner in held})
    return tuple(sorted(name for name in names if not name.startswith("_")))


def run_light(folder: Path, *arguments: str, code: str = COMMAND) -> subprocess.CompletedProcess[str]:
    """The command line, or Python, in such a process."""
    script = LIGHT.format(missing=missing(), root=str(ROOT), code=code)
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

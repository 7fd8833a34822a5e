"""What of this machine the sandbox sees: the Python installation, chosen packages, the C library."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from agentrl.errors import UserError
from agentrl.tools.python.inside.wire import SandboxPlan

PACKAGES = "/packages"
FLAGS = ("-s", "-P", "-S")
"""No folder of the user, of the start or of packages. Not -I, which would draw a new hash seed each time."""
_EARLY = """
base64 bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math
operator random re statistics string textwrap time typing
"""
_SYSTEM = ("libc.", "libc-", "libm.", "libm-", "ld-", "libpthread", "libdl", "libpython")
_EXTRA = re.compile(r";.*\bextra\b")
_SYSTEM_LINKS = ("/lib", "/lib64", "/usr/lib64")


def interpreter() -> str:
    """The interpreter itself, past all virtual environments."""
    return os.path.realpath(str(getattr(sys, "_base_executable", sys.executable)))


def plan(packages: Sequence[str], preload: Sequence[str]) -> SandboxPlan:
    """What a sandbox with these packages is made of.

    packages: distributions, by their names on an index; what they require comes along.
    preload: modules that are imported early, beside common ones of the standard library.

    Raises:
        UserError: a package is not installed.
    """
    standard = sysconfig.get_path("stdlib")
    whole = [*_libraries(), standard, *_apart_from(standard), interpreter()]
    return SandboxPlan(
        seen=[*((path, path) for path in whole), *_parts_of(packages)],
        hidden=[f"{standard}/{name}" for name in ("site-packages", "dist-packages")],
        links=[(link, os.readlink(link)) for link in _SYSTEM_LINKS if os.path.islink(link)] + _loaders(),
        packages=PACKAGES,
        preload=[*_EARLY.split(), *preload],
        environment=environment(PACKAGES),
    )


def environment(packages: str) -> dict[str, str]:
    """Every variable that code sees."""
    return {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": os.path.dirname(interpreter()),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": packages,
        "TZ": "UTC",
    }


def _apart_from(standard: str) -> list[str]:
    """The compiled part of the standard library, where it lies elsewhere."""
    compiled = sysconfig.get_config_var("DESTSHARED")
    return [str(compiled)] if compiled and not Path(compiled).is_relative_to(standard) else []


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    """Where the C library lies, and with it what the standard library is linked to."""
    found = {os.path.realpath(path) for path in _mapped() if _is_system(path)}
    # Python's own library may lie in a folder of many other things.
    return tuple(sorted({path if "libpython" in path else os.path.dirname(path) for path in found}))


def _mapped() -> Iterable[str]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")
        if path[1]:
            yield f"/{path[2]}"


def _is_system(path: str) -> bool:
    return os.path.basename(path).startswith(_SYSTEM) and ".so" in path


def _loaders() -> list[tuple[str, str]]:
    """The dynamic loader, at the path that is written into every program."""
    found = [path for folder in ("/lib64", "/lib") for path in Path(folder).glob("ld-linux*.so*")]
    return [
        (f"{os.path.realpath(path.parent)}/{path.name}", os.path.realpath(path))
        for path in found
        if path.is_symlink()
    ]


def _parts_of(packages: Sequence[str]) -> list[tuple[str, str]]:
    """The files and folders of packages and of all that they require, and where they are seen."""
    parts: dict[str, str] = {}
    waiting, done = list(packages), set[str]()
    while waiting:
        name = waiting.pop()
        if name.lower() in done:
            continue
        done.add(name.lower())
        if name.lower() == "agentrl":  # it holds the tasks and their rewards
            _check_not_wanted(name, packages)
            continue
        found = _distribution(name, wanted=name in packages)
        if found is not None:
            waiting += _requirements(found)
            parts |= _files_of(found)
    return sorted((outside, f"{PACKAGES}/{name}") for name, outside in parts.items())


def _check_not_wanted(name: str, packages: Sequence[str]) -> None:
    if name in packages:
        raise UserError(f"the Python tool shows no model `{name}` itself; take it out of `packages`.")


def _distribution(name: str, *, wanted: bool) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        if wanted:
            raise UserError(
                f"the Python tool is to offer the package `{name}`, which is not installed; install "
                "it, or take it out of `packages`."
            ) from None
        return None


def _requirements(found: Distribution) -> list[str]:
    """Names of what it needs; what an extra needs is left out."""
    needed = [line for line in found.requires or [] if not _EXTRA.search(line)]
    return ["".join(c if c.isalnum() or c in "-_." else " " for c in line).split()[0] for line in needed]


def _files_of(found: Distribution) -> dict[str, str]:
    """What to show of a distribution: path below the folder of packages -> path outside.

    Raises:
        UserError: it does not say which files are its own.
    """
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if found.files is None or origin.get("dir_info", {}).get("editable"):
        name = found.metadata["Name"]
        raise UserError(
            f"the Python tool cannot tell which files belong to the package `{name}`; install it as a "
            "wheel, not in place (`pip install --force-reinstall --no-deps` without -e)."
        )
    # Programs and data may lie anywhere on this machine; what is imported lies below.
    own = [path.parts for path in found.files if not path.is_absolute() and ".." not in path.parts]
    own = [parts for parts in own if "__pycache__" not in parts and not parts[-1].endswith(".pth")]
    shown = {place: os.path.realpath(str(found.locate_file(place))) for place in _shown(found, "", own)}
    return {place: path for place, path in shown.items() if os.path.exists(path)}


def _shown(found: Distribution, folder: str, files: Iterable[Sequence[str]]) -> Iterable[str]:
    """Files and whole folders of a distribution; folders that others have files in too are entered."""
    inside: dict[str, list[Sequence[str]]] = {}
    for parts in files:
        inside.setdefault(parts[0], []).append(parts[1:])
    for name, below in inside.items():
        place = f"{folder}{name}"
        names = {parts[0] for parts in below if parts}
        if names and not _is_whole(str(found.locate_file(place)), names):
            yield from _shown(found, f"{place}/", below)
        else:
            yield place


def _is_whole(folder: str, names: set[str]) -> bool:
    """Whether a folder is one distribution's: a package of its own, or nothing else is in it."""
    if any(name.startswith("__init__.") for name in names) or not os.path.isdir(folder):
        return True
    return set(os.listdir(folder)) - {"__pycache__"} <= names

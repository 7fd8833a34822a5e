"""What of this machine the sandbox sees: the Python installation, chosen packages, the C library."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from agentrl.errors import UserError
from agentrl.tools.python.inside.plan import Plan

PACKAGES = "/packages"
FLAGS = ("-s", "-P", "-S")
"""No folder of the user, of the start or of packages. Not -I, which would draw a new hash seed each time."""
_EARLY = """
base64 bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math
operator random re statistics string textwrap time typing
"""
_SYSTEM = ("libc.", "libc-", "libm.", "libm-", "ld-", "libpthread", "libdl", "libpython")
_SYSTEM_LINKS = ("/lib", "/lib64", "/usr/lib64")


def interpreter() -> str:
    """The interpreter itself, past all virtual environments."""
    return os.path.realpath(str(getattr(sys, "_base_executable", sys.executable)))


def plan(packages: Sequence[str], preload: Sequence[str]) -> Plan:
    """What a sandbox with these packages is made of.

    packages: distributions, by their names on an index; what they require comes along.
    preload: modules that are imported early, beside common ones of the standard library.

    Raises:
        UserError: a package is not installed.
    """
    standard = sysconfig.get_path("stdlib")
    whole = [*_libraries(), standard, *_apart_from(standard), interpreter()]
    return Plan(
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
        found = _distribution(name, wanted=name in packages)
        if found is not None:
            waiting += _requirements(found)
            parts |= _top_level(found)
    return sorted((outside, f"{PACKAGES}/{name}") for name, outside in parts.items())


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
    needed = [line for line in found.requires or [] if "extra ==" not in line]
    return ["".join(c if c.isalnum() or c in "-_." else " " for c in line).split()[0] for line in needed]


def _top_level(found: Distribution) -> dict[str, str]:
    names = {path.parts[0] for path in found.files or [] if path.parts[0] not in ("..", "__pycache__")}
    paths = {
        name: os.path.realpath(str(found.locate_file(name))) for name in names if not name.endswith(".pth")
    }
    return {name: path for name, path in paths.items() if os.path.exists(path)}

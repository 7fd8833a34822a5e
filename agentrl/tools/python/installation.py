"""The host files that the sandbox mounts: the Python installation, chosen packages, the C library."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from agentrl.errors import UserError
from agentrl.tools.python.inside.wire import SandboxPlan

PACKAGES = "/packages"
PROGRAMS = "/usr/bin"
"""The folder of programs: inside that of the mounted ones; outside, with /bin, where they are looked up."""
FLAGS = ("-s", "-P", "-S")
"""No user site, working directory or site-packages. Not -I: it ignores PYTHONHASHSEED
and would draw a new hash seed each time."""
_PRELOAD = """
base64 bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math
operator random re statistics string textwrap time typing
"""
_SYSTEM = ("libc.", "libc-", "libm.", "libm-", "ld-", "libpthread", "libdl", "libpython")
_EXTRA = re.compile(r";.*\bextra\b")
_SYSTEM_LINKS = ("/lib", "/lib64", "/usr/lib64")


def interpreter() -> str:
    """The interpreter itself, past all virtual environments."""
    return os.path.realpath(str(getattr(sys, "_base_executable", sys.executable)))


def plan(
    packages: Sequence[str],
    preload: Sequence[str],
    programs: Sequence[str] = (),
    mounts: Sequence[tuple[str, str]] = (),
    links: Sequence[tuple[str, str]] = (),
) -> SandboxPlan:
    """The plan of a sandbox with these packages and programs.

    packages: distributions, by their names on an index; their requirements are included.
    preload: modules that are imported early, in addition to common ones of the standard library.
    programs: names of files in /usr/bin or /bin; each is mounted by itself, in /usr/bin.
    mounts: more files and folders, read-only: (path outside, path inside).
    links: (path inside, its target), made where nothing else is.

    Raises:
        UserError: a package or a program is not installed.
    """
    standard = sysconfig.get_path("stdlib")
    paths = [*_libraries(), standard, *_compiled_modules(standard), interpreter()]
    own_links = [(link, os.readlink(link)) for link in _SYSTEM_LINKS if os.path.islink(link)] + _loaders()
    return SandboxPlan(
        mounts=[
            *((path, path) for path in paths),
            *_parts_of(packages),
            *_mounted_programs(programs),
            *mounts,
        ],
        hidden=[f"{standard}/{name}" for name in ("site-packages", "dist-packages")],
        links=[*own_links, *(_program_links() if programs else []), *links],
        packages=PACKAGES,
        preload=[*_PRELOAD.split(), *preload],
        environment=environment(PACKAGES),
    )


def environment(packages: str) -> dict[str, str]:
    """All environment variables of the code."""
    return {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # A module that is written again within a second, at the same length, would be the compiled old one.
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": os.pathsep.join(dict.fromkeys((os.path.dirname(interpreter()), PROGRAMS))),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": packages,
        "TZ": "UTC",
    }


def program_path(name: str) -> str | None:
    """The file of a program, symbolic links resolved; None where /usr/bin and /bin have none of that name."""
    path = shutil.which(name, path=f"{PROGRAMS}{os.pathsep}/bin") if os.path.basename(name) == name else None
    return None if path is None else os.path.realpath(path)


def _mounted_programs(names: Sequence[str]) -> list[tuple[str, str]]:
    """The files of programs: (path outside, path inside)."""
    mounts = []
    for name in names:
        path = program_path(name)
        if path is None:
            raise UserError(
                f"the sandbox is to offer the program `{name}`, which /usr/bin does not have; install it, or "
                "take it out of `programs`."
            )
        mounts.append((path, f"{PROGRAMS}/{name}"))
    return mounts


def _program_links() -> list[tuple[str, str]]:
    """The usual names of programs: those of the interpreter, and /bin."""
    names = [name for name in (f"{PROGRAMS}/python3", f"{PROGRAMS}/python") if name != interpreter()]
    return [("/bin", "usr/bin"), *((name, interpreter()) for name in names)]


def _compiled_modules(standard: str) -> list[str]:
    """The folder of the standard library's compiled modules, where it is outside of the library."""
    compiled = sysconfig.get_config_var("DESTSHARED")
    return [str(compiled)] if compiled and not Path(compiled).is_relative_to(standard) else []


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    """The folders of the C library and of the libraries that the standard library is linked to."""
    paths = {os.path.realpath(path) for path in _mapped() if _is_system(path)}
    # The folder of libpython may hold many other files.
    return tuple(sorted({path if "libpython" in path else os.path.dirname(path) for path in paths}))


def _mapped() -> Iterable[str]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")
        if path[1]:
            yield f"/{path[2]}"


def _is_system(path: str) -> bool:
    return os.path.basename(path).startswith(_SYSTEM) and ".so" in path


def _loaders() -> list[tuple[str, str]]:
    """The dynamic loader, at the path that is written into every program."""
    loaders = [path for folder in ("/lib64", "/lib") for path in Path(folder).glob("ld-linux*.so*")]
    return [
        (f"{os.path.realpath(path.parent)}/{path.name}", os.path.realpath(path))
        for path in loaders
        if path.is_symlink()
    ]


def _parts_of(packages: Sequence[str]) -> list[tuple[str, str]]:
    """The files and folders of packages and of all their requirements: (path outside, path inside)."""
    parts: dict[str, str] = {}
    waiting, done = list(packages), set[str]()
    while waiting:
        name = waiting.pop()
        if name.lower() in done:
            continue
        done.add(name.lower())
        if name.lower() == "agentrl":  # it holds the tasks and their rewards
            _check_not_requested(name, packages)
            continue
        package = _distribution(name, is_requested=name in packages)
        if package is not None:
            waiting += _requirements(package)
            parts |= _files_of(package)
    return sorted((outside, f"{PACKAGES}/{name}") for name, outside in parts.items())


def _check_not_requested(name: str, packages: Sequence[str]) -> None:
    if name in packages:
        raise UserError(f"the Python tool shows no model `{name}` itself; take it out of `packages`.")


def _distribution(name: str, *, is_requested: bool) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        if is_requested:
            raise UserError(
                f"the Python tool is to offer the package `{name}`, which is not installed; install "
                "it, or take it out of `packages`."
            ) from None
        return None


def _requirements(package: Distribution) -> list[str]:
    """The names of its requirements, those of extras excluded."""
    needed = [line for line in package.requires or [] if not _EXTRA.search(line)]
    return ["".join(c if c.isalnum() or c in "-_." else " " for c in line).split()[0] for line in needed]


def _files_of(package: Distribution) -> dict[str, str]:
    """The files of a distribution to mount: path below the folder of packages -> path outside.

    Raises:
        UserError: it has no list of its files.
    """
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    if package.files is None or origin.get("dir_info", {}).get("editable"):
        name = package.metadata["Name"]
        raise UserError(
            f"the Python tool cannot tell which files belong to the package `{name}`; install it as a "
            "wheel, not in place (`pip install --force-reinstall --no-deps` without -e)."
        )
    # Programs and data may be anywhere on this machine; importable files are below the packages folder.
    own = [path.parts for path in package.files if not path.is_absolute() and ".." not in path.parts]
    own = [parts for parts in own if "__pycache__" not in parts and not parts[-1].endswith(".pth")]
    paths = {name: os.path.realpath(str(package.locate_file(name))) for name in _mounts_of(package, "", own)}
    return {name: path for name, path in paths.items() if os.path.exists(path)}


def _mounts_of(package: Distribution, folder: str, files: Iterable[Sequence[str]]) -> Iterable[str]:
    """Files and folders of a distribution; of a folder that it shares with others, its parts."""
    inside: dict[str, list[Sequence[str]]] = {}
    for parts in files:
        inside.setdefault(parts[0], []).append(parts[1:])
    for name, below in inside.items():
        path = f"{folder}{name}"
        names = {parts[0] for parts in below if parts}
        if names and not _is_exclusive(str(package.locate_file(path)), names):
            yield from _mounts_of(package, f"{path}/", below)
        else:
            yield path


def _is_exclusive(folder: str, names: set[str]) -> bool:
    """Whether a folder belongs to one distribution: it is a package, or holds no other file."""
    if any(name.startswith("__init__.") for name in names) or not os.path.isdir(folder):
        return True
    return set(os.listdir(folder)) - {"__pycache__"} <= names

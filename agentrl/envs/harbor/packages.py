"""What tasks ask of package managers: programs of this machine, its packages of Python, local wheels."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import stat
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from agentrl.errors import DataError, RecordError
from agentrl.runtime.files import private_folder
from agentrl.runtime.ownership import check_own, open_file
from agentrl.tools.python.installation import program_path

SYSTEM_PACKAGES: Mapping[str, Sequence[str]] = {
    **{name: (name,) for name in ("bash", "bc", "bzip2", "gawk", "git", "grep", "gzip", "jq", "perl")},
    **{name: (name,) for name in ("sed", "sqlite3", "tar", "tree", "unzip", "xxd", "zip")},
    "xz-utils": ("xz",),
    "mawk": ("mawk",),
    **dict.fromkeys(("coreutils", "findutils", "diffutils", "python3", "python3-pip", "python3-venv"), ()),
    # They fetch what is not to be fetched, or serve the terminal that Harbor's own agents use.
    **dict.fromkeys(("asciinema", "ca-certificates", "curl", "locales", "tmux", "tzdata", "wget"), ()),
}
"""By system package: the programs that the sandbox has to show for it."""
WHEELS = "/wheels"
_MOST_WHEEL_BYTES = 512 << 20
_MOST_WHEEL_FILES = 20_000
_MOST_WHEELS = 100
_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[\w,.-]*\])?(?:==([\w.!+-]+))?")
_NEEDED = re.compile(r"Requires-Dist:\s*([A-Za-z0-9][\w.-]*)[^;\n]*(;[^\n]*)?")


class Requirement(NamedTuple):
    """A package, and the version that it has to have; "" = any."""

    name: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.name}=={self.version}" if self.version else self.name


def requirement(text: str) -> Requirement | None:
    """`name` or `name==version`, extras left out; None = it is of another form."""
    match = _REQUIREMENT.fullmatch(text.strip("\"'"))
    return None if match is None else Requirement(_normal(match[1]), match[2] or "")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Found(NamedTuple):
    """Where packages are. installed: distributions of this installation. wheels: files of the mirror."""

    installed: frozenset[str] = frozenset()
    wheels: frozenset[Path] = frozenset()


@dataclass(frozen=True)
class Sources:
    """Where packages may come from: this installation, and a folder of wheels."""

    mirror: str | None = None

    def find(self, wanted: Requirement) -> Found | None:
        """A package and all that it needs; None = there is none of that version.

        Raises:
            DataError: the mirror cannot be read.
        """
        wheels = self._wheels()
        if wheel := _matching(wheels, wanted):
            return _with_needs(wheel, wheels)
        try:
            has = version(wanted.name)
        except PackageNotFoundError:
            return None
        return Found(frozenset({wanted.name})) if wanted.version in ("", has) else None

    def _wheels(self) -> Sequence[Path]:
        if self.mirror is None:
            return ()
        folder = Path(self.mirror).expanduser()
        if not folder.is_dir():
            raise DataError(
                f"the mirror {self.mirror} is no folder; name one of wheels, as `pip download` makes it."
            )
        check_own(folder, remedy="copy the wheels, and name the copy")
        return sorted(folder.glob("*.whl"))


def _matching(wheels: Sequence[Path], wanted: Requirement) -> Path | None:
    """The wheel of a package that runs here."""
    for path in reversed(wheels):
        parts = path.name.removesuffix(".whl").split("-")
        if len(parts) < 5 or _normal(parts[0]) != wanted.name or wanted.version not in ("", parts[1]):
            continue
        python, abi, place = (part.split(".") for part in parts[-3:])
        ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
        fits_python = "py3" in python or ours in python or "abi3" in abi
        machine = platform.machine()
        fits_place = any(tag == "any" or ("linux" in tag and tag.endswith(machine)) for tag in place)
        if fits_python and fits_place:
            return path
    return None


def _with_needs(wheel: Path, wheels: Sequence[Path]) -> Found:
    """A wheel with those that it needs; a need with a condition is left out where nothing has it."""
    installed, chosen, waiting = set[str](), set[Path](), [wheel]
    while waiting:
        path = waiting.pop()
        if path in chosen:
            continue
        chosen.add(path)
        for name, condition in _needs(path):
            if "extra" in condition:
                continue
            further = _matching(wheels, Requirement(_normal(name)))
            if further is not None:
                waiting.append(further)
            elif not condition:
                installed.add(_normal(name))
    return Found(frozenset(name for name in installed if _is_installed(name)), frozenset(chosen))


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _needs(wheel: Path) -> list[tuple[str, str]]:
    try:
        with open_file(wheel) as file, zipfile.ZipFile(file) as packed:
            name = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
            with packed.open(name) as metadata:
                head = metadata.read(1 << 20).decode("utf-8", "replace").partition("\n\n")[0]
    except (OSError, RecordError, zipfile.BadZipFile, StopIteration, RuntimeError) as error:
        raise DataError(f"{wheel} is no wheel that can be read: {error}.") from None
    return _NEEDED.findall(head)


def unpacked(wheel: Path) -> Path:
    """The folder of a wheel's files, which is made once for each of its contents.

    Raises:
        DataError: it is damaged, too large, names a file outside, or there is no folder for it.
    """
    kept = private_folder("XDG_CACHE_HOME", ".cache", "wheels")
    if kept is None:
        raise DataError("there is no folder for unpacked wheels; set XDG_CACHE_HOME to one that is yours.")
    try:
        with open_file(wheel) as file:
            folder = kept / hashlib.file_digest(file, "sha256").hexdigest()
            if not folder.is_dir():
                _unpack(zipfile.ZipFile(file), wheel, folder)
    except (OSError, RecordError, zipfile.BadZipFile, RuntimeError, EOFError) as error:
        raise DataError(f"{wheel} is no wheel that can be unpacked: {error}.") from None
    return folder


def _unpack(packed: zipfile.ZipFile, wheel: Path, folder: Path) -> None:
    entries = [entry for entry in packed.infolist() if not entry.is_dir()]
    size = sum(entry.file_size for entry in entries)
    if size > _MOST_WHEEL_BYTES or len(entries) > _MOST_WHEEL_FILES:
        raise DataError(f"{wheel} unpacks to {size:,} bytes in {len(entries):,} files, which is too much.")
    for entry in entries:
        parts = entry.filename.split("/")
        is_outside = entry.filename.startswith("/") or ".." in parts or "\\" in entry.filename
        if is_outside or stat.S_ISLNK(entry.external_attr >> 16):
            raise DataError(f"{wheel} names a file outside of itself: {entry.filename!r}.")
    coming = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    for entry in entries:
        # What a wheel puts beside its packages, such as programs, has no place here.
        place = coming / entry.filename
        place.parent.mkdir(parents=True, exist_ok=True)
        with packed.open(entry) as source, open(place, "xb") as target:
            target.write(source.read(entry.file_size + 1))
    for place in (coming, *coming.rglob("*")):
        # Where this is root, the sandbox's user is another one; the folder above is closed to all others.
        place.chmod(0o755 if place.is_dir() else 0o644)
    try:
        os.rename(coming, folder)
    except OSError:
        if not folder.is_dir():  # another process may have been first
            raise


def programs_of(package: str) -> Sequence[str] | None:
    """The programs that stand for a system package; None = it is none of those, or one is missing here."""
    programs = SYSTEM_PACKAGES.get(package.partition("=")[0])
    if programs is None or any(program_path(program) is None for program in programs):
        return None
    return programs

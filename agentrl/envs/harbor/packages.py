"""What tasks ask of package managers: programs of this machine, its packages of Python, local wheels."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, sys_tags
from packaging.utils import BuildTag, InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

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
_MOST_METADATA_BYTES = 1 << 20
_DAMAGED = (OSError, RecordError, zipfile.BadZipFile, RuntimeError, EOFError)


def requirement(text: str) -> Requirement | None:
    """A package and its versions, as pip takes them; None = it is of another form, such as an address."""
    try:
        wanted = Requirement(text.strip("\"'"))
    except InvalidRequirement:
        return None
    return None if wanted.url else wanted


class Found(NamedTuple):
    """Where packages are. installed: distributions of this installation. wheels: files of the mirror."""

    installed: frozenset[str] = frozenset()
    wheels: frozenset[Path] = frozenset()


class _Wheel(NamedTuple):
    """A wheel that runs here; a greater one is to be preferred. rank: see `_ranks`."""

    name: str
    version: Version
    rank: int
    build: BuildTag
    path: Path


@dataclass(frozen=True)
class Sources:
    """Where packages may come from: this installation, and a folder of wheels."""

    mirror: str | None = None

    def find(self, wanted: Requirement) -> Found | Requirement:
        """A package and all that it needs, each in the newest version that fits, chosen once; or the first of
        them that is neither here nor in the mirror.

        Raises:
            DataError: the mirror cannot be read.
        """
        wheels = self._wheels()
        installed, chosen, waiting = set[str](), dict[str, _Wheel](), [wanted]
        while waiting:
            need = waiting.pop()
            name = canonicalize_name(need.name)
            if name in chosen:
                if not need.specifier.contains(chosen[name].version, prereleases=True):
                    return need
            elif (wheel := _best(need, wheels)) is not None:
                chosen[name] = wheel
                waiting += _needs(wheel.path, need.extras)
            elif _is_installed(need):
                installed.add(name)
            else:
                return need
        return Found(frozenset(installed), frozenset(wheel.path for wheel in chosen.values()))

    def _wheels(self) -> Sequence[_Wheel]:
        if self.mirror is None:
            return ()
        folder = Path(self.mirror).expanduser()
        if not folder.is_dir():
            raise DataError(
                f"the mirror {self.mirror} is no folder; name one of wheels, as `pip download` makes it."
            )
        check_own(folder, remedy="copy the wheels, and name the copy")
        return [wheel for path in sorted(folder.glob("*.whl")) if (wheel := _wheel(path)) is not None]


@cache
def _ranks() -> Mapping[Tag, int]:
    """The tags of wheels that run here; one of a higher number is closer to this interpreter."""
    return {tag: -place for place, tag in enumerate(sys_tags())}


def _wheel(path: Path) -> _Wheel | None:
    """A file as a wheel; None = it does not run here, or is named otherwise."""
    try:
        name, version, build, tags = parse_wheel_filename(path.name)
    except (InvalidWheelFilename, InvalidVersion):
        return None
    ranks = [_ranks()[tag] for tag in tags if tag in _ranks()]
    return _Wheel(name, version, max(ranks), build, path) if ranks else None


def _best(need: Requirement, wheels: Sequence[_Wheel]) -> _Wheel | None:
    """The newest wheel of a package that fits; of its version, the one closest to this interpreter."""
    named = [wheel for wheel in wheels if wheel.name == canonicalize_name(need.name)]
    fitting = set(need.specifier.filter(wheel.version for wheel in named))
    return max((wheel for wheel in named if wheel.version in fitting), default=None)


def _is_installed(need: Requirement) -> bool:
    try:
        return need.specifier.contains(version(need.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _needs(wheel: Path, extras: Collection[str]) -> list[Requirement]:
    """What a wheel needs here, with some of its extras."""
    try:
        with open_file(wheel) as file, zipfile.ZipFile(file) as packed:
            name = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
            with packed.open(name) as metadata:
                head, _ = parse_email(metadata.read(_MOST_METADATA_BYTES))
        needs = [Requirement(line) for line in head.get("requires_dist", ())]
    except (*_DAMAGED, InvalidRequirement, StopIteration) as error:
        raise DataError(f"{wheel} is no wheel that can be read: {error}.") from None
    wanted = [{"extra": extra} for extra in ("", *extras)]
    return [need for need in needs if need.marker is None or any(map(need.marker.evaluate, wanted))]


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
    except _DAMAGED as error:
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

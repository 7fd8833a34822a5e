"""A folder of OpenEnv: its manifest, its Dockerfile and its files, and the static checks that they decide.

Of other folders nothing is followed, run or imported, and every file is bounded.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.envs.check.package.dockerfile import OF_DOCKERFILE, Decided, of_dockerfile
from agentrl.envs.check.package.manifest import Manifest
from agentrl.envs.check.rfc008 import Facts
from agentrl.errors import ConfigError, RecordError
from agentrl.runtime.extras import require
from agentrl.runtime.ownership import read_file
from agentrl.types import JSON

MANIFEST = "openenv.yaml"
_DOCKERFILES = ("Dockerfile", "server/Dockerfile")
_APP = "server/app.py"
_MOST_DEEP = 32
_MOST_BYTES, _MOST_IN_ALL, _MOST_FILES = 1 << 20, 1 << 30, 10_000
"""Bytes of a file that is read as text, and of all files; files and folders (count)."""
_IGNORED = {".git", "__pycache__", ".venv", ".worktrees", "outputs"}
"""Folders that OpenEnv's digest leaves out, too."""
_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2", ".tar.zst", ".zip", ".7z", ".rar")


@dataclass(frozen=True, slots=True)
class PackageFolder:
    """What a folder says of itself.

    manifest: None = its openenv.yaml is none, as the check `static.manifest` says. digest: SHA-256 (hex) of
    its files. decided: the outcomes of static checks by id.
    played: the environment of agentrl that its server serves, and its arguments; None = another's.
    """

    path: Path
    manifest: Manifest | None
    digest: str
    decided: Mapping[str, Decided]
    played: tuple[str, Mapping[str, JSON]] | None = None

    def misdeclared(self, declared: Facts, figures: Mapping[str, float]) -> Mapping[str, str]:
        """As `Manifest.misdeclared`; without a manifest nothing is declared."""
        return {} if self.manifest is None else self.manifest.misdeclared(declared, figures)


def read_package(folder: Path) -> PackageFolder:
    """Read a folder, and decide its static checks.

    Raises:
        ConfigError: it has no openenv.yaml, or a file that is a link, or more of them than a package has.
        MissingExtraError: YAML's parser is not installed.
    """
    require("a check of a folder", "yaml")
    if not (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{folder} has no {MANIFEST}; name an environment, or a folder of `agentrl envs export "
            "--format openenv`."
        )
    files = sorted(_files(folder))
    manifest, of_manifest = _manifest(folder)
    none = Decided(None, "the folder has no Dockerfile")
    decided = {
        "static.reproducible_build": Decided(None, "it takes two builds, and no image is built here"),
        "static.sbom": Decided(None, "it lists what an image has, and no image is built here"),
        **dict.fromkeys(OF_DOCKERFILE, none),
        "static.manifest": Decided(of_manifest, "openenv.yaml has OpenEnv's schema, within its policy"),
        "static.layout": Decided(tuple(_archives(files)), "no file of the folder is an archive"),
    }
    if manifest is not None:
        decided["static.resource_declaration"] = Decided((), "openenv.yaml declares CPUs, memory and disk")
        decided["static.timeout_ceiling"] = Decided(
            tuple(manifest.late()), "openenv.yaml declares a deadline that is allowed"
        )
    named = None if manifest is None or manifest.execution is None else manifest.execution.dockerfile
    docker = next((name for name in (named, *_DOCKERFILES) if name is not None and name in files), None)
    if docker is not None:
        requirements = {name: _text(folder, name) for name in files if name.endswith(".txt")}
        decided |= of_dockerfile(_text(folder, docker), requirements)
    return PackageFolder(folder, manifest, _digest(folder, files), decided, _played(folder, files))


def _files(folder: Path) -> Iterator[str]:
    """The paths of all files below a folder."""
    count = size = 0
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _IGNORED]
        for name in (*folders, *names):
            path = Path(root, name)
            count += 1
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ConfigError(
                    f"{path} is a link or no file; OpenEnv takes plain files alone, so remove it."
                )
            if count > _MOST_FILES:
                raise ConfigError(
                    f"{folder} has more than {_MOST_FILES:,} files; name the folder of a package."
                )
            if path.is_file():
                size += path.stat().st_size
                yield path.relative_to(folder).as_posix()
            if size > _MOST_IN_ALL:
                raise ConfigError(
                    f"{folder} has more than {_MOST_IN_ALL >> 30} GiB; name the folder of a package."
                )


def _text(folder: Path, name: str) -> str:
    try:
        return read_file(folder / name, below=folder, most=_MOST_BYTES).decode()
    except (OSError, RecordError, UnicodeError) as error:
        raise ConfigError(f"{folder / name} cannot be read ({error}); restore that file.") from None


def _digest(folder: Path, files: Sequence[str]) -> str:
    """As OpenEnv's: of the paths and the contents, in their order."""
    digest = hashlib.sha256()
    for name in files:
        digest.update(os.fsencode(name) + b"\0")
        try:
            with (folder / name).open("rb") as file:
                while part := file.read(_MOST_BYTES):
                    digest.update(part)
        except OSError as error:
            raise ConfigError(
                f"{folder / name} cannot be read ({error.strerror}); restore that file."
            ) from None
        digest.update(b"\0")
    return digest.hexdigest()


def _manifest(folder: Path) -> tuple[Manifest | None, tuple[str, ...]]:
    """The manifest, and what is wrong with it."""
    import yaml

    text = _text(folder, MANIFEST)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _MOST_DEEP:
                raise ValueError("openenv.yaml has an alias (*), or is nested too deep; write plain values.")
        manifest = Manifest.of(yaml.safe_load(text))
    except yaml.YAMLError as error:
        return None, (f"openenv.yaml is no YAML: {' '.join(str(error).split())}.",)
    except (ValueError, RecursionError) as error:
        return None, tuple(str(error).splitlines())
    return manifest, tuple(manifest.out_of_bounds())


def _archives(files: Sequence[str]) -> Iterator[str]:
    for name in files:
        if name.lower().endswith(_ARCHIVES):
            yield f"{name} is an archive, which every layer holds whole; unpack it."


def _played(folder: Path, files: Sequence[str]) -> tuple[str, Mapping[str, JSON]] | None:
    """What an application of `agentrl envs export` serves: its source is read, and not run."""
    if _APP not in files:
        return None
    try:
        module = ast.parse(_text(folder, _APP))
        values = {
            target.id: node.value
            for node in module.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        served = values.get("app")
        if not (isinstance(served, ast.Call) and isinstance(served.func, ast.Name) and len(served.args) == 2):
            return None
        env_id, kwargs = (
            values.get(each.id, each) if isinstance(each, ast.Name) else each for each in served.args
        )
        found = ast.literal_eval(env_id), ast.literal_eval(kwargs)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    is_ours = served.func.id == "application" and isinstance(found[0], str) and isinstance(found[1], dict)
    return found if is_ours else None

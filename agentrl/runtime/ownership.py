"""Whose files these are: no link of others is followed, nothing is written into a folder of theirs, and no
file of theirs says what is started.

A run's folder may come from anybody: a colleague's, a download, a folder in /tmp that was there first.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import hmac
import os
import pwd
import secrets
import stat
import tempfile
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError, RecordError
from agentrl.runtime.files import private_folder, write_text

MAX_BYTES: Final = 64 << 20
"""Of a file that is read as a whole, such as state.json (bytes)."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_WANDB: Final = "wandb"
_RAY_LOGS: Final = "ray/logs"
"""Both hold links that other programs made. The second may be one, which is removed before Ray starts."""
_KEY_BYTES: Final = 32
_SIGNED: Final = "# Signed by the user who began this, for `--resume FOLDER`: "


def open_file(path: Path, *, below: Path | None = None) -> BufferedReader:
    """Open a regular file for reading; no link is followed, and nothing is waited for.

    below: a folder above it, below which no folder may be a link, either; None = the file's own. It may be a
    link itself.

    Raises:
        OSError: there is no such file, or it is not to be read.
        RecordError: it is a link, a folder, a pipe or a device.
    """
    top = path.parent if below is None else below
    *folders, name = path.relative_to(top).parts
    flags = os.O_RDONLY | os.O_CLOEXEC
    place = os.open(top, flags | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, flags | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise RecordError(f"{path} is a link, or in a folder that is one") from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise RecordError(f"{path} is no file")
    return os.fdopen(file, "rb")


def read_file(path: Path, *, below: Path | None = None, most: int = MAX_BYTES) -> bytes:
    """The contents of a file, opened as by `open_file`. most: the size that it may have (bytes).

    Raises:
        OSError, RecordError: see `open_file`; or it is larger.
    """
    with open_file(path, below=below) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise RecordError(f"{path} has more than {most:,} bytes")
    return data


def read_gzip(path: Path, *, below: Path | None = None, most: int) -> bytes:
    """The contents of a gzip file, opened as by `open_file`. most: that they may have (bytes).

    Raises:
        OSError, RecordError: see `open_file`; or it is damaged, or unpacks to more.
    """
    try:
        with open_file(path, below=below) as packed, gzip.open(packed) as file:
            data = file.read(most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    if len(data) > most:
        raise RecordError(f"{path} unpacks to more than {most:,} bytes")
    return data


def check_own(
    folder: Path, *, inside: bool = True, remedy: str = "copy the folder, and use the copy"
) -> None:
    """Check that a folder and all that is in it are this user's, that no other user can write there, and that
    no link in it leads out. Then nobody else can put a link there later.

    folder: may be missing, or be a link. inside: what is in it is checked, too. remedy: the end of the
    sentence about another user's folder.

    Raises:
        ConfigError: something is not so.
    """
    if not folder.is_dir():
        return
    made = _made(folder)
    keeps_modes = not made.st_mode & _OTHERS
    for path in _all_of(folder) if inside else (folder,):
        try:
            facts = path.stat() if path == folder else path.lstat()
        except FileNotFoundError:
            continue
        if facts.st_uid != made.st_uid:
            raise ConfigError(f"{path} belongs to {_name_of(facts.st_uid)}, another user; {remedy}.")
        if stat.S_ISLNK(facts.st_mode):
            if not _leads_below(path, folder):
                raise ConfigError(
                    f"{path} is a link that leads out of {folder}, to {os.readlink(path)}; remove it, or put "
                    "what it leads to in its place."
                )
        elif not (stat.S_ISDIR(facts.st_mode) or stat.S_ISREG(facts.st_mode)):
            raise ConfigError(f"{path} is neither a file nor a folder; remove it.")
        elif keeps_modes and facts.st_mode & stat.S_IWOTH:
            raise ConfigError(f"all users can write to {path}; run `chmod -R o-w {folder}`.")


def _made(folder: Path) -> os.stat_result:
    """What a file looks like that this process makes there: a server may give it another owner, and a file
    system may have no modes."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno())
    except OSError:
        # On a full disk, and in a folder that is not to be written.
        return os.stat_result((stat.S_IFREG, 0, 0, 1, os.geteuid(), os.getegid(), 0, 0, 0, 0))


def _all_of(folder: Path) -> Iterator[Path]:
    """The folder and everything below it, without following links."""
    yield folder
    for place, folders, files in os.walk(folder):
        paths = {name: os.path.join(place, name) for name in (*folders, *files)}
        below = {name: os.path.relpath(path, folder) for name, path in paths.items()}
        yield from (Path(path) for name, path in paths.items() if below[name] != _RAY_LOGS)
        folders[:] = [name for name in folders if below[name] not in (_WANDB, _RAY_LOGS)]


def _leads_below(link: Path, folder: Path) -> bool:
    return Path(os.path.realpath(link)).is_relative_to(os.path.realpath(folder))


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def write_signed(path: Path, text: str) -> None:
    """Write a text file whole, with a signature that only this user can make; see `is_signed`.

    Raises:
        OSError: the disk does not take it.
    """
    key = _key()
    line = "" if key is None else f"{_SIGNED}{_signature(key, text.encode())}\n"
    write_text(path, f"{line}{text}")


def is_signed(data: bytes) -> bool:
    """Whether these are the contents of a file as `write_signed` wrote them for this user."""
    head, _, text = data.partition(b"\n")
    key = _key()
    if key is None or not head.startswith(_SIGNED.encode()):
        return False
    return hmac.compare_digest(head.removeprefix(_SIGNED.encode()), _signature(key, text).encode())


def sign(path: Path) -> None:
    """Sign a file that this user trusts as it is.

    Raises:
        OSError: it cannot be read or written.
        ConfigError: this user has no folder for the key.
    """
    if _key() is None:
        raise ConfigError("there is no folder for this user's key; set XDG_STATE_HOME to one that is yours.")
    data = read_file(path)
    head, newline, rest = data.partition(b"\n")
    text = rest if newline and head.startswith(_SIGNED.encode()) else data
    write_signed(path, text.decode())


def _signature(key: bytes, text: bytes) -> str:
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def _key() -> bytes | None:
    """This user's secret, which is made when it is first needed; None = there is no place for it."""
    folder = private_folder("XDG_STATE_HOME", ".local/state", "keys")
    if folder is None:
        return None
    path = folder / "runs"
    try:
        key = read_file(path)
        if len(key) == _KEY_BYTES:
            return key
    except FileNotFoundError:
        pass
    except OSError:
        return None
    return _new_key(path)


def _new_key(path: Path) -> bytes | None:
    """Of processes that make one at the same time, the first decides."""
    coming = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(coming, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(coming, path)
        except FileExistsError:
            pass
        finally:
            coming.unlink()
        return read_file(path)
    except OSError:
        return None

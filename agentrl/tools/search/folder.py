"""Saved indexes: a folder is complete or absent, and its manifest lists its contents."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UserError
from agentrl.runtime.files import check_fetched
from agentrl.tools.search.corpus import Corpus

FORMAT = 1
"""Increases with every change of the files that is not compatible in both directions."""
MANIFEST = "agentrl-index.json"
_BUILD_AGAIN = "build it again with `agentrl serve-search CORPUS.jsonl --save FOLDER`"


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete index on disk. kinds: `bm25`, `dense` or both."""

    folder: Path
    kinds: tuple[str, ...]

    @classmethod
    def at(cls, folder: str | Path) -> Saved:
        """Check that a folder holds all files of its manifest, in their full lengths.

        Raises:
            UserError: it holds no index, a broken one, or one of another format.
        """
        folder = Path(folder)
        check_fetched([folder / MANIFEST], UserError)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"{folder} holds no saved index; {_BUILD_AGAIN}.") from None
        match manifest:
            case {"format": int(version)} if version != FORMAT:
                raise UserError(f"The index in {folder} has format {version}, not {FORMAT}; {_BUILD_AGAIN}.")
            case {"format": int(), "kinds": list(kinds), "files": dict(files)}:
                check_fetched((folder / name for name in files), UserError)
                if _sizes(folder, list(files)) == files:
                    return cls(folder, tuple(map(str, kinds)))
        raise UserError(f"The index in {folder} is incomplete; {_BUILD_AGAIN}.")

    @contextmanager
    def reading(self, kind: str) -> Iterator[Path]:
        """The folder, to read an index of a kind from.

        Raises:
            UserError: there is none of that kind, or its files are broken.
        """
        if kind not in self.kinds:
            kinds = " and ".join(self.kinds)
            raise UserError(f"{self.folder} holds a {kinds} index, not {kind}; {_BUILD_AGAIN}.")
        try:
            yield self.folder
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError) as error:
            raise UserError(
                f"The index in {self.folder} is incomplete or broken ({error}); {_BUILD_AGAIN}."
            ) from error


def check_free(folder: str | Path) -> None:
    """Check that a path does not exist or is an empty folder.

    Raises:
        UserError: the path exists and is not an empty folder.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; name another folder or delete it first.")


def save(folder: str | Path, corpus: Corpus, kinds: Sequence[str], write: Callable[[Path], None]) -> None:
    """Write an index into a temporary folder, then rename it: a reader never sees an incomplete folder.

    write: writes all files but those of the corpus into a folder.

    Raises:
        UserError: the folder is not empty, or writing fails.
    """
    folder = Path(folder)
    check_free(folder)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        corpus.write(partial)
        write(partial)
        files = _sizes(partial, [path.name for path in partial.iterdir()])
        manifest = json.dumps(
            {"format": FORMAT, "kinds": list(kinds), "passages": len(corpus), "files": files}
        )
        (partial / MANIFEST).write_text(manifest, encoding="utf-8")
        for path in partial.iterdir():
            _to_disk(path)
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"The index cannot be saved in {folder}: {error.strerror}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sizes(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """The sizes of files that are in a folder itself, in bytes."""
    plain = [name for name in names if name == Path(name).name and (folder / name).is_file()]
    return {name: (folder / name).stat().st_size for name in plain}


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())

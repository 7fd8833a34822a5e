"""Which files of a folder hold the rows: a snapshot of a dataset's files, or what `save_to_disk` wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import DataError, did_you_mean
from agentrl.types import JSON

LINES, LISTS, PARQUET, ARROW = "lines", "lists", "parquet", "arrow"
KINDS = {".jsonl": LINES, ".ndjson": LINES, ".json": LISTS, ".parquet": PARQUET, ".arrow": ARROW}
"""Kinds of files by their suffix."""

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD = re.compile(r"(?P<split>\w[\w.-]*?)-\d+-of-\d+(?:-[0-9a-f]+)?")
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files that say something of a dataset, and hold none of it."""


def files_of(folder: Path, split: str) -> Sequence[Path]:
    """The files of a split, in the order of their names; all of them where no name says a split.

    Raises:
        DataError: there are none, or several datasets, or no such split.
    """
    if (folder / "dataset_dict.json").exists():
        splits = _strings(_read(folder / "dataset_dict.json").get("splits"))
        return _saved(folder / _one_of(splits, split, folder))
    if (folder / "state.json").exists():
        return _saved(folder)
    there = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in KINDS and _is_data(path, folder)
    )
    if any(KINDS[path.suffix.lower()] != LISTS for path in there):
        there = [path for path in there if KINDS[path.suffix.lower()] != LISTS]
    if not there:
        raise DataError(f"{folder} holds no {', '.join(KINDS)} file; name another folder.")
    chosen = _of_split(there, split, folder)
    datasets = sorted({_dataset_of(path) for path in chosen})
    if len(datasets) > 1:
        names = ", ".join(str(path) for path in datasets)
        raise DataError(f"{folder} holds several datasets; name the folder of one: {names}.")
    return chosen


def split_of(path: Path) -> str | None:
    """The split that a name says: `train-00000-of-00002.parquet`, or in a folder `test/0000.parquet`."""
    shard = _SHARD.fullmatch(path.stem)
    if shard is not None:
        return _SPLITS.get(shard["split"].lower(), shard["split"].lower())
    words = [word for word in re.split(r"[^a-z]+", path.stem.lower()) if word in _SPLITS]
    named = [*words, path.parent.name.lower()]
    return next((_SPLITS[word] for word in named if word in _SPLITS), None)


def _of_split(files: Sequence[Path], split: str, folder: Path) -> Sequence[Path]:
    splits = {path: split_of(path) for path in files}
    named = sorted({name for name in splits.values() if name is not None})
    if not named:
        return files
    stray = [path for path, name in splits.items() if name is None]
    if stray:
        raise DataError(
            f"{folder} holds the splits {', '.join(named)}, and "
            f"{stray[0].relative_to(folder)}, which says none; "
            "name the file or the files."
        )
    wanted = _one_of(named, _SPLITS.get(split, split), folder)
    return [path for path, name in splits.items() if name == wanted]


def _one_of(names: Sequence[str], split: str, folder: Path) -> str:
    if split not in names:
        near = did_you_mean(split, names)
        raise DataError(f"{folder} has no split `{split}`.{near} It has {', '.join(names) or 'none'}.")
    return split


def _is_data(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder)
    return (
        path.name not in _ABOUT and path.is_file() and not any(part.startswith(".") for part in inside.parts)
    )


def _dataset_of(path: Path) -> Path:
    """The folder of a dataset: that of the file, or the one above where it is named like a split."""
    return path.parent.parent if path.parent.name.lower() in _SPLITS else path.parent


def _saved(folder: Path) -> Sequence[Path]:
    """The files of one dataset that `save_to_disk` wrote."""
    state = _read(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} was saved with an index of its rows; call flatten_indices() and save it again."
        )
    listed = state.get("_data_files")
    files = (
        [one.get("filename") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    )
    return [folder / name for name in files if isinstance(name, str)]


def _read(path: Path) -> dict[str, JSON]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); save the dataset again.") from error
    return found if isinstance(found, dict) else {}


def _strings(found: JSON) -> list[str]:
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []

"""The data files of a folder: a snapshot of a dataset's files, or the output of `save_to_disk`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from agentrl.data.rows.packed import PACKED
from agentrl.errors import DataError, did_you_mean
from agentrl.runtime.files import check_fetched
from agentrl.types import JSON

LINES, LISTS, TABLE, PARQUET, ARROW = "lines", "lists", "table", "parquet", "arrow"
KINDS = {
    **{".jsonl": LINES, ".ndjson": LINES, ".json": LISTS, ".csv": TABLE, ".tsv": TABLE},
    **{".parquet": PARQUET, ".arrow": ARROW},
}
"""Kinds of files by their suffix; those of text may be under gzip (`.jsonl.gz`)."""

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD = re.compile(r"(?P<split>\w[\w.-]*?)-\d+-of-\d+(?:-[0-9a-f]+)?")
_METADATA_FILES = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files with metadata of a dataset, without rows."""


def kind_of(path: Path) -> str | None:
    """The kind of a file by its name; None = it is no file of data."""
    suffix = path.suffix.lower()
    if suffix != PACKED:
        return KINDS.get(suffix)
    kind = KINDS.get(path.with_suffix("").suffix.lower())
    return None if kind in (PARQUET, ARROW) else kind


def files_of(folder: Path, split: str) -> Sequence[Path]:
    """The files of a split, in the order of their names; all files where no name contains a split.

    Raises:
        DataError: the folder holds no data file, several datasets, or no such split.
    """
    if (folder / "dataset_dict.json").exists():
        splits = _strings(_read(folder / "dataset_dict.json").get("splits"))
        return _saved(folder / _existing_split(splits, split, folder))
    if (folder / "state.json").exists():
        return _saved(folder)
    data_files = sorted(
        path for path in folder.rglob("*") if kind_of(path) is not None and _is_data(path, folder)
    )
    if any(kind_of(path) != LISTS for path in data_files):
        data_files = [path for path in data_files if kind_of(path) != LISTS]
    if not data_files:
        raise DataError(f"{folder} holds no {', '.join(KINDS)} file; name another folder.")
    chosen = _of_split(data_files, split, folder)
    datasets = sorted({_dataset_of(path) for path in chosen})
    if len(datasets) > 1:
        names = ", ".join(str(path) for path in datasets)
        raise DataError(f"{folder} holds several datasets; name the folder of one: {names}.")
    return chosen


def split_of(path: Path) -> str | None:
    """The split in the name of a file: `train-00000-of-00002.parquet`, or in a folder `test/0000.parquet`."""
    shard = _SHARD.fullmatch(path.stem)
    if shard is not None:
        return _SPLITS.get(shard["split"].lower(), shard["split"].lower())
    words = [word for word in re.split(r"[^a-z]+", path.stem.lower()) if word in _SPLITS]
    candidates = [*words, path.parent.name.lower()]
    return next((_SPLITS[word] for word in candidates if word in _SPLITS), None)


def _of_split(files: Sequence[Path], split: str, folder: Path) -> Sequence[Path]:
    splits = {path: split_of(path) for path in files}
    names = sorted({name for name in splits.values() if name is not None})
    if not names:
        return files
    unassigned = [path for path, name in splits.items() if name is None]
    if unassigned:
        raise DataError(
            f"{folder} holds the splits {', '.join(names)}, and "
            f"{unassigned[0].relative_to(folder)}, which names none; "
            "name the file or the files."
        )
    selected = _existing_split(names, _SPLITS.get(split, split), folder)
    return [path for path, name in splits.items() if name == selected]


def _existing_split(names: Sequence[str], split: str, folder: Path) -> str:
    if split not in names:
        near = did_you_mean(split, names)
        raise DataError(f"{folder} has no split `{split}`.{near} It has {', '.join(names) or 'none'}.")
    return split


def _is_data(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder)
    return (
        path.name not in _METADATA_FILES
        and path.is_file()
        and not any(part.startswith(".") for part in inside.parts)
    )


def _dataset_of(path: Path) -> Path:
    """The folder of a dataset: the parent of the file, or the parent's parent where the former is a split."""
    return path.parent.parent if path.parent.name.lower() in _SPLITS else path.parent


def _saved(folder: Path) -> Sequence[Path]:
    """The files of one dataset in the format of `save_to_disk`."""
    state = _read(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} was saved with an index of its rows; call flatten_indices() and save it again."
        )
    entries = state.get("_data_files")
    files = (
        [entry.get("filename") for entry in entries if isinstance(entry, dict)]
        if isinstance(entries, list)
        else []
    )
    return [folder / name for name in files if isinstance(name, str)]


def _read(path: Path) -> dict[str, JSON]:
    check_fetched([path], DataError)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); save the dataset again.") from error
    return content if isinstance(content, dict) else {}


def _strings(value: JSON) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

"""A cache of results: a finished run of a benchmark is not measured again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.errors import RunExistsError
from agentrl.types import JSON

RESULT = "bench.json"


def cached_result(
    folder: Path, settings: Mapping[str, JSON], measure: Callable[[], dict[str, JSON]]
) -> dict[str, JSON]:
    """The result in `folder` where there is one for these settings, else that of `measure`, which is saved.

    An interrupted run starts over: its files in `folder` are removed.

    Raises:
        RunExistsError: the folder holds a result for other settings, or files that are not a benchmark's.
    """
    result, marker = folder / RESULT, folder / f"{RESULT}.begun"
    if result.exists():
        saved: dict[str, JSON] = json.loads(result.read_text(encoding="utf-8"))
        if saved["settings"] != settings:
            raise RunExistsError(
                f"{result} was measured with other settings; choose another --output-dir, or remove {folder}."
            )
        return saved
    if marker.exists():
        shutil.rmtree(folder)
    elif folder.exists():
        raise RunExistsError(f"{folder} is not a benchmark's; choose another --output-dir.")
    folder.mkdir(parents=True)
    marker.touch()
    row = {"settings": dict(settings), **measure()}
    part = result.with_suffix(".part")
    part.write_text(json.dumps(row), encoding="utf-8")
    part.replace(result)
    return row

"""Results that a benchmark has worked for and need not work for again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.errors import RunExistsError
from agentrl.types import JSON

RESULT = "bench.json"


def kept(folder: Path, settings: Mapping[str, JSON], work: Callable[[], dict[str, JSON]]) -> dict[str, JSON]:
    """What `work` gave for these settings in an earlier call, or gives now; it lies in `folder`.

    A run that was interrupted before it had a result begins anew: what it left in `folder` is removed.

    Raises:
        RunExistsError: the folder holds a result for other settings, or a run that is not a benchmark's.
    """
    result, begun = folder / RESULT, folder / f"{RESULT}.begun"
    if result.exists():
        found: dict[str, JSON] = json.loads(result.read_text(encoding="utf-8"))
        if found["settings"] != settings:
            raise RunExistsError(
                f"{result} was measured with other settings; choose another --output-dir, or remove {folder}."
            )
        return found
    if begun.exists():
        shutil.rmtree(folder)
    elif folder.exists():
        raise RunExistsError(f"{folder} is not a benchmark's; choose another --output-dir.")
    folder.mkdir(parents=True)
    begun.touch()
    row = {"settings": dict(settings), **work()}
    part = result.with_suffix(".part")
    part.write_text(json.dumps(row), encoding="utf-8")
    part.replace(result)
    return row

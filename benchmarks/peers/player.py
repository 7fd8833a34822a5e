"""This package's side of the benchmark: a complete evaluation whenever a line arrives on standard input.

    python -m benchmarks.peers.player SETTINGS

SETTINGS: JSON, see `PlayerSettings`. It prints the settings, then one line of JSON after each evaluation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TypedDict, cast

import agentrl
from agentrl.assembly.keywords import EvalSettings
from agentrl.types import JSON

ENV_ID = "benchmarks.library:OneText"


class PlayerSettings(TypedDict):
    """settings: of `agentrl.evaluate`. folder: every evaluation writes its journal into a folder below it."""

    settings: dict[str, JSON]
    folder: str


def play(settings: PlayerSettings) -> None:
    """Evaluate once for every line of standard input."""
    _print({"env": ENV_ID, **settings["settings"]})
    for number, _ in enumerate(sys.stdin):
        folder = str(Path(settings["folder"]) / str(number))
        options = cast(EvalSettings, {**settings["settings"], "output_dir": folder})
        report = agentrl.evaluate(ENV_ID, None, resume=False, quiet=True, **options)
        _print(
            {
                "episodes": report.n,
                "solved": round(report.mean * report.n),
                "turns": round(report.turns * report.n),
                "error": next(iter(report.failures), None),
            }
        )


def _print(line: dict[str, JSON]) -> None:
    print(json.dumps(line), flush=True)


def main(arguments: list[str]) -> None:
    """Play until standard input ends."""
    settings: PlayerSettings = json.loads(arguments[0])
    play(settings)


if __name__ == "__main__":
    main(sys.argv[1:])

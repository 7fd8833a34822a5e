"""The best figures of a card: benchmarks/baselines/CARD.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from agentrl.errors import UserError
from agentrl.runtime.files import write_text
from agentrl.types import JSON

FOLDER: Final = Path(__file__).parents[1] / "baselines"
TOLERANCE: Final = 0.05
"""A figure that is worse than the best by more than this share is named."""
_LOWER_IS_BETTER: Final = ("_s", "_less", "_gib")


@dataclass(frozen=True, slots=True)
class Worse:
    """A figure that has become worse."""

    name: str
    value: float
    best: float

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.4g}, the best is {self.best:.4g}"


def file_of(card: str) -> Path:
    """The file of a card's best figures."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"


def figures_of_rows(rows: Iterable[Mapping[str, JSON]]) -> dict[str, float]:
    """The figures of all rows that are compared, by part, name and figure."""
    return {
        f"{row['part']}, {row['name']}: {figure}": float(cast(float, value))
        for row in rows
        for figure, value in cast(dict[str, JSON], row.get("best") or {}).items()
    }


def read(path: Path) -> dict[str, float]:
    """The best figures in a file.

    Raises:
        UserError: it cannot be read, or holds no figures.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in held["figures"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} holds no figures of a card ({error}); give --compare a file that --save has written."
        ) from error


def worse(figures: Mapping[str, float], best: Mapping[str, float]) -> Sequence[Worse]:
    """The figures that are worse than the best by more than TOLERANCE; others are not compared."""
    return [
        Worse(name, value, best[name])
        for name, value in figures.items()
        if name in best and _is_worse(name, value, best[name])
    ]


def save(path: Path, card: str, figures: Mapping[str, float], facts: Mapping[str, JSON]) -> None:
    """Write the better figure of each name; names that were not measured stay."""
    best = read(path) if path.exists() else {}
    for name, value in figures.items():
        if name not in best or _is_better(name, value, best[name]):
            best[name] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {"card": card, **facts, "figures": dict(sorted(best.items()))}
    write_text(path, json.dumps(held, indent=2) + "\n")


def _is_lower_better(name: str) -> bool:
    return name.endswith(_LOWER_IS_BETTER) and not name.endswith("_per_s")


def _is_worse(name: str, value: float, best: float) -> bool:
    if _is_lower_better(name):
        return value > best * (1 + TOLERANCE)
    return value < best * (1 - TOLERANCE)


def _is_better(name: str, value: float, best: float) -> bool:
    return value < best if _is_lower_better(name) else value > best

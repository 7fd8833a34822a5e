"""Which jobs a call runs, in which order: the most valuable first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from agentrl.errors import UserError, did_you_mean
from agentrl.types import JSON
from benchmarks.gpu.job import Spec
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.variants import parsed

PARTS: Final = ("hw", "trainers", "transports", "generator", "runs", "agree", "layer")
RUNS: Final = "runs"
_VARIANTS: Final = {
    "0.6B": ("0.6B:kernels", "0.6B:transformers", "0.6B:rows=8192"),
    "1.7B": ("1.7B", "1.7B:transformers"),
    "4B": ("4B", "4B:transformers"),
}
_LAST: Final = {"0.6B": ("0.6B:torch",)}
_SECONDS: Final = {"trainers": 150, "transports": 75, "generator": 100, "runs": 150, "agree": 60, "layer": 60}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user asks for.

    parts, shapes: none = all. variants: of trainers; none = the usual ones of all shapes. seconds: of the
    whole call. python: the interpreter of SGLang. sglang: arguments of servers. ranks: None = every card.
    folder: for models and logs; None = a temporary one. episodes: of the generator, at once.
    compare: a file; None = that of the card, where there is one.
    """

    parts: Sequence[str] = ()
    shapes: Sequence[str] = ()
    variants: Sequence[str] = ()
    seconds: float = 1800.0
    tiny: bool = False
    python: str = ""
    sglang: dict[str, JSON] = field(default_factory=dict)
    ranks: int | None = None
    episodes: Sequence[int] = (256, 1024)
    folder: Path | None = None
    save: bool = False
    compare: Path | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A job and what it needs. servers: their arguments. seconds: that it may take."""

    spec: Spec
    servers: tuple[str, ...] = ()
    seconds: float = 60.0


def common_spec(options: Options, folder: Path) -> Spec:
    """What all jobs are told."""
    shapes = _chosen(options.shapes, tuple(SHAPES), "shape")
    return Spec(
        kind="",
        argument="",
        folder=str(folder),
        device="cpu" if options.tiny else "cuda",
        tiny=options.tiny,
        python=options.python,
        shape=shapes[0],
        sglang=options.sglang,
        ranks=options.ranks,
        episodes=tuple(options.episodes),
    )


def entries(options: Options, common: Spec) -> list[Entry]:
    """The jobs in their order.

    Raises:
        UserError: there is no such part, shape or variant.
    """
    parts = _chosen(options.parts, PARTS, "part")
    shapes = _chosen(options.shapes, tuple(SHAPES), "shape")
    first, later = _variants(options.variants, shapes)
    jobs: list[Entry] = []
    if "trainers" in parts:
        jobs += [_entry(common, "trainers", variant) for variant in first]
    jobs += [
        _entry(common, part, "", servers)
        for part, servers in (
            ("transports", (common.shape,)),
            ("generator", (common.shape,)),
            ("runs", (RUNS,)),
            ("agree", (common.shape,)),
            ("layer", ()),
        )
        if part in parts
    ]
    if "trainers" in parts:
        jobs += [_entry(common, "trainers", variant) for variant in later]
    return jobs


def _variants(texts: Sequence[str], shapes: Sequence[str]) -> tuple[list[str], list[str]]:
    """The variants before the other parts, and those after them."""
    words = [word for text in texts for word in text.split()]
    for word in words:
        parsed(word)
    if words:
        return words, []
    first = [*_VARIANTS[shapes[0]]]
    later = [variant for shape in shapes[1:] for variant in _VARIANTS[shape]]
    return first, later + [variant for shape in shapes for variant in _LAST.get(shape, ())]


def _entry(common: Spec, kind: str, argument: str, servers: tuple[str, ...] = ()) -> Entry:
    return Entry(replace(common, kind=kind, argument=argument), servers, _SECONDS[kind])


def _chosen(names: Sequence[str], known: Sequence[str], what: str) -> Sequence[str]:
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known)
        raise UserError(f"There is no {what} `{unknown[0]}`; there are {', '.join(known)}.{hint}")
    return [name for name in known if name in names] or known

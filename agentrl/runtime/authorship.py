"""Whose code is executed, or has raised an exception: the line of an environment's author, for a sentence."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType


def place_of(error: BaseException, *, installed: bool = True) -> str:
    """Where an author's code raised an exception, `file.py, line 3`; empty where there is no such code.

    That is the innermost line outside of installed packages; where there is none and `installed` is set, the
    innermost outside of this package.
    """
    return _place_in(walk_tb(error.__traceback__), installed=installed)


def place_of_frame(frame: FrameType) -> str:
    """Where an author's code is executed: the innermost line of it, `maze.py, line 12`; "" = nowhere."""
    return _place_in(reversed([*walk_stack(frame)]), installed=False)


def _place_in(frames: Iterable[tuple[FrameType, int]], *, installed: bool) -> str:
    lines = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    ranked = [(_authorship(path), path, line) for path, line in lines]
    highest = max((rank for rank, _, _ in ranked), default=0)
    places = [f"{path.name}, line {line}" for rank, path, line in ranked if rank == highest]
    return places[-1] if highest > (0 if installed else 1) else ""


def _authorship(path: Path) -> int:
    """2 = an author's file, 1 = of an installed package, 0 = of this package or of Python, or no file."""
    # Code without a file, such as the `__init__` of a dataclass, has a name in angle brackets.
    if path.name.startswith("<") or path.is_relative_to(_PACKAGE):
        return 0
    # Before the standard library: its folder may hold the installed packages.
    if any(path.is_relative_to(folder) for folder in _INSTALLED):
        return 1
    return 0 if path.is_relative_to(_STDLIB) else 2


_PACKAGE = Path(__file__).parents[1]
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_STDLIB = sysconfig.get_path("stdlib")

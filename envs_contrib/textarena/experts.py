"""Scripts that play some of the games well. They read what a player reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

from agentrl import Script, say

_RANGE = re.compile(r"between (\d+) and (\d+)")
_CODE = re.compile(r"code that is (\d+) digits long, each digit from 1 to (\d+)")
_PEGS = re.compile(r"(\d+) black peg\(s\), (\d+) white peg\(s\)")


def guess_the_number(prompt: str) -> Script:
    """Bisection."""
    match = _RANGE.search(prompt)
    assert match is not None
    low, high = int(match[1]), int(match[2])
    while True:
        guess = (low + high) // 2
        hint = yield say(f"[{guess}]")
        low, high = (guess + 1, high) if "higher" in hint else (low, guess - 1)


def mastermind(prompt: str) -> Script:
    """Guess the first code that agrees with all pegs so far."""
    match = _CODE.search(prompt)
    assert match is not None
    codes = [*permutations(range(1, int(match[2]) + 1), int(match[1]))]
    while True:
        guess = codes[0]
        pegs = _PEGS.search((yield say(f"[{' '.join(map(str, guess))}]")))
        assert pegs is not None
        codes = [code for code in codes if _pegs(guess, code) == (int(pegs[1]), int(pegs[2]))]


def _pegs(guess: Sequence[int], code: Sequence[int]) -> tuple[int, int]:
    """Black and white pegs of a guess; neither repeats a digit."""
    black = sum(own == other for own, other in zip(guess, code, strict=True))
    return black, len(set(guess) & set(code)) - black


EXPERTS: Mapping[str, Callable[[str], Script]] = {
    "GuessTheNumber-v0": guess_the_number,
    "GuessTheNumber-v0-hardcore": guess_the_number,
    "Mastermind-v0": mastermind,
    "Mastermind-v0-hard": mastermind,
}
"""By the game's id in TextArena: from its prompt to a script."""

"""A seeded generator of passages and queries with about the word frequencies of a language."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_SYLLABLES = [
    c + v for c in ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z") for v in "aeiou"
]
_VOCABULARY = 50_000
# Zipf-Mandelbrot: the word of rank r is drawn in proportion to 1 / (r + 2.7).
_OFFSET = 2.7


class Passages:
    """Passages of some words each, the first two the title, and queries of words from one passage.

    The same seed gives the same texts.
    """

    def __init__(self, count: int, words: int, *, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocabulary = self._words()
        weights = 1 / (np.arange(_VOCABULARY) + 1 + _OFFSET)
        steps = np.cumsum(weights / weights.sum())
        ranks = np.searchsorted(steps, self._rng.random((count, words)), side="right")
        self._ranks: npt.NDArray[np.int64] = np.minimum(ranks, _VOCABULARY - 1)

    def texts(self) -> list[str]:
        """All passages: the title between quotation marks, a line break, the text."""
        return [
            f'"{" ".join(row[:2])}"\n{" ".join(row[2:])}' for row in self._vocabulary[self._ranks].tolist()
        ]

    def queries(self, count: int, words: int = 6) -> list[str]:
        """`count` queries of `words` words each, every query drawn from one passage."""
        rows = self._rng.integers(len(self._ranks), size=count)
        chosen = [self._rng.choice(self._ranks[row], words) for row in rows]
        return [" ".join(self._vocabulary[ranks].tolist()) for ranks in chosen]

    def _words(self) -> npt.NDArray[np.str_]:
        """Distinct words of two to four syllables."""
        tries = 4 * _VOCABULARY
        lengths = self._rng.integers(2, 5, tries).tolist()
        syllables = self._rng.choice(_SYLLABLES, (tries, 4)).tolist()
        words = dict.fromkeys("".join(row[:length]) for row, length in zip(syllables, lengths, strict=True))
        return np.array(list(words)[:_VOCABULARY])

"""A Gymnasium space of all text, without an alphabet and without a greatest length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Space, Tuple
from gymnasium.vector.utils import batch_differing_spaces

_WORDS = (
    *("yes", "no", "0", "7", "42", "left", "up", "north", "the", "answer", "is", "x"),
    *("naïve", "Zürich", "día", "Łódź", "мир", "東京", "مرحبا", "🙂"),
)
_MOST_WORDS = 8
_BLANK = "{}"


class TextSpace(Space[str]):
    """Every string, of any length and script; `gymnasium.spaces.Text` has an alphabet and a greatest length.

    forms: formats of samples, with `{}` for a few words. Samples are plausible, not uniform: no distribution
    over all strings is. They do not bound the elements of the space.
    """

    def __init__(
        self, forms: Sequence[str] = (_BLANK,), seed: int | np.random.Generator | None = None
    ) -> None:
        super().__init__(dtype=np.str_, seed=seed)
        self.forms = tuple(forms)

    @property
    def is_np_flattenable(self) -> bool:
        """False: text has no fixed number of values."""
        return False

    def sample(
        self,
        mask: npt.NDArray[np.int8] | None = None,
        probability: npt.NDArray[np.float64] | None = None,
    ) -> str:
        """A few words, some of them not ASCII, in one of the forms.

        mask: int8 [number of forms], 1 where a form may be used. probability: float64, the same shape.

        Raises:
            ValueError: both are arguments.
        """
        if mask is not None and probability is not None:
            raise ValueError("give sample() a mask or a probability, not both")
        weights = probability if mask is None else mask / mask.sum()
        form = self.forms[int(self.np_random.choice(len(self.forms), p=weights))]
        words = self.np_random.choice(_WORDS, size=self.np_random.integers(1, _MOST_WORDS + 1))
        return form.replace(_BLANK, " ".join(words.tolist()))

    def contains(self, x: object) -> bool:
        """Whether `x` is a string."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        return hash(TextSpace)

    def __repr__(self) -> str:
        return "TextSpace()"


def _tuple_of(spaces: Sequence[TextSpace]) -> Tuple[str]:
    return Tuple(spaces)


batch_differing_spaces.register(TextSpace, _tuple_of)

"""Array types by what they hold, and who wrote a token."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

NO_VERSION = -1
"""The policy version of a token that no policy wrote."""


class Author(IntEnum):
    """Who wrote a token: a fact, whatever the loss mask chooses to do with it."""

    WORLD = 0
    POLICY = 1
    DEMO = 2


def freeze(array: npt.NDArray[np.generic]) -> None:
    """Make an array of a noun unwritable."""
    array.setflags(write=False)

"""The observations of other libraries, which are values, as text."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

OBSERVATION_CHARS = 65_536
"""Most characters of one message of a world (count); a check reports a longer one."""


def text_of(observation: object) -> str:
    """The str() of a value with all numbers of its arrays; of a large one numpy writes but a few by itself.

    What has more than `OBSERVATION_CHARS` characters is cut there, and a sentence says so.
    """
    with np.printoptions(threshold=sys.maxsize):
        text = str(_shortened(observation))
    if len(text) <= OBSERVATION_CHARS:
        return text
    return f"{text[:OBSERVATION_CHARS]}\n[The rest, after {OBSERVATION_CHARS:,} characters, is not shown.]"


def _shortened(value: object) -> object:
    """The value, whose arrays have no more numbers than fit: numpy takes seconds to write a large one."""
    if isinstance(value, np.ndarray):
        return _leading(value)
    if type(value) is list:
        return [_shortened(item) for item in value]
    if type(value) is tuple:
        return tuple(_shortened(item) for item in value)
    if type(value) is dict:
        return {key: _shortened(item) for key, item in value.items()}
    return value


def _leading(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The beginning of an array, in the order in which it is written."""
    while array.size > OBSERVATION_CHARS:
        axis = next(axis for axis, length in enumerate(array.shape) if length > 1)
        length = max(array.shape[axis] * OBSERVATION_CHARS // array.size, 1)
        array = array[(slice(None),) * axis + (slice(length),)]
    return array

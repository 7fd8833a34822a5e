"""Array types by what they hold, how they are written as JSON, and who wrote a token."""

from __future__ import annotations

import base64
from enum import IntEnum
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, PlainValidator

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


def _shortest(values_T: npt.NDArray[np.float32]) -> list[float]:
    # Nine significant digits name a float32 without doubt; a float64 would print seventeen.
    return [float(f"{value:.9g}") for value in values_T.tolist()]


def _packed(values: npt.NDArray[np.generic]) -> dict[str, object]:
    data = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
    return {"dtype": values.dtype.str, "shape": list(values.shape), "base64": data}


def _unpacked(found: object) -> npt.NDArray[np.generic]:
    if isinstance(found, np.ndarray):
        return found
    if not isinstance(found, dict) or {"dtype", "shape", "base64"} - found.keys():
        raise ValueError("an array is written as its dtype, shape and bytes in base64")
    dtype = np.dtype(str(found["dtype"]))
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of numbers was expected, got dtype {dtype}")
    flat: npt.NDArray[np.generic] = np.frombuffer(base64.b64decode(found["base64"]), dtype)
    return flat.reshape(found["shape"]).copy()


IntArray = Annotated[
    npt.NDArray[np.int32],
    PlainValidator(lambda found: np.asarray(found, np.int32)),
    PlainSerializer(lambda array: array.tolist()),
]
FloatArray = Annotated[
    npt.NDArray[np.float32],
    PlainValidator(lambda found: np.asarray(found, np.float32)),
    PlainSerializer(_shortest),
]
BoolArray = npt.NDArray[np.bool_]
NumberArray = Annotated[npt.NDArray[np.generic], PlainValidator(_unpacked), PlainSerializer(_packed)]
"""Numbers of any dtype and shape; as JSON, their bytes."""

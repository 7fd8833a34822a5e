"""Array types with their form in JSON, and the authors of tokens."""

from __future__ import annotations

import base64
from array import array
from enum import IntEnum
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, PlainValidator

NO_VERSION = -1
"""The policy version of a token that was not sampled by the policy."""


class Author(IntEnum):
    """The author of a token, independent of the loss mask."""

    WORLD = 0
    POLICY = 1
    DEMO = 2


def freeze(array: npt.NDArray[np.generic]) -> None:
    """Make an array read-only."""
    array.setflags(write=False)


_POWERS = np.array([float(f"1e{k}") for k in range(23)])
"""Powers of ten that a float64 holds exactly."""


def _shortest(values_T: npt.NDArray[np.float32]) -> list[float]:
    # Nine significant digits identify a float32; the repr of a float64 would have seventeen. A whole number
    # of nine digits over an exact power of ten is the float64 whose repr has these nine.
    wide = values_T.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        places = 8 - np.floor(np.log10(np.abs(wide)))
    is_exact = (places >= 0) & (places < len(_POWERS))
    powers = _POWERS[np.where(is_exact, places, 0).astype(np.intp)]
    with np.errstate(over="ignore", invalid="ignore"):
        short = np.where(wide == 0, wide, np.rint(wide * powers) / powers)
        is_exact = (wide == 0) | is_exact & (short.astype(np.float32) == values_T)
    for place in np.flatnonzero(~is_exact).tolist():
        short[place] = float(f"{wide[place]:.9g}")
    digits: list[float] = short.tolist()
    return digits


def _integers(value: object) -> npt.NDArray[np.int32]:
    return _vector(value, "i").astype(np.int32, copy=False)


def _floats(value: object) -> npt.NDArray[np.float32]:
    return _vector(value, "f").astype(np.float32, copy=False)


def _vector(value: object, code: str) -> npt.NDArray[np.generic]:
    """The array of a list. numpy would cut fractions, read texts as numbers and take null for NaN."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        try:
            return np.asarray(array(code, value))
        except (TypeError, OverflowError):
            pass
    kind = "whole numbers of 32 bits" if code == "i" else "numbers"
    raise ValueError(f"it is no list of {kind}")


def _packed(values: npt.NDArray[np.generic]) -> dict[str, object]:
    data = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
    return {"dtype": values.dtype.str, "shape": list(values.shape), "base64": data}


def _unpacked(value: object) -> npt.NDArray[np.generic]:
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, dict) or {"dtype", "shape", "base64"} - value.keys():
        raise ValueError("an array is serialized as its dtype, shape and bytes in base64")
    dtype = np.dtype(str(value["dtype"]))
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of numbers was expected, got dtype {dtype}")
    flat: npt.NDArray[np.generic] = np.frombuffer(base64.b64decode(value["base64"]), dtype)
    return flat.reshape(value["shape"]).copy()


IntArray = Annotated[
    npt.NDArray[np.int32],
    PlainValidator(_integers),
    PlainSerializer(lambda array: array.tolist()),
]
"""An array of int32; as JSON, a list."""
FloatArray = Annotated[
    npt.NDArray[np.float32],
    PlainValidator(_floats),
    PlainSerializer(_shortest),
]
"""An array of float32; as JSON, a list of the digits that restore it."""
BoolArray = npt.NDArray[np.bool_]
"""An array of bool."""
NumberArray = Annotated[npt.NDArray[np.generic], PlainValidator(_unpacked), PlainSerializer(_packed)]
"""Numbers of any dtype and shape; as JSON, their bytes."""

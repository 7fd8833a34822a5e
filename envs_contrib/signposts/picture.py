"""Pictures of arrows and forms, as PNG files."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from agentrl import Image

SIZE = 96
"""The width and height of a picture (pixels)."""
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (210, 40, 40),
    "green": (30, 150, 60),
    "blue": (50, 80, 210),
    "orange": (240, 140, 20),
    "purple": (130, 50, 160),
}
DIRECTIONS = ("north", "east", "south", "west")
"""Each a quarter turn to the right of the one before."""
FORMS = ("circle", "square", "triangle", "cross")
_PALE = (225, 250)
_RADII = (24.0, 34.0)
_SHIFT = 10.0

_Mask = NDArray[np.bool_]


def arrow(direction: str, colour: str, rng: random.Random) -> Image:
    """An arrow of a colour. rng: of its place and size, and of the background."""
    return _drawn(direction, colour, rng)


def form(name: str, colour: str, rng: random.Random) -> Image:
    """A form of a colour. rng: as of an arrow."""
    return _drawn(name, colour, rng)


def _drawn(shape: str, colour: str, rng: random.Random) -> Image:
    background = [rng.randint(*_PALE) for _ in range(3)]
    radius, middle = rng.uniform(*_RADII), (SIZE - 1) / 2
    rows_HW, columns_HW = np.mgrid[0:SIZE, 0:SIZE].astype(float)
    # Both from -1 to 1 within the radius; y is positive below.
    y_HW = (rows_HW - middle - rng.uniform(-_SHIFT, _SHIFT)) / radius
    x_HW = (columns_HW - middle - rng.uniform(-_SHIFT, _SHIFT)) / radius
    pixels_HWC = np.empty((SIZE, SIZE, 3), np.uint8)
    pixels_HWC[:] = background
    pixels_HWC[_mask(shape, x_HW, y_HW)] = COLOURS[colour]
    return Image.of(_png(pixels_HWC), "image/png")


def _mask(shape: str, x_HW: NDArray[np.float64], y_HW: NDArray[np.float64]) -> _Mask:
    if shape in DIRECTIONS:
        for _ in range(DIRECTIONS.index(shape)):
            # A quarter turn to the right: what was above is now at the right.
            x_HW, y_HW = y_HW, -x_HW
        is_head = (y_HW >= -1) & (y_HW <= 0) & (np.abs(x_HW) <= 0.7 * (y_HW + 1))
        return is_head | ((np.abs(x_HW) <= 0.2) & (y_HW > 0) & (y_HW <= 1))
    match shape:
        case "circle":
            return x_HW**2 + y_HW**2 <= 1
        case "square":
            return np.maximum(np.abs(x_HW), np.abs(y_HW)) <= 0.85
        case "triangle":
            return (y_HW >= -1) & (y_HW <= 0.8) & (np.abs(x_HW) <= 0.55 * (y_HW + 1))
        case "cross":
            near, far = np.minimum(np.abs(x_HW), np.abs(y_HW)), np.maximum(np.abs(x_HW), np.abs(y_HW))
            return (near <= 0.25) & (far <= 1)
    raise AssertionError(f"{shape} has no picture")


def _png(pixels_HWC: NDArray[np.uint8]) -> bytes:
    """Pixels as a PNG file, without filters."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", pixels_HWC.shape[1], pixels_HWC.shape[0], 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels_HWC)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    )

"""The table of levels. It imports nothing, so that ids are listed without minigrid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Level(NamedTuple):
    """max_steps: actions until the episode is truncated. chance: the mean score of random actions."""

    max_steps: int
    chance: float


LEVELS: Mapping[str, Level] = {
    "GoToObj": Level(32, 0.1),
    "GoToRedBallGrey": Level(40, 0.2),
    "GoToRedBall": Level(40, 0.2),
    "GoToRedBallNoDists": Level(40, 0.15),
    "GoToRedBlueBall": Level(40, 0.2),
    "GoToLocalS6N2": Level(24, 0.25),
    "GoToLocal": Level(32, 0.2),
    "GoToDoor": Level(32, 0.08),
    "GoToObjDoor": Level(40, 0.25),
    "GoToSeqS5R2": Level(128, 0.18),
    "OpenDoor": Level(40, 0.05),
    "OpenDoorColor": Level(40, 0.1),
    "OpenDoorLoc": Level(40, 0.06),
    "OpenRedDoor": Level(24, 0.05),
    "OpenTwoDoors": Level(56, 0.02),
    "OpenRedBlueDoors": Level(56, 0.02),
    "OpenDoorsOrderN2": Level(56, 0.1),
    "PickupLoc": Level(40, 0.17),
    "PickupDist": Level(32, 0.15),
    "PutNextLocalS5N3": Level(40, 0.06),
    "PutNextLocal": Level(64, 0.02),
    "ActionObjDoor": Level(56, 0.25),
    "UnlockLocal": Level(80, 0.02),
    "UnlockPickup": Level(80, 0.02),
}
"""By name: levels that the bot solves each time, in less than half of max_steps. The chances are upper
estimates on 40 worlds."""

_CLASS = "envs_contrib.babyai.env:BabyAI"

FAMILY: Mapping[str, tuple[str, Mapping[str, object]]] = {
    f"BabyAI-{name}-v0": (_CLASS, {"level": name, "max_steps": level.max_steps, "chance": level.chance})
    for name, level in LEVELS.items()
}
"""By id: the class of the environment and its arguments (the entry point `BabyAI-*-v0`)."""

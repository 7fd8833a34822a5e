"""Servers for the tests of launching: the stand-in's, and what is known of their processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx2

from agentrl.engine.sglang.launch import ServerSettings
from agentrl.engine.sglang.launch.listener import Listener

STAND_IN = Path(__file__).parent / "stand_in"


def settings(folder: Path, *habit: str, **changes: object) -> ServerSettings:
    """Of servers that are the stand-in, with a habit."""
    arguments = {"habit": list(habit)} if habit else {}
    told: dict[str, object] = {
        "model": Path("model"),
        "log_folder": folder,
        "python": Path(sys.executable),
        "python_path": (STAND_IN,),
        "arguments": arguments,
        "first_wait_s": 20.0,
    }
    return ServerSettings(**told | changes)


def about(server: Listener) -> dict:
    """What a server tells of itself."""
    return httpx2.get(f"{server.url}/about", trust_env=False).json()


def logged_pids(log: Path) -> list[int]:
    """The processes of a server as its log tells them, healthy or not; none before they are all there."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [pid for line in lines if line.startswith("[") for pid in json.loads(line)]

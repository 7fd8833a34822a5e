"""Stand-in servers for the tests of launching, and their processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx2

from agentrl.engine.sglang.launch import ServerSettings
from agentrl.engine.sglang.launch.listener import Listener

STAND_IN = Path(__file__).parent / "stand_in"


def settings(folder: Path, *habit: str, **changes: object) -> ServerSettings:
    """The settings of stand-in servers with a habit."""
    arguments = {"habit": list(habit)} if habit else {}
    defaults: dict[str, object] = {
        "model": Path("model"),
        "log_folder": folder,
        "python": Path(sys.executable),
        "python_path": (STAND_IN,),
        "arguments": arguments,
        "first_wait_s": 20.0,
    }
    return ServerSettings(**defaults | changes)


def about(server: Listener) -> dict:
    """The arguments, environment and processes that a server reports."""
    return httpx2.get(f"{server.url}/about", trust_env=False).json()


def logged_pids(log: Path) -> list[int]:
    """The pids of a server in its log, healthy or not; none before all processes have started."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [pid for line in lines if line.startswith("[") for pid in json.loads(line)]

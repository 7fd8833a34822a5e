"""Episodes of this package and of verifiers, played on one chat endpoint that costs nothing.

Each side is a process of its own, which has started everything before it is timed; an episode is a question,
three calls of a tool and a graded answer. Wall time, CPU time of all processes of a side and their memory.

    single             one episode after another
    few, many, most    16, 64 and 256 episodes at once
    long               16 at once, results of 200,000 characters; this and `single` are adverse cases
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.types import JSON
from benchmarks.compare import Figures, figures_of, interleaved
from benchmarks.machine import interpreter_versions, machine
from benchmarks.peers import on_verifiers
from benchmarks.peers.settings import AGENTRL, SETTINGS, VERIFIERS, Load, PeerSettings
from benchmarks.peers.sides import ROOT, InstantEndpoint, Program, Round, Side
from benchmarks.sections import as_json, chosen

_MODEL = "instant"
_WORLD = "instant_world"
_WORLD_FOLDER = Path(on_verifiers.__file__).parent
_PACKAGES = ("verifiers", "mcp", "openai", "pydantic")
_SERIES = "0.4."


@dataclass(frozen=True, slots=True)
class PeerContext:
    """python: the interpreter that verifiers is installed for; None = only this package plays.

    folder: for journals and logs. on_event: called with a message for each step.
    """

    python: Path | None
    folder: Path
    settings: PeerSettings
    on_event: Callable[[str], None]

    async def versions(self) -> dict[str, JSON]:
        """The versions of verifiers' interpreter and packages; empty without one.

        Raises:
            ConfigError: it cannot be run, has another version of verifiers, or no uv.
        """
        if self.python is None:
            return {}
        remedy = "name an interpreter that verifiers 0.4 is installed for with --verifiers-python."
        versions = await interpreter_versions(self.python, "verifiers", _PACKAGES, remedy)
        if not str(versions["verifiers"]).startswith(_SERIES):
            raise ConfigError(f"{self.python} runs verifiers {versions['verifiers']}; {remedy}")
        if shutil.which("uv", path=_search_path(self.python)) is None:
            # verifiers would download it with a script from the network.
            raise ConfigError(f"verifiers starts its harness with uv; run {self.python} -m pip install uv.")
        return versions

    def program(self, side: str, load: Load, url: str) -> Program:
        """The program of a side for one load. url: of the chat endpoint."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        settings: dict[str, JSON]
        if side == AGENTRL:
            command = [sys.executable, "-m", "benchmarks.peers.player"]
            settings = {"settings": _own_settings(load, load.episodes[side], url), "folder": str(folder)}
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        else:
            assert self.python is not None
            command = [str(self.python), str(_WORLD_FOLDER / "player.py")]
            settings = {"config": _verifiers_config(side, load, url), "folder": str(folder)}
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (_WORLD_FOLDER, ROOT))),
                "PATH": _search_path(self.python),
            }
        return Program(side, command, settings, environment, folder / "stderr.log")


def _search_path(python: Path) -> str:
    """The variable PATH with the folder of an interpreter first."""
    return os.pathsep.join((str(python.parent), os.environ.get("PATH", "")))


def _own_settings(load: Load, episodes: int, url: str) -> dict[str, JSON]:
    return {
        "n": episodes,
        "openai_url": f"{url}/v1",
        "openai_model": _MODEL,
        "openai_concurrency": load.concurrency,
        "env_kwargs": {"payload": load.payload},
    }


def _verifiers_config(side: str, load: Load, url: str) -> dict[str, JSON]:
    """Of verifiers' `EvalConfig`: what is not named here has its default."""
    payload: dict[str, JSON] = {"payload": load.payload}
    harness: dict[str, JSON] = {"id": "null"} if side == VERIFIERS else {"id": _WORLD, **payload}
    taskset: dict[str, JSON] = {
        "id": _WORLD,
        "episodes": load.episodes[side],
        "serves_tools": side == VERIFIERS,
        "tools": payload,
    }
    return {
        "env": {"taskset": taskset, "agent": {"harness": harness, "runtime": {"type": "subprocess"}}},
        "model": _MODEL,
        "client": {"base_url": f"{url}/v1", "api_key_var": "UNSET"},
        "max_concurrent": load.concurrency,
        "push": False,
        "rich": None,
    }


def bench_peers(
    python: Path | None,
    *,
    only: Sequence[str] = (),
    settings: PeerSettings = SETTINGS,
    on_event: Callable[[str], None] = print,
) -> dict[str, JSON]:
    """Play all loads; every process that it starts is stopped at the end, and after Ctrl-C.

    python: the interpreter that verifiers 0.4 is installed for; None = this package alone plays. only: names
    of loads; none = all. on_event: called with a message for each step, and with each line of the summary.

    Returns:
        summary: one line per load. rows: every repeat, medians and spreads. settings: of runs and machine.

    Raises:
        UserError: no such load, the interpreter has no verifiers 0.4, or a side did not play as it should.
        EngineError: the endpoint did not start.
    """
    names = chosen(only, settings.loads, "load")
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        absolute = None if python is None else python.absolute()
        context = PeerContext(absolute, Path(folder), settings, on_event)
        return asyncio.run(_bench(context, names))


async def _bench(context: PeerContext, names: Sequence[str]) -> dict[str, JSON]:
    versions = await context.versions()
    rows: list[dict[str, JSON]] = []
    resolved: dict[str, JSON] = {}
    average = os.getloadavg()[0]
    endpoint = InstantEndpoint(context.folder, context.settings.calls)
    try:
        await endpoint.start()
        for number, name in enumerate(names, 1):
            context.on_event(f"{name} ({number} of {len(names)})")
            rows.append(await _row(name, endpoint.url, context, resolved))
            context.on_event(f"{name}: {rows[-1]['line']}")
    finally:
        await endpoint.stop()
    return {
        "summary": {str(row["name"]): row["line"] for row in rows},
        "rows": [*rows],
        "settings": {
            **as_json(asdict(context.settings)),
            "resolved": resolved,
            "warm_up": "one run of each side per load",
            "machine": machine(),
            "load_average_at_the_start": average,
            "verifiers": versions,
        },
    }


async def _row(name: str, url: str, context: PeerContext, resolved: dict[str, JSON]) -> dict[str, JSON]:
    """The figures of one load. resolved: the settings that each side reports are added to it."""
    settings = context.settings
    load = settings.loads[name]
    sides = [side for side in load.episodes if side == AGENTRL or context.python is not None]
    async with AsyncExitStack() as stack:
        plays = {}
        for side in sides:
            started = await stack.enter_async_context(context.program(side, load, url).started())
            resolved[f"{name}, {side}"] = started.resolved
            plays[side] = partial(_round, started, load.episodes[side], context)
        rounds = await interleaved(plays, repeats=settings.repeats)
    figures = {side: _figures(runs, settings.calls + 1) for side, runs in rounds.items()}
    ratios = _ratios(figures)
    return {
        "name": name,
        "line": _line(figures, ratios),
        "sides": {side: _as_json(values) for side, values in figures.items()},
        "ratios": {side: {"episodes_per_s": wall, "cpu": cpu} for side, (wall, cpu) in ratios.items()},
    }


async def _round(side: Side, episodes: int, context: PeerContext) -> Round:
    played = await side.play(episodes, context.settings.calls + 1)
    rate, cpu_ms = episodes / played.wall_s, 1e3 * played.cpu_s / episodes
    context.on_event(f"  {side.name}: {rate:.3g} episodes/s, {cpu_ms:.3g} ms of CPU an episode")
    return played


def _line(figures: Mapping[str, Mapping[str, Figures]], ratios: Mapping[str, tuple[float, float]]) -> str:
    lines = [
        f"{side} {values['episodes_per_s'].median:.3g} episodes/s, "
        f"{values['cpu_ms_an_episode'].median:.3g} ms of CPU an episode, {values['peak_mb'].median:.0f} MB"
        for side, values in figures.items()
    ]
    lines += [f"ratio to {side}: {wall:.3g}, CPU {cpu:.3g}" for side, (wall, cpu) in ratios.items()]
    return "; ".join(lines)


def _figures(runs: Sequence[Round], turns: int) -> dict[str, Figures]:
    """turns: of the model in an episode (count)."""
    per_s = [run.episodes / run.wall_s for run in runs]
    return {
        "episodes_per_s": figures_of(per_s),
        "turns_per_s": figures_of([turns * rate for rate in per_s]),
        "cpu_ms_an_episode": figures_of([1e3 * run.cpu_s / run.episodes for run in runs]),
        "peak_mb": figures_of([run.peak_bytes / 1e6 for run in runs]),
    }


def _ratios(figures: Mapping[str, Mapping[str, Figures]]) -> dict[str, tuple[float, float]]:
    """By other side: this package's episodes/s over its own; its CPU time an episode over this package's."""
    own = figures[AGENTRL]
    return {
        side: (
            own["episodes_per_s"].median / values["episodes_per_s"].median,
            values["cpu_ms_an_episode"].median / own["cpu_ms_an_episode"].median,
        )
        for side, values in figures.items()
        if side != AGENTRL
    }


def _as_json(figures: Mapping[str, Figures]) -> dict[str, JSON]:
    return {name: value._asdict() for name, value in figures.items()}

"""`python -m benchmarks gpu`: its jobs, their turns, and what became worse.

start   the first job measures the card and makes a model; meanwhile the servers and the next jobs import
turns   one job at a time uses the card; it times something only while no server is starting
end     a server is stopped after the last job that needs it; a job that takes too long is killed
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from agentrl.errors import UserError
from agentrl.runtime.interrupts import run_until_signal
from agentrl.types import JSON
from benchmarks.gpu import baselines
from benchmarks.gpu.child import Child
from benchmarks.gpu.job import Spec, Turn
from benchmarks.gpu.plan import RUNS, Entry, Options, common_spec, entries

_HARDWARE_S = 150.0
_SERVER_S = 300.0
_LEAST_S = 12.0
"""A job that has less time than this does not begin."""
_END_S = 6.0
_AHEAD_CORES = 4
"""A job that imports ahead is given as many cores."""
_MOST_AHEAD = 4
_SHM = Path("/dev/shm")
_SHM_BYTES = 30 << 30


@dataclass(eq=False, slots=True)
class Bench:
    """A call. on_row: called with each row as soon as it is known. on_note: with a sentence of progress."""

    options: Options
    common: Spec
    on_row: Callable[[dict[str, JSON]], None]
    on_note: Callable[[str], None]
    rows: list[dict[str, JSON]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    facts: dict[str, JSON] = field(default_factory=dict)
    servers: dict[str, Child] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def left_s(self) -> float:
        """Seconds until the call has to be over."""
        return self.options.seconds - (time.monotonic() - self._began) - _END_S

    async def run(self, jobs: Sequence[Entry]) -> None:
        """Give all jobs their turns, in order; nothing that was started outlives it."""
        children = [self._child(entry.spec) for entry in jobs]
        hardware = self._child(replace(self.common, kind="hw"))
        helpers = self._helpers(jobs)
        async with AsyncExitStack() as stack:
            for child in (hardware, *helpers, *children):
                stack.push_async_callback(child.stop, _END_S)
            for child in (hardware, *helpers, *children[: self._ahead(len(helpers))]):
                await child.start()
            starting = asyncio.create_task(self._start_servers(hardware, helpers))
            stack.callback(starting.cancel)
            # Whatever became of it: nobody waits for it then.
            starting.add_done_callback(lambda _: self._settled.set())
            await self._measure(hardware)
            for number, entry in enumerate(jobs):
                # At least the next one, so that its imports are over when its turn comes.
                for child in children[number : number + 1 + min(self._ahead(len(helpers)), 2)]:
                    if not child.is_started:
                        await child.start()
                await self._turn_of(entry, children[number])
                await self._stop_unneeded(jobs[number + 1 :])
            if starting.done():
                starting.result()

    def _child(self, spec: Spec) -> Child:
        return Child(spec, self._row, self._note, self._settled.wait)

    def _helpers(self, jobs: Sequence[Entry]) -> list[Child]:
        """The servers that the jobs need, and who makes the model of whole runs."""
        needed = dict.fromkeys(server for entry in jobs for server in entry.servers)
        if self.options.tiny and not self.options.python:
            # The embedded engine takes its place in runs; the other parts are left out.
            servers: list[str] = []
        else:
            servers = [*needed]
        self.servers = {
            name: self._child(replace(self.common, kind="server", argument=name)) for name in servers
        }
        warm = [self._child(replace(self.common, kind="warm"))] if RUNS in needed else []
        return [*warm, *self.servers.values()]

    def _ahead(self, num_helpers: int) -> int:
        """The jobs that import while others work: few where there are few cores."""
        cores = len(os.sched_getaffinity(0))
        return max(min(_MOST_AHEAD, (cores - num_helpers) // _AHEAD_CORES), 0)

    async def _measure(self, hardware: Child) -> None:
        hardware.give(Turn(_HARDWARE_S))
        await hardware.ended(min(_HARDWARE_S, self.left_s))
        if hardware.error:
            raise UserError(f"the card could not be measured: {hardware.error}.")
        self.facts |= hardware.facts

    async def _start_servers(self, hardware: Child, helpers: Sequence[Child]) -> None:
        """Start the servers as soon as their models are there; everyone is quiet until they are up."""
        for helper in helpers:
            if helper.spec.kind == "warm":
                # It computes on the CPU, so it need not wait.
                helper.give(Turn(_SERVER_S))
        await hardware.finished()
        # Its own waiter may learn of its end later than this task.
        self.facts |= hardware.facts
        if hardware.error:
            return
        for name, server in self.servers.items():
            if name == RUNS:
                await self._warm(helpers)
            server.give(self._turn(_SERVER_S))
        await asyncio.gather(*map(self._up, self.servers.values()))
        await self._warm(helpers)

    async def _up(self, server: Child) -> None:
        """Wait until a server is up, or has failed; one that takes too long is ended."""
        within_s = max(min(_SERVER_S, self.left_s), 0.0)
        try:
            await asyncio.wait_for(server.told.wait(), within_s)
        except TimeoutError:
            server.error = f"it was not up after {within_s:.0f} s (see {server.log})"
            await server.kill()
        if server.error:
            self._note(server.spec, server.error)

    async def _warm(self, helpers: Sequence[Child]) -> None:
        for helper in helpers:
            if helper.spec.kind == "warm":
                await helper.told.wait()
                self.facts |= helper.facts

    def _turn(self, seconds: float) -> Turn:
        urls = {name: str(s.facts["url"]) for name, s in self.servers.items() if "url" in s.facts}
        numbers = {name: cast(float, self.facts[name]) for name in ("matmul", "copy")}
        counts = {name: cast(int, self.facts[name]) for name in ("memory", "cards")}
        models = {"warm": str(self.facts["warm"])} if "warm" in self.facts else {}
        return Turn(
            seconds, numbers["matmul"], numbers["copy"], counts["memory"], counts["cards"], urls, models
        )

    async def _turn_of(self, entry: Entry, child: Child) -> None:
        name = entry.spec.name
        if entry.servers and not await self._has_servers(entry):
            await child.stop()
            return
        # A job that waits for servers to start needs the time after that.
        waits_s = 0.0 if self._settled.is_set() else _SERVER_S
        seconds = min(entry.seconds + waits_s, self.left_s)
        if seconds < _LEAST_S and not self.options.tiny:
            self.left_out.append(f"{name}: no time was left")
            self.on_note(f"{name}: no time is left")
            await child.stop()
            return
        started = time.monotonic()
        self.on_note(f"{name} begins, {self.left_s:.0f} s are left")
        child.give(self._turn(seconds))
        await child.ended(seconds)
        await child.kill()
        if child.error:
            self.failed.append(f"{name}: {child.error}")
            self.on_note(f"{name}: {child.error}")
        self.on_note(f"{name} took {time.monotonic() - started:.1f} s")

    async def _has_servers(self, entry: Entry) -> bool:
        """Whether the servers of a job are up, after a wait for them."""
        if RUNS in entry.servers and RUNS not in self.servers:
            await self._settled.wait()
            return True
        for name in entry.servers:
            server = self.servers.get(name)
            if server is not None:
                await server.told.wait()
            if server is None or server.error:
                why = server.error if server else "no SGLang: name its interpreter with --sglang-python"
                self.left_out.append(f"{entry.spec.name}: {why}")
                self.on_note(f"{entry.spec.name} is left out: {why}")
                return False
        await self._settled.wait()
        return True

    async def _stop_unneeded(self, rest: Sequence[Entry]) -> None:
        needed = {name for entry in rest for name in entry.servers}
        for name, server in self.servers.items():
            if name not in needed and server.is_running:
                await server.stop()

    def _row(self, spec: Spec, row: dict[str, JSON]) -> None:
        row = {"part": spec.kind, **row, "at_s": round(time.monotonic() - self._began, 1)}
        self.rows.append(row)
        if "error" in row:
            self.failed.append(f"{spec.name}, {row['name']}: {row['error']}")
        self.on_row(row)

    def _note(self, spec: Spec, sentence: str) -> None:
        self.on_note(f"{spec.name}: {sentence}")


def bench_gpu(
    options: Options, *, on_row: Callable[[dict[str, JSON]], None], on_note: Callable[[str], None]
) -> dict[str, JSON]:
    """Run the parts. on_row: called with each row as soon as it is known. on_note: with a line of progress.

    Returns:
        summary: a line for each row. rows, settings; left_out, failed: sentences; worse: figures that are
        worse than the best of this card by more than 5%.

    Raises:
        UserError: there is no such part, shape or variant, or no card, or the file of --compare has no
            figures.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-gpu-", dir=_where()) as temporary:
        common = common_spec(options, options.folder or Path(temporary))
        jobs = entries(options, common)
        _check_card(options)
        if options.compare is not None:
            baselines.read(options.compare)
        bench = Bench(options, common, on_row, on_note)
        run_until_signal(bench.run(jobs))
        if bench.failed and options.folder is None:
            # Their logs are named in the sentences.
            kept = Path(tempfile.mkdtemp(prefix="agentrl-gpu-logs-"))
            shutil.copytree(common.folder, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("models"))
            bench.failed = [sentence.replace(common.folder, str(kept)) for sentence in bench.failed]
    return _result(bench)


def _where() -> Path | None:
    """Memory, where there is enough of it: models are written and read again."""
    try:
        return _SHM if shutil.disk_usage(_SHM).free > _SHM_BYTES else None
    except OSError:
        return None


def _check_card(options: Options) -> None:
    from agentrl.processes.gpus import num_gpus

    if not options.tiny and not num_gpus():
        raise UserError(
            "torch sees no GPU here, and this benchmark measures GPUs; run it where one is, or try it with "
            "--tiny, which computes small models on the CPU."
        )


def _result(bench: Bench) -> dict[str, JSON]:
    card = str(bench.facts["card"])
    figures = baselines.figures_of_rows(bench.rows)
    path = bench.options.compare or baselines.file_of(card)
    is_compared = path.exists() and not (bench.options.tiny and bench.options.compare is None)
    worse = baselines.worse(figures, baselines.read(path)) if is_compared else []
    if bench.options.save:
        facts = {name: bench.rows[0][name] for name in ("torch", "transformers")}
        baselines.save(bench.options.compare or baselines.file_of(card), card, figures, facts)
    return {
        "summary": {f"{row['part']}, {row['name']}": row["line"] for row in bench.rows},
        "rows": [*bench.rows],
        "left_out": [*bench.left_out],
        "failed": [*bench.failed],
        "worse": [str(figure) for figure in worse],
        "settings": {
            "card": card,
            "cards": bench.facts["cards"],
            "compared_with": str(path) if is_compared else None,
            "seconds": bench.options.seconds,
            "variants": [*bench.options.variants],
            "sglang": {**bench.options.sglang},
            "ranks": bench.options.ranks,
            "tiny": bench.options.tiny,
        },
    }

"""A job in a process of its own: `python -m benchmarks.gpu.job SPEC`.

consumes: a JSON object a line on stdin. It imports what it needs and starts its ranks first; then it waits
for its turn, a line with the card and the servers. Before it times something it asks for quiet, and waits for
a line that says so: no server is starting then. Its rows are JSON lines on stdout; whatever else it or a
library prints goes to its log. on shutdown: where stdin ends, so does the job, within seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Final, TextIO, cast

from pydantic import TypeAdapter

from agentrl.errors import AgentRLError
from agentrl.types import JSON

KINDS: Final = {
    "hw": "hardware",
    "warm": "warm",
    "server": "server",
    "trainers": "trainers",
    "layer": "layer",
    "transports": "transports",
    "generator": "generator",
    "runs": "runs",
    "agree": "agree",
}
"""Kinds of jobs, and the module of each."""
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_END_S = 20.0
"""How long a job may take to end in good order."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a job is told when it starts.

    kind: see KINDS. argument: a variant of trainers, the part of a server, "" otherwise. folder: of models
    and logs. python: the interpreter of SGLang. sglang: arguments of servers. ranks: None = every card.
    """

    kind: str
    argument: str
    folder: str
    device: str
    tiny: bool
    python: str
    shape: str = "0.6B"
    sglang: Mapping[str, JSON] = field(default_factory=dict)
    ranks: int | None = None
    episodes: Sequence[int] = ()

    @property
    def name(self) -> str:
        """Its name in the log and in messages."""
        return f"{self.kind} {self.argument}".strip()


@dataclass(frozen=True, slots=True)
class Turn:
    """What a job learns when its turn begins.

    seconds: until it is ended. matmul: operations a second of the card's matrix product, measured. copy:
    bytes a second of a copy on it. memory: free bytes of the fullest card before anything ran there. cards:
    their number. urls: of the servers, by their part. models: directories that others have made.
    """

    seconds: float
    matmul: float = 0.0
    copy: float = 0.0
    memory: int = 0
    cards: int = 0
    urls: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)


_TURN: Final = TypeAdapter(Turn)


class Bench:
    """The job's side of its pipes. wire: its messages. replies: the lines that it waits for."""

    def __init__(self, spec: Spec, wire: TextIO, replies: TextIO) -> None:
        self.spec = spec
        self.folder = Path(spec.folder)
        self._wire, self._replies = wire, replies
        self._ends = 0.0

    def turn(self) -> Turn:
        """Wait for the turn; everything that needs no card is done by then."""
        turn = _TURN.validate_python(self._ask("ready"))
        self._ends = time.monotonic() + turn.seconds
        return turn

    def quiet(self) -> None:
        """Wait until no server is starting."""
        self._ask("quiet")

    @property
    def left_s(self) -> float:
        """Seconds until this job is ended."""
        return self._ends - time.monotonic()

    def row(
        self,
        name: str,
        line: str,
        figures: Mapping[str, JSON],
        best: Mapping[str, float] | None = None,
    ) -> None:
        """Report figures. line: for people. best: those that are compared with a card's best ones."""
        self._say({"row": {"name": name, "line": line, "best": dict(best or {}), **figures}})

    def tell(self, **facts: JSON) -> None:
        """Report what other jobs need to know."""
        self._say({"facts": facts})

    def note(self, sentence: str) -> None:
        """Report progress."""
        self._say({"note": sentence})

    def until_the_end(self) -> None:
        """Wait until the command has no more use for this job."""
        self._replies.read()

    def failed(self, sentence: str) -> None:
        """Report why the job ends early."""
        self._say({"failed": sentence})

    def _ask(self, what: str) -> dict[str, JSON]:
        self._say({"ask": what})
        line = self._replies.readline()
        if not line:
            raise SystemExit(1)
        return cast(dict[str, JSON], json.loads(line))

    def _say(self, message: Mapping[str, JSON]) -> None:
        self._wire.write(json.dumps(message, default=float) + "\n")
        self._wire.flush()


def main(arguments: Sequence[str]) -> int:
    """Run the job of a spec; the exit status."""
    spec = Spec(**json.loads(arguments[0]))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Libraries print to stdout, too.
    wire = os.fdopen(os.dup(_STDOUT), "w", encoding="utf-8")
    os.dup2(_STDERR, _STDOUT)
    bench = Bench(spec, wire, sys.stdin)
    try:
        asyncio.run(import_module(f"benchmarks.gpu.{KINDS[spec.kind]}").run(bench))
    except AgentRLError as error:
        bench.failed(str(error))
        return 1
    return 0


def argument_of(spec: Spec) -> str:
    """The command-line argument that `main` reads."""
    return json.dumps(asdict(spec))


def _end_with_stdin() -> None:
    """End this process soon after the command, also where that was killed."""
    pipe = select.poll()
    pipe.register(_STDIN, 0)
    pipe.poll()
    time.sleep(_END_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

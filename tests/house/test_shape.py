"""The shape of the package may only become simpler: numbers that only fall, and the files of a step."""

from __future__ import annotations

import sys
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType

import pytest

from agentrl.run.monitor import Monitor
from tests.flow.runs import WARM, train
from tests.house.shape import MEASURES, PACKAGE
from tests.house.source import ROOT

LEDGER: Mapping[str, int] = tomllib.loads((Path(__file__).parent / "debts.toml").read_text())["shape"]


@pytest.mark.parametrize("measure", MEASURES)
def test_the_package_becomes_simpler(measure: str) -> None:
    places, allowed = MEASURES[measure](), LEDGER[measure]
    listing = "\n  ".join(places)
    assert len(places) <= allowed, f"{len(places)} {measure}, {allowed} are allowed; do without:\n  {listing}"
    assert len(places) >= allowed, f"only {len(places)} {measure} are left: lower the number in debts.toml"


class Tracer:
    """Remembers the functions that run while it is on, in every thread that starts in its block."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self._on = False

    def __enter__(self) -> Tracer:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *raised: object) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self._on and event == "call":
            self.codes.add(frame.f_code)

    def switch(self, step: int, metrics: Mapping[str, float]) -> None:
        """A callback of a run: on after the first iteration, off after the second."""
        if "train/loss" in metrics:
            self._on = not self.codes

    def functions(self) -> set[tuple[str, str]]:
        """The file (in the package) and the name of each."""
        root = f"{ROOT / PACKAGE}/"
        return {
            (code.co_filename.removeprefix(root), code.co_qualname)
            for code in self.codes
            # Comprehensions and lambdas are expressions of the function around them.
            if code.co_filename.startswith(root) and not code.co_name.startswith("<")
        }


def test_a_step_runs_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It looks once a second, so that a short step has it by luck alone.
    monkeypatch.setattr(Monitor, "_watch", lambda monitor, loop, ident: None)
    with Tracer() as tracer:
        settings = {**WARM, "num_rollout": 3, "eval_interval": 1000}
        train("Bandit", tmp_path, "traced", callback=tracer.switch, **settings)
    functions = tracer.functions()
    files = {file for file, _ in functions}
    assert {"envs/play.py", "trainer/torch/worker.py", "rollout/producer.py"} <= files
    assert len(files) <= LEDGER["files_of_a_step"], "\n".join(sorted(files))
    assert len(functions) <= LEDGER["functions_of_a_step"], "\n".join(map(" ".join, sorted(functions)))

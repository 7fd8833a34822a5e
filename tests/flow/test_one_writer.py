"""Two runs of one name: the second is refused before it writes anything, whenever it comes."""

from __future__ import annotations

import os

import pytest

from agentrl.errors import RunBusyError, RunExistsError
from agentrl.records.history import attempts, locked
from agentrl.run.resuming import attempt_at, start_of
from agentrl.view.console import RunConsole
from tests.flow.runs import options_of, train
from tests.records.test_history import contents


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_of_the_name_is_refused_before_it_writes(tmp_path, resume):
    """Also before the first has measured anything, and with settings of its own."""
    folder = tmp_path / "x"
    with locked(folder):
        (folder / "config.toml").write_text("of the first")
        before = contents(folder)
        with pytest.raises(RunBusyError, match=rf"another process works on {folder} \(process {os.getpid()}"):
            train("Struck", tmp_path, "x", resume=resume)
        assert contents(folder) == before


def test_a_run_whose_name_is_taken_in_the_meantime_is_refused_before_it_writes(tmp_path):
    """Both found the name free; the other was faster, and has ended."""
    start = start_of(None, options_of("Struck", tmp_path, "x"), resume=False)
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (folder / "config.toml").write_text("of the first")
    with (
        pytest.raises(RunExistsError, match="already holds a run"),
        attempt_at(start, RunConsole(quiet=True)),
    ):
        raise AssertionError("it began")
    assert (folder / "config.toml").read_text() == "of the first"
    assert not attempts(folder)


def test_a_name_is_not_taken_by_a_run_that_only_was_to_begin(tmp_path):
    start_of(None, options_of("Struck", tmp_path, "x"), resume=False)
    assert list(tmp_path.iterdir()) == []

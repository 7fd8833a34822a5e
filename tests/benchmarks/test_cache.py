"""Results that are measured once."""

from __future__ import annotations

import pytest

from agentrl.errors import RunExistsError
from benchmarks.cache import cached_result


def never():
    raise AssertionError("it ran")


def test_a_result_is_measured_once(tmp_path):
    folder = tmp_path / "arm"
    first = cached_result(folder, {"seed": 1}, lambda: {"score": 0.5})
    assert first == {"settings": {"seed": 1}, "score": 0.5}
    assert cached_result(folder, {"seed": 1}, never) == first
    with pytest.raises(RunExistsError, match="measured with other settings; choose another --output-dir"):
        cached_result(folder, {"seed": 2}, never)


def test_an_interrupted_run_starts_over(tmp_path):
    folder = tmp_path / "arm"

    def interrupted():
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_result(folder, {}, interrupted)
    assert (folder / "half").exists()
    assert (
        cached_result(folder, {}, lambda: {"is_leftover": (folder / "half").exists()})["is_leftover"] is False
    )


def test_a_folder_without_results_of_a_benchmark_is_not_touched(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(RunExistsError, match="not a benchmark's"):
        cached_result(tmp_path, {}, never)
    assert (tmp_path / "mine").exists()

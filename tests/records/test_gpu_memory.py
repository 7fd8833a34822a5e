"""Who holds the memory of a GPU, as a driver says it: a program in place of `nvidia-smi`, real processes."""

from __future__ import annotations

import os
import stat
import sys

import pytest
import torch

from agentrl.errors import TrainerError
from agentrl.records.gpu_memory import held_text, holders, is_out_of_memory
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.launch.rank import naming_holders
from agentrl.trainer.torch.plan import WORKER

GIB = 2**30


def driver(folder, monkeypatch, *, total_gib, held=()):
    """An `nvidia-smi` of one GPU of this size, on which these processes (pid, name, MiB) hold memory."""
    apps = "".join(f"GPU-a, {pid}, {name}, {mib}\\n" for pid, name, mib in held)
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
case $1 in
--query-gpu=index,uuid,name,memory.total) echo 0, GPU-a, H100, {total_gib * 1024};;
--query-gpu=uuid) echo GPU-a;;
--query-compute-apps=*) printf '{apps}';;
esac
"""
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_ranks_are_named_and_others_as_the_driver_names_them(tmp_path, monkeypatch):
    ranks = Processes(2, tmp_path / "ranks", preloaded=WORKER)
    try:
        held = [(999_999_999, "/usr/bin/python3", 512), (ranks.pids[1], "[Not Found]", 2048)]
        driver(tmp_path, monkeypatch, total_gib=80, held=held)
        first, second = holders()
        assert (first.gpu, first.pid, first.name, first.held) == (0, ranks.pids[1], "rank 1", 2 * GIB)
        assert (second.name, second.held) == ("python3", GIB // 2)
        assert held_text() == (
            f"GPU 0: rank 1 (process {ranks.pids[1]}) 2.0 GiB, python3 (process 999999999) 0.5 GiB"
        )
    finally:
        ranks.close()


def test_without_a_driver_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert holders() == []
    assert held_text() == ""


def test_a_driver_that_says_that_it_does_not_know_is_no_error(tmp_path, monkeypatch):
    driver(tmp_path, monkeypatch, total_gib=80, held=[(1, "[N/A]", "[N/A]")])
    assert holders() == []


def test_the_error_of_a_full_gpu_names_who_holds_it_and_what_to_lower(tmp_path, monkeypatch):
    driver(tmp_path, monkeypatch, total_gib=80, held=[(os.getpid(), sys.executable, 1024)])
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
    named = r"its GPU is full \(GPU 0: .* 1\.0 GiB\); lower max_tokens_per_gpu"
    with pytest.raises(TrainerError, match=named), naming_holders():
        raise torch.OutOfMemoryError(text)
    with pytest.raises(RuntimeError, match="a mistake"), naming_holders():
        raise RuntimeError("a mistake")


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB.",
        "torch.AcceleratorError: CUDA error: out of memory",
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1.",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ],
)
def test_the_errors_of_torch_and_sglang_are_recognised(line):
    assert is_out_of_memory(line)
    assert not is_out_of_memory("the world has no memory of it")

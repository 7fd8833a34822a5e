"""A model too large for the driver: servers and ranks open the user's own directory, and nobody copies it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.assembly.model import fresh_source
from agentrl.assembly.sections import ModelSection
from agentrl.weights.hf.fresh import draw_weights
from tests.engine.serving import ROOT, sglang_python
from tests.flow.runs import HEARING
from tests.flow.worlds import Bandit

MIB = 1 << 20
SMALL = ModelSection(num_layers=1, hidden_size=32, ffn_hidden_size=32, kv_channels=16, vocab_size=320)
LARGE = SMALL.model_copy(
    update={"num_layers": 17, "hidden_size": 1024, "ffn_hidden_size": 4096, "kv_channels": 512}
)
SETTINGS = {
    "env": "tests.flow.worlds:Bandit",
    "engine": "sglang",
    "trainer": "megatron",
    "actor_num_gpus_per_node": 1,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 8,
    "num_rollout": 1,
    "eval_episodes": 1,
    "max_context_len": 256,
}
PATIENCE_S = 240.0

pytestmark = pytest.mark.full


def model_in(folder: Path, section: ModelSection) -> Path:
    """A model directory."""
    env = Bandit()
    draw_weights(fresh_source(section, env, env.dialect, seed=0, folder=folder).directory, 0)
    return folder


def started_with(model: Path, place: Path) -> tuple[int, int]:
    """Peak memory of a run's driver until its ranks have the model, and what it has written (bytes)."""
    options = {**SETTINGS, "hf_checkpoint": model, "output_dir": place, "name": "x"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags.append(f"--sglang-python={sglang_python()}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = place / "x" / "trainer" / "rank-0.log"
    place.mkdir()
    with (place / "out.txt").open("w") as out:
        command = [sys.executable, "-c", HEARING, "train", *flags]
        driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (log.exists() and "attention:" in log.read_text()):
                assert driver.poll() is None, (place / "out.txt").read_text()[-2000:]
                assert time.monotonic() < deadline, "the ranks never came up"
                time.sleep(0.02)
            status = Path(f"/proc/{driver.pid}/status").read_text()
            driver.send_signal(signal.SIGINT)
            driver.wait(60)
        finally:
            driver.kill()
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    # A run that was stopped saves its weights and its state: these are no copies to start from.
    saved = {"checkpoint", "checkpoints"}
    files = [path for path in place.rglob("*") if path.is_file() and saved.isdisjoint(path.parts)]
    return peak_kib * 1024, sum(path.stat().st_size for path in files)


def test_a_model_of_a_gibibyte_costs_the_driver_nothing_and_is_not_copied(tmp_path):
    small = model_in(tmp_path / "small", SMALL)
    large = model_in(tmp_path / "large", LARGE)
    assert (large / "model.safetensors").stat().st_size >= 1024 * MIB
    peak, written = started_with(large, tmp_path / "with-large")
    empty, _ = started_with(small, tmp_path / "with-small")
    print(f"driver {peak / MIB:.0f} MiB, with a small model {empty / MIB:.0f}; wrote {written / MIB:.1f} MiB")
    assert peak - empty <= 150 * MIB
    assert written < 20 * MIB

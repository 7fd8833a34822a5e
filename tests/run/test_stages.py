"""What stages took."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from agentrl.envs.check.traces import Trace, present
from agentrl.run.recording import memory_table
from agentrl.run.stages import StageTime, Stopwatch, cpu_time, tree_cpu_time

BUSY = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
NAMED = "open('/proc/self/comm', 'wb').write(b'\\xff) 1')\n" + BUSY


def test_the_time_of_a_stage_counts_processes_that_run_and_that_ended():
    watch = Stopwatch()
    with watch.stage("busy", 3):
        process = subprocess.Popen(
            [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.stdout.readline()
        running = cpu_time()
        assert 0.45 <= tree_cpu_time(process.pid) < 5.0
        process.communicate(b"\n")
        assert cpu_time() >= running - 0.05
    with watch.stage("idle"):
        time.sleep(0.01)
    busy, idle = watch.stages
    assert (busy.steps, idle.steps) == (3, 1)
    assert 0.45 <= busy.cpu_s < 5.0
    assert idle.cpu_s < 0.3


async def test_a_process_may_have_any_name(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert b"\xff" in Path(f"/proc/{process.pid}/comm").read_bytes()
        assert 0.0 < tree_cpu_time(process.pid) < cpu_time()
        assert any(row.split()[0] == str(process.pid) for row in memory_table())
        assert Trace("process", "\N{REPLACEMENT CHARACTER}) 1") in present(tmp_path)
    finally:
        process.communicate(b"\n")


def test_the_stages_of_an_earlier_attempt_are_added():
    watch = Stopwatch([StageTime("RL", 3, 10.0, 20.0), StageTime("evaluation", 1, 1.0, 1.0)])
    with watch.stage("RL"):
        pass
    rl, evaluation = watch.stages
    assert (rl.steps, round(rl.wall_s), round(rl.cpu_s)) == (4, 10, 20)
    assert evaluation == StageTime("evaluation", 1, 1.0, 1.0)

"""Whole runs on several ranks, as processes: started by this or another process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.megatron.plan import WORKER
from agentrl.trainer.ranks import RankTrainer
from tests.flow.runs import HEARING, TINY, WARM

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0
END_S = 20.0
"""Seconds: what a rank may take to notice that all is over, on a slow machine with much to do."""
# Two ranks share a head only where there are two of keys and values.
SETTINGS = {
    **TINY,
    **WARM,
    "trainer": "megatron",
    "num_query_groups": 2,
    "num_threads": 1,
    "eval_episodes": 16,
}
ENDLESS = {"num_rollout": 100_000, "eval_interval": 100_000}


def flags(folder: Path, *, world: str = "Bandit", **settings) -> list[str]:
    """`agentrl train ...` without its first word; the run is `folder`/x."""
    options = {
        **SETTINGS,
        "env": f"tests.flow.worlds:{world}",
        "output_dir": folder,
        "name": "x",
        "actor_num_gpus_per_node": 2,
        "tensor_model_parallel_size": 2,
        **settings,
    }
    return ["train", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]


@contextmanager
def running(
    command: Sequence[str], folder: Path, number: int = 0, **variables: object
) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, as a terminal would start it. It prints to `folder`/NUMBER.txt."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = dict(os.environ) | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "TMPDIR": str(temporary),
        **{name: str(value) for name, value in variables.items()},
    }
    with (folder / f"{number}.txt").open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        remaining = descendants(process.pid)
        process.kill()
        process.wait()
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


def train_command(folder: Path, **settings) -> list[str]:
    """A run in a process that hears Ctrl-C."""
    return [sys.executable, "-c", HEARING, *flags(folder, **settings)]


def output_of(folder: Path, number: int = 0) -> str:
    """What a command has printed so far."""
    return (folder / f"{number}.txt").read_text()


def free_port() -> int:
    """Of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return int(holder.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """All that a process has started, and what that has."""
    pids = []
    # A process may end while it is looked at.
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                pids += [child, *descendants(child)]
    return pids


def ranks_of(pid: int) -> list[int]:
    """The processes of ranks that a process has started, in their order."""
    return [child for child in descendants(pid) if b"rank-" in b" ".join(words_of(child)[-2:])]


def words_of(pid: int) -> list[bytes]:
    """The command line of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(
    happened: Callable[[], bool], within_s: float = PATIENCE_S, message: Callable[[], str] = str
) -> None:
    """Wait for something that has to happen."""
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, message()
        time.sleep(0.05)


def trained(folder: Path, steps: int = 2) -> bool:
    """Whether a run has made so many steps of RL."""
    metrics = folder / "x" / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("train/loss") >= steps


def wait_for_training(process: subprocess.Popen[str], folder: Path) -> None:
    """Until the run is in mid-RL."""

    def far() -> bool:
        assert process.poll() is None, output_of(folder)
        return trained(folder)

    wait_until(far, message=lambda: output_of(folder))


def megatron_trainer(plan, folder: Path, *, bucket_bytes: int = 64 << 20) -> RankTrainer:
    """The trainer over processes, which end where it cannot begin."""
    processes = Processes(plan.world_size, folder, preloaded=WORKER)
    try:
        return RankTrainer(processes, plan, bucket_bytes=bucket_bytes)
    except ConfigError:
        processes.close()
        raise


def processes_on(plan, folder: Path) -> Processes:
    """Ranks that have begun with a plan."""
    processes = Processes(plan.world_size, folder, preloaded=WORKER)
    processes.begin(plan)
    return processes

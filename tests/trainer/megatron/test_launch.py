"""Ranks that are processes of this machine: all run or none does, whoever is killed or interrupted."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import agentrl
from agentrl.errors import TrainerError
from agentrl.losses import PolicyLoss
from agentrl.processes.remote import call_all
from agentrl.records import reconcile
from agentrl.trainer.launch.rank import RankProcess
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.plan import MegatronPlan
from agentrl.trainer.plan import Learning, Worker
from agentrl.weights.hf.export import save_model
from tests.flow.runs import metrics_of
from tests.trainer.megatron.launching import (
    END_S,
    ENDLESS,
    SETTINGS,
    alive,
    megatron_trainer,
    output_of,
    processes_on,
    ranks_of,
    running,
    train_command,
    trained,
    wait_for_training,
    wait_until,
)
from tests.trainer.megatron.models import model_of
from tests.trainer.megatron.test_megatron_trainer import RecordingSink
from tests.trainer.tiny import batch, settings, tokenizer

TP = {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2}


class Sleeps:
    """A loss that takes its time, and says that it has begun."""

    def __init__(self, mark: Path, seconds: float):
        self.mark, self.seconds = mark, seconds
        self.inner = PolicyLoss()

    def __call__(self, outputs, inputs):
        self.mark.touch()
        time.sleep(self.seconds)
        return self.inner(outputs, inputs)


class BreaksOnOne:
    """A loss that fails on tensor rank 1 alone, and leaves the others waiting for it."""

    def __init__(self):
        self.inner = PolicyLoss()

    def __call__(self, outputs, inputs):
        from megatron.core import parallel_state

        if parallel_state.get_tensor_model_parallel_rank() == 1:
            raise RuntimeError("the loss has a mistake")
        return self.inner(outputs, inputs)


class KillsOnTheWay(RecordingSink):
    """A sink that kills a process when it has the first bucket."""

    def __init__(self, victim: int):
        super().__init__()
        self.victim = victim

    async def put(self, bucket):
        os.kill(self.victim, signal.SIGKILL)
        wait_until(lambda: not alive(self.victim))
        await super().put(bucket)


def plan_in(folder: Path, loss=None, **layout) -> MegatronPlan:
    model = folder / "model"
    save_model(model_of("qwen3"), tokenizer(), str(model))
    learning = Learning(loss or PolicyLoss(), settings(max_tokens_per_gpu=64), 6)
    return MegatronPlan(layout=MegatronConfig(**layout), policy=learning, models={"old": str(model)})


def update_once(folder: str) -> None:
    """What a driver does that is killed meanwhile."""
    place = Path(folder)
    processes = processes_on(plan_in(place, Sleeps(place / "begun", 300.0)), place / "ranks")
    processes.call(Worker.update, batch())


@pytest.mark.full
def test_a_rank_ends_with_its_driver_in_the_middle_of_a_call_and_nothing_is_left(tmp_path):
    call = "import sys; from tests.trainer.megatron.test_launch import update_once; update_once(sys.argv[1])"
    with running([sys.executable, "-c", call, str(tmp_path)], tmp_path) as driver:
        wait_until((tmp_path / "begun").exists, message=lambda: output_of(tmp_path))
        ranks = ranks_of(driver.pid)
        assert len(ranks) == 1
        assert not strangers_may_come([driver.pid, *ranks])
        driver.kill()
        driver.wait()
        wait_until(lambda: not any(map(alive, ranks)), END_S)
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("agentrl")]


def strangers_may_come(pids) -> bool:
    """Whether a process listens at an address that other machines reach."""
    sockets = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            sockets.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    listening = []
    for name, loopback in (("tcp", "0100007F"), ("tcp6", f"{1 << 24:032X}")):
        for line in Path(f"/proc/{pids[0]}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                listening.append(words[1].startswith(loopback))
    assert listening, "gloo listens somewhere"
    return not all(listening)


@pytest.mark.full
async def test_a_call_that_was_interrupted_leaves_nothing_to_the_next(tmp_path):
    trainer = megatron_trainer(plan_in(tmp_path, Sleeps(tmp_path / "begun", 0.5)), tmp_path / "ranks")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            trainer.ranks.call(Worker.update, batch())
        await trainer.save(str(tmp_path / "saved"))
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.num_hidden_layers == 4
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        trainer.ranks.close()


@pytest.mark.full
async def test_a_rank_that_dies_while_nobody_listens_is_named_at_every_call(tmp_path):
    trainer = megatron_trainer(plan_in(tmp_path, **TP), tmp_path / "ranks")
    victim = trainer.ranks.pids[1]
    message = rf"rank 1 .*process {victim}\) was ended by SIGKILL"
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not alive(victim))
    with pytest.raises(TrainerError, match=message):
        await trainer.score(batch().samples)
    with pytest.raises(TrainerError, match=message):
        await trainer.save(str(tmp_path / "saved"))
    trainer.ranks.close()
    assert not any(map(alive, trainer.ranks.pids))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "ranks"]


@pytest.mark.full
@pytest.mark.parametrize("listening", [False, True])
def test_the_rank_that_failed_is_blamed_not_who_waited_for_it(tmp_path, listening):
    processes = processes_on(plan_in(tmp_path, BreaksOnOne(), **TP), tmp_path / "ranks")
    message = r"rank 1 .* RuntimeError: the loss has a mistake; the others were ended"
    if not listening:
        # Both have failed when somebody asks, rank 0 because rank 1 has gone.
        calls = call_all(processes._ranks, RankProcess.call, "update", (batch(),), {})
        processes._watched.unread = [*enumerate(calls)]
        wait_until(lambda: calls[1].is_done)
    with pytest.raises(TrainerError, match=message):
        processes.call(Worker.update, batch())
    assert not any(map(alive, processes.pids))
    assert "Traceback" in (tmp_path / "ranks" / "rank-1.log").read_text()


@pytest.mark.full
async def test_a_rank_that_dies_while_weights_travel_is_named(tmp_path):
    trainer = megatron_trainer(plan_in(tmp_path, **TP), tmp_path / "ranks", bucket_bytes=1000)
    victim, began = trainer.ranks.pids[0], time.monotonic()
    with pytest.raises(TrainerError, match=rf"rank 0 .*process {victim}\) was ended by SIGKILL"):
        await trainer.publish(KillsOnTheWay(victim), version=1)
    assert time.monotonic() - began < END_S
    assert not any(map(alive, trainer.ranks.pids))


def test_a_rank_that_dies_while_it_starts_is_named(tmp_path):
    victims = []

    def strike():
        wait_until(lambda: len(ranks_of(os.getpid())) == 2)
        victims.append(ranks_of(os.getpid())[1])
        os.kill(victims[0], signal.SIGKILL)

    killer = threading.Thread(target=strike)
    killer.start()
    with pytest.raises(TrainerError, match=r"rank 1 .*was ended by SIGKILL") as error:
        megatron_trainer(plan_in(tmp_path, **TP), tmp_path / "ranks")
    killer.join()
    assert f"process {victims[0]})" in str(error.value)
    assert not ranks_of(os.getpid())


@pytest.mark.faults
def test_a_rank_that_dies_in_mid_run_is_named_and_the_books_are_sound(tmp_path):
    def strike():
        wait_until(lambda: trained(tmp_path))
        os.kill(ranks_of(os.getpid())[1], signal.SIGKILL)

    killer = threading.Thread(target=strike)
    killer.start()
    config = {**SETTINGS, **ENDLESS, **TP, "env": "tests.flow.worlds:Slow"}
    with pytest.raises(TrainerError, match=r"rank 1 .*was ended by SIGKILL"):
        agentrl.train(quiet=True, output_dir=str(tmp_path), name="x", **config)
    killer.join()
    assert reconcile(tmp_path / "x").problems == ()
    assert not ranks_of(os.getpid())


@pytest.mark.faults
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM], ids=lambda sign: sign.name)
def test_a_run_that_is_killed_leaves_no_rank_and_no_file(tmp_path, sign):
    with running(train_command(tmp_path, world="Slow", **ENDLESS), tmp_path) as driver:
        wait_for_training(driver, tmp_path)
        ranks = ranks_of(driver.pid)
        assert len(ranks) == 2
        driver.send_signal(sign)
        driver.wait(END_S)
        wait_until(lambda: not any(map(alive, ranks)), END_S)
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("agentrl")]


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("everyone", [True, False])
def test_a_signal_ends_a_run_in_good_order(tmp_path, everyone, number):
    with running(train_command(tmp_path, world="Slow", **ENDLESS), tmp_path) as driver:
        wait_for_training(driver, tmp_path)
        ranks = ranks_of(driver.pid)
        # A terminal signals all processes of its group, and so do schedulers.
        (os.killpg if everyone else os.kill)(driver.pid, number)
        assert driver.wait(2 * END_S) == 128 + number
        assert not any(map(alive, ranks))
    assert "Stopped. Resume it with" in output_of(tmp_path)
    assert "Traceback" not in output_of(tmp_path)
    books = reconcile(tmp_path / "x")
    assert books.problems == ()
    assert books.trained == 64 * sum("train/loss" in row for row in metrics_of(tmp_path / "x"))
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "x" / "checkpoint", output_loading_info=True)
    assert not report["missing_keys"]


def test_a_port_that_is_taken_is_no_traceback():
    from agentrl.errors import UserError
    from agentrl.trainer.launch.rendezvous import host_store

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port} of 127.0.0.1 cannot be used"):
            host_store("127.0.0.1", port)

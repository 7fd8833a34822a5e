"""Ranks that a launcher starts, torchrun or any other: they connect to rank 0, train as child ranks do, end
with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import ConfigError, TrainerError
from agentrl.observe import reconcile
from agentrl.trainer.launch import launched as launched_module
from agentrl.trainer.launch import rendezvous as rendezvous_module
from agentrl.trainer.launch.launched import connected_ranks, serve_launched
from agentrl.trainer.launch.launcher_env import LauncherEnv
from agentrl.trainer.launch.rendezvous import Rendezvous
from agentrl.trainer.megatron.plan import WORKER
from tests.flow.runs import HEARING
from tests.trainer.megatron.launching import (
    END_S,
    ENDLESS,
    alive,
    descendants,
    flags,
    free_port,
    output_of,
    ranks_of,
    running,
    train_command,
    wait_for_training,
    wait_until,
    words_of,
)

SHORT = {"num_rollout": 2, "eval_interval": 100, "eval_episodes": 8}
TWO_BY_TWO = {"actor_num_nodes": 2, "tensor_model_parallel_size": 2}


def torchrun(folder, *, nodes=1, node=0, port, **settings):
    """The command line of one node; a run on the `nodes` x 2 ranks of all."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={node}"]
    place = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command = folder / "hearing.py"
    command.write_text(HEARING)
    return [*launcher, *place, str(command), *flags(folder, **settings)]


@contextmanager
def launched(folder, size, **settings):
    """A process for every rank, each configured by its environment only; rank 0 handles Ctrl-C."""
    port = free_port()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                running(
                    train_command(folder, **settings),
                    folder,
                    number,
                    RANK=number,
                    WORLD_SIZE=size,
                    LOCAL_RANK=number % 2,
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                )
            )
            for number in range(size)
        ]


def weights_of(folder):
    return load_file(folder / "x" / "checkpoint" / "model.safetensors")


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5)


def weights_of_child_ranks(folder, **settings):
    """The trained weights of a run whose ranks are child processes."""
    with running(train_command(folder, **SHORT, **settings), folder) as process:
        assert process.wait(200) == 0, output_of(folder)
    return weights_of(folder)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_wrong_environment_is_reported_before_the_folder_is_made(tmp_path, nodes):
    variables = (
        {"WORLD_SIZE": 4, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1} if nodes == 1 else {}
    )
    with running(train_command(tmp_path, actor_num_nodes=nodes), tmp_path, **variables) as process:
        assert process.wait(END_S * 2) == 2
    message = (
        "WORLD_SIZE = 4 is not" if nodes == 1 else "actor_num_nodes = 2 needs cluster = ray, or a launcher"
    )
    assert output_of(tmp_path).startswith(f"agentrl: {message}")
    assert output_of(tmp_path).count("\n") == 1
    assert not (tmp_path / "x").exists()


def env_of(rank, world_size, port):
    return LauncherEnv(rank, world_size, rank, "127.0.0.1", port, has_agent_store=False, restart_count=0)


def driver_at(port):
    """The port that rank 0 listens on, and its token."""
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        pass
    return json.loads(Rendezvous("127.0.0.1", port, "agentrl-0").store().get("driver"))


def connect_rank(port, token, number):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(json.dumps([token, number, os.getpid(), "here"]).encode() + b"\n")
    return Connection(connection.detach())


@contextmanager
def in_thread(connect):
    """Run `connect` in another thread while this one waits for the ranks."""
    failures = []

    def run():
        try:
            connect()
        except (OSError, AssertionError) as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    assert failures == []


def wait_for_port(port):
    def is_listening():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_listening)


@pytest.mark.parametrize("line", [b"what\n", b"[" * 4000 + b"\n", b"wh", b""])
def test_ranks_are_in_order_and_strangers_are_refused(line, monkeypatch):
    port, pipes = free_port(), {}
    monkeypatch.setattr(launched_module, "_HELLO_S", 0.5)

    def connect():
        wait_for_port(port)
        driver_port, token = driver_at(port)
        # It has no token: it is refused, whatever it sends.
        pipes["stranger"] = socket.create_connection(("127.0.0.1", driver_port))
        pipes["stranger"].sendall(line)
        connect_rank(driver_port, "a guess", 1)
        for number in (2, 1):
            pipes[number] = connect_rank(driver_port, token, number)

    with in_thread(connect), connected_ranks(env_of(0, 3, port), timeout_s=30) as launched:
        for number, rank in enumerate(launched.members, start=1):
            rank.pipe.send(number)
        wait_until(lambda: 1 in pipes)
        assert [pipes[number].recv() for number in (1, 2)] == [1, 2]
    assert pipes[1].poll(END_S), "the driver closes its pipe"
    with pytest.raises(EOFError):
        pipes[1].recv()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((1, 1), "two processes have RANK = 1; give"),
        ((1, 3), "RANK = 3 came to the run of RANK = 0, which has WORLD_SIZE = 3; start"),
    ],
)
def test_a_duplicate_or_unknown_rank_is_refused(numbers, message):
    port, pipes = free_port(), []

    def connect():
        wait_for_port(port)
        driver_port, token = driver_at(port)
        pipes.extend(connect_rank(driver_port, token, number) for number in numbers)

    with (
        in_thread(connect),
        pytest.raises(ConfigError, match=message),
        connected_ranks(env_of(0, 3, port), timeout_s=30),
    ):
        raise AssertionError("it raised nothing")


def test_a_rank_that_disconnects_before_all_are_connected_is_named():
    port = free_port()

    def disconnect():
        wait_for_port(port)
        connect_rank(*driver_at(port), 2).close()

    with (
        in_thread(disconnect),
        pytest.raises(TrainerError, match=rf"rank 2 .*process {os.getpid()} on here\) has gone"),
        connected_ranks(env_of(0, 3, port), timeout_s=30),
    ):
        raise AssertionError("it raised nothing")


def test_driver_and_rank_time_out():
    port = free_port()
    with (
        pytest.raises(ConfigError, match=f"number 1, 2 did not come to 127.0.0.1:{port} in time; start"),
        connected_ranks(env_of(0, 3, port), timeout_s=0.2),
    ):
        raise AssertionError("it raised nothing")
    with pytest.raises(ConfigError, match=f"rank 0 was not at 127.0.0.1:{port} .* in time; start"):
        serve_launched(env_of(1, 3, port), WORKER, timeout_s=0.2)


def test_a_server_that_is_no_store_and_never_replies_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"no store of rank 0 answers at 127.0.0.1:{port} .*; both must"
        ):
            serve_launched(env_of(1, 3, port), WORKER, timeout_s=0.5)


def test_a_rank_that_connects_to_itself_is_not_connected_to_rank_0(monkeypatch):
    port, connect, connections = free_port(), socket.create_connection, []

    def from_that_port(address, timeout):
        connections.append(connect(address, timeout, source_address=address))
        return connections[-1]

    monkeypatch.setattr(socket, "create_connection", from_that_port)
    with pytest.raises(ConfigError, match=f"rank 0 was not at 127.0.0.1:{port} .* in time; start"):
        serve_launched(env_of(1, 3, port), WORKER, timeout_s=0.3)
    assert connections, "it connected to itself"


def test_an_unknown_host_is_reported(monkeypatch):
    monkeypatch.setattr(rendezvous_module, "_HOST_TIMEOUT_S", 0.5)
    elsewhere = env_of(0, 2, free_port())._replace(host="nowhere.invalid")
    with (
        pytest.raises(ConfigError, match=r"no store of rank 0 answers at nowhere.invalid:\d+ \(MASTER_ADDR"),
        connected_ranks(elsewhere, timeout_s=0.5),
    ):
        raise AssertionError("it raised nothing")


@pytest.mark.full
def test_torchrun_trains_to_the_same_weights_as_we_do(tmp_path):
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    ours.mkdir()
    theirs.mkdir()
    with running(torchrun(theirs, port=free_port(), **SHORT), theirs) as process:
        assert process.wait(200) == 0, output_of(theirs)
    # One run, one bar, one table.
    assert output_of(theirs).count("Report: ") == 1
    assert reconcile(theirs / "x").problems == ()
    assert sorted(path.name for path in (theirs / "x" / "trainer").glob("*.log")) == ["rank-0.log"]
    assert_same_weights(weights_of(theirs), weights_of_child_ranks(ours))


@pytest.mark.full
def test_two_nodes_train_to_the_same_weights_as_one(tmp_path):
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    ours.mkdir()
    theirs.mkdir()
    port = free_port()
    settings = {**SHORT, **TWO_BY_TWO, "nodes": 2, "port": port}
    with (
        running(torchrun(theirs, node=0, **settings), theirs, 0) as first,
        running(torchrun(theirs, node=1, **settings), theirs, 1) as second,
    ):
        assert [first.wait(300), second.wait(60)] == [0, 0], output_of(theirs) + output_of(theirs, 1)
    assert "Report: " not in output_of(theirs, 1)
    assert_same_weights(weights_of(theirs), weights_of_child_ranks(ours, actor_num_gpus_per_node=4))


@pytest.mark.full
def test_a_rank_of_a_launcher_that_dies_is_named_and_all_end(tmp_path):
    with launched(tmp_path, 2, world="Slow", **ENDLESS) as (driver, other):
        wait_for_training(driver, tmp_path)
        ours = ranks_of(driver.pid)
        assert len(ours) == 1
        other.kill()
        assert driver.wait(2 * END_S) == 1
        assert not any(map(alive, ours))
    message = (
        f"agentrl: rank 1 of the trainer (process {other.pid} on {socket.gethostname()}) has gone; the others"
    )
    assert message in output_of(tmp_path)
    assert "Traceback" not in output_of(tmp_path)
    assert reconcile(tmp_path / "x").problems == ()


@pytest.mark.faults
@pytest.mark.parametrize("number", [0, 1, 3])
def test_any_of_four_may_die(tmp_path, number):
    with launched(tmp_path, 4, world="Slow", **TWO_BY_TWO, **ENDLESS) as processes:
        driver = processes[0]
        wait_for_training(driver, tmp_path)
        victim = ranks_of(driver.pid)[0] if number == 0 else processes[number].pid
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        assert driver.wait(2 * END_S) == 1
        for process in processes[1:]:
            process.wait(2 * END_S)
        assert time.monotonic() - began < 2 * END_S
    assert f"agentrl: rank {number} of the trainer (process {victim}" in output_of(tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT], ids=lambda sign: sign.name)
def test_ranks_of_a_launcher_end_with_the_driver(tmp_path, sign):
    with launched(tmp_path, 2, world="Slow", **ENDLESS) as (driver, other):
        wait_for_training(driver, tmp_path)
        ours = ranks_of(driver.pid)
        driver.send_signal(sign)
        assert driver.wait(2 * END_S) == (-9 if sign is signal.SIGKILL else 130)
        assert other.wait(END_S) == 0, output_of(tmp_path, 1)
        wait_until(lambda: not any(map(alive, ours)), END_S)
    if sign is signal.SIGINT:
        assert (tmp_path / "x" / "checkpoint" / "model.safetensors").exists()


@pytest.mark.faults
def test_torchrun_ends_all_when_one_dies(tmp_path):
    with running(torchrun(tmp_path, port=free_port(), world="Slow", **ENDLESS), tmp_path) as process:
        wait_for_training(process, tmp_path)
        everyone = descendants(process.pid)
        workers = [pid for pid in everyone if str(tmp_path / "hearing.py").encode() in words_of(pid)]
        assert len(workers) == 2
        other = next(pid for pid in workers if not ranks_of(pid))
        os.kill(other, signal.SIGKILL)
        assert process.wait(3 * END_S) == 1
        wait_until(lambda: not any(map(alive, everyone)), END_S)
    assert f"pid: {other}" in output_of(tmp_path)


@pytest.mark.faults
def test_ctrl_c_in_torchruns_terminal_ends_the_run_in_good_order(tmp_path):
    with running(torchrun(tmp_path, port=free_port(), world="Slow", **ENDLESS), tmp_path) as process:
        wait_for_training(process, tmp_path)
        everyone = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(3 * END_S)
        wait_until(lambda: not any(map(alive, everyone)), END_S)
    assert "Stopped. Resume it with" in output_of(tmp_path)
    assert reconcile(tmp_path / "x").problems == ()
    assert (tmp_path / "x" / "checkpoint" / "model.safetensors").exists()


@pytest.mark.full
def test_the_call_belongs_to_rank_0(tmp_path):
    settings = f"trainer='megatron', actor_num_gpus_per_node=2, output_dir={str(tmp_path)!r}"
    call = f"import agentrl; agentrl.train({settings})"
    place = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with running([sys.executable, "-c", call], tmp_path, **place) as process:
        assert process.wait(2 * END_S) == 1
    assert "this process is rank 1 of a run; start it as `agentrl train`." in output_of(tmp_path)

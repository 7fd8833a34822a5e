"""Where ranks meet: strangers on this machine neither read nor fill the store, nor hold up the ranks."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from agentrl.errors import ConfigError
from agentrl.processes.remote import LOOPBACK
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.launch.rendezvous import RankStore

NOBODY = 65534
WORLD_SIZE = 2
VALUE_BYTES = 1 << 20
# The first messages of torch's store: its magic number, then SET with the lengths of a key and of a value.
SET = (
    b"\0"
    + struct.pack("<I", 0x3C85F7CE)
    + b"\1"
    + struct.pack("<Q", 7)
    + b"ranks/x"
    + struct.pack("<Q", 1 << 34)
)
AS_NOBODY = f"""
import os, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
reached = []
for path in sys.argv[1:]:
    try:
        open(path, "r+b").close()
        reached.append(path)
    except PermissionError:
        pass
print(reached)
"""


class Sums:
    """A worker whose ranks add their numbers."""

    def __init__(self, rank):
        self.rank = rank

    def total(self):
        number = torch.tensor([self.rank + 1.0])
        dist.all_reduce(number)
        return float(number)


class SumPlan:
    """Its plan: torch's own process group over the store."""

    world_size = WORLD_SIZE

    @contextmanager
    def worker(self, place):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            store=place.rendezvous.store(),
            rank=place.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=120),
        )
        yield Sums(place.rank)
        dist.destroy_process_group()


@pytest.fixture
def ranks(tmp_path):
    processes = Processes(WORLD_SIZE, tmp_path, preloaded="torch.distributed")
    try:
        yield processes
    finally:
        processes.close()


def ports_of(*pids):
    """The ports at which these processes listen, by the kernel's tables."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # that of the folder itself, too
                    sockets.add(os.readlink(path))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                ports.add(int(words[1].split(":")[1], 16))
    return ports


def attack(port):
    """A stranger who speaks the protocol of torch's store, and one who speaks none."""
    for data in (SET, b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n"):
        with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1) as client:
            client.sendall(data)


def is_store(port):
    """Whether torch's own client finds a store there that takes a key."""
    filled = threading.Event()

    def fill():
        timeout = timedelta(seconds=2)
        with suppress(dist.DistError):
            store = TCPStore(LOOPBACK, port, is_master=False, timeout=timeout, wait_for_workers=False)
            store.set("ranks/x", "0" * VALUE_BYTES)
            filled.set()

    # It has no timeout for a peer that accepts the connection and never replies, as gloo does.
    threading.Thread(target=fill, daemon=True).start()
    return filled.wait(10)


def test_the_client_that_the_attack_uses_fills_a_store_of_torch():
    server = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    assert server.port in ports_of(os.getpid())
    assert is_store(server.port)


def test_no_port_of_a_running_group_is_a_store_and_strangers_stop_nothing(ranks):
    ranks.begin(SumPlan())
    assert ranks.call(Sums.total) == [3.0] * WORLD_SIZE
    # Those of this process are of the tests' own; none is new with the ranks.
    ports = ports_of(*ranks.pids)
    assert ports, "gloo listens"
    assert [port for port in ports if is_store(port)] == []
    for port in ports:
        attack(port)
    assert ranks.call(Sums.total) == [3.0] * WORLD_SIZE


def test_every_plan_of_the_same_ranks_meets_anew(ranks):
    # Left over from the plan before, an address in the store leads to a port that nobody listens at any more.
    for _ in range(10):
        ranks.begin(SumPlan())
        assert ranks.call(Sums.total) == [3.0] * WORLD_SIZE


def test_the_driver_of_ranks_on_its_machine_listens_nowhere(tmp_path):
    before = ports_of(os.getpid())
    store = RankStore(LOOPBACK)
    assert ports_of(os.getpid()) == before
    store.rendezvous.store(5).set("x", "y")
    assert store.rendezvous.store(5).get("x") == b"y"


# Only root can act as another user, too.
@pytest.mark.parametrize("user", [NOBODY] if os.geteuid() == 0 else [])
def test_another_user_does_not_open_the_store(user):
    store = RankStore(LOOPBACK)
    path = store.rendezvous.place
    Path(path).open("r+b").close()
    others = [path, f"/proc/{os.getpid()}/environ"]
    shown = subprocess.run(
        [sys.executable, "-I", "-c", AS_NOBODY, *others], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "[]\n"


def test_a_store_that_is_gone_is_said_in_a_sentence():
    store = RankStore(LOOPBACK)
    rendezvous = store.rendezvous
    del store
    with pytest.raises(ConfigError, match=r"the store of the ranks .* is gone, or of another user"):
        rendezvous.store(1)


def test_between_machines_the_store_listens_at_the_address_of_the_host_alone(monkeypatch):
    # 127.0.0.2 stands for the address of a network here: it is one of this machine, too, and another one.
    monkeypatch.setattr("agentrl.trainer.launch.rendezvous.is_loopback", lambda host: False)
    store = RankStore("127.0.0.2")
    store.rendezvous.store(5).set("x", "y")
    assert store.rendezvous.store(5).get("x") == b"y"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, store.rendezvous.place), timeout=5)

"""Weights into real SGLang servers: what they sample afterwards is what transformers would."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports.base import Transport
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineError
from agentrl.protocols import Sampling
from tests.engine.feeding import Damaging
from tests.engine.serving import free_port, running, save_tiny, sglang_command
from tests.engine.subjects import VOCAB, delivery_of, logits_of, text_of, tiny

pytestmark = pytest.mark.full

PROMPTS = ([1, 10, 20, 30], [5, 6, 7])
GREEDY = Sampling(12, temperature=0.0)
KINDS = ("shared memory", "distributed", "disk", "delta")


def transport_of(kind: str, folder: Path) -> Transport:
    made: dict[str, Callable[[], Transport]] = {
        "shared memory": SharedMemory,
        "distributed": lambda: Distributed(timeout_s=60.0),
        "disk": lambda: Disk(folder / "disk"),
        "delta": lambda: Disk(folder / "disk", full_every=3, mirror=folder / "mirror"),
    }
    return made[kind]()


@contextmanager
def sglang_with_loader(folder: Path) -> Iterator[str]:
    port = free_port()
    command = sglang_command(save_tiny(folder / "model"), port, context_length=256)
    loader = ["/usr/bin/env", f"PYTHONPATH={LOADER_FOLDER}", *command, "--custom-weight-loader", LOADER]
    with running(loader, f"http://127.0.0.1:{port}", "/health_generate", folder / "server.log") as url:
        yield url


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(f"sglang{n}") for n in range(2)]
        yield [stack.enter_context(sglang_with_loader(folder)) for folder in folders]


class Feeding(NamedTuple):
    sink: SGLangSink
    servers: list[Server]
    lost: list[Server]

    async def send(self, version: int) -> None:
        delivery = delivery_of(tiny("qwen3", version))
        async with self.sink.begin(delivery.manifest, version) as transaction:
            for bucket in delivery.buckets:
                await transaction.put(bucket)
            await transaction.commit(delivery.checksum)

    async def serve(self, version: int, servers: Sequence[Server] | None = None) -> None:
        """What each server samples is what transformers would with the weights of this version."""
        for server in self.servers if servers is None else servers:
            policy = SGLangPolicy(server.url, vocab_size=VOCAB, decode=text_of)
            for prompt in PROMPTS:
                got = await policy.generate(prompt, GREEDY, session="a")
                ids = [*prompt, *got.token_ids.tolist()]
                wanted = logits_of(tiny("qwen3", version), ids)[len(prompt) - 1 : -1].argmax(-1)
                assert got.token_ids.tolist() == wanted.tolist()
                assert set(got.versions.tolist()) == {version}
            await policy.close()


@asynccontextmanager
async def feeding(servers: Sequence[Server], transport: Transport) -> AsyncIterator[Feeding]:
    lost: list[Server] = []

    @asynccontextmanager
    async def hold() -> AsyncIterator[None]:
        yield

    sink = SGLangSink(transport, lambda: servers, hold, lambda server, error: lost.append(server))
    yield Feeding(sink, list(servers), lost)
    await sink.close()
    for server in servers:
        await server.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_servers_serve_what_was_sent_or_what_they_served_before(
    urls: list[str], tmp_path: Path, kind: str
) -> None:
    armed: list[bool] = []
    before = set(os.listdir("/dev/shm"))
    transport = Damaging(transport_of(kind, tmp_path), armed)
    async with feeding([Server(url) for url in urls], transport) as made:
        for version in (1, 2, 3):
            await made.send(version)
            await made.serve(version)
        armed.append(True)
        with pytest.raises(EngineError):
            await made.send(4)
        await made.serve(3)
        assert (made.sink.version, made.lost) == (3, [])
        await made.send(5)
        await made.serve(5)
        await made.sink.restore(made.servers[0])
        await made.serve(5)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("agentrl")]


async def test_an_update_under_running_requests_ends_nobody_and_every_token_has_its_version(
    urls: list[str],
) -> None:
    """A flush while a request runs ends SGLang's scheduler: the sink waits until none does."""
    prompts = [[1, 2, 3 + n] for n in range(3)]
    async with feeding([Server(url) for url in urls], SharedMemory()) as made:
        await made.send(1)
        policies = [SGLangPolicy(server.url, vocab_size=VOCAB, decode=text_of) for server in made.servers]
        rule = Sampling(240, temperature=0.0)
        tasks = {
            asyncio.create_task(policy.generate(prompt, rule, session=f"{prompt}")): prompt
            for policy in policies
            for prompt in prompts
        }
        for policy in policies:
            await policy.generate([9], Sampling(1), session="beside")
        await made.send(2)
        seen = set()
        for task, prompt in tasks.items():
            got = await task
            seen.add(tuple(sorted(set(got.versions.tolist()))))
            for version in set(got.versions.tolist()):
                ids = [*prompt, *got.token_ids.tolist()]
                wanted = logits_of(tiny("qwen3", version), ids)[len(prompt) - 1 : -1].argmax(-1)
                mine = got.versions == version
                assert got.token_ids[mine].tolist() == wanted[mine].tolist()
        assert (1, 2) in seen, "no request ran across the update"
        for policy in policies:
            await policy.close()
        await made.serve(2)


class Doomed(Server):
    """A server that is killed when it is asked for its third bucket."""

    asked = 0

    async def update_from_tensor(self, *arguments, **more):
        self.kill_at_third()
        return await super().update_from_tensor(*arguments, **more)

    async def update_from_group(self, *arguments, **more):
        self.kill_at_third()
        return await super().update_from_group(*arguments, **more)

    def kill_at_third(self) -> None:
        self.asked += 1
        if self.asked == 3:
            port = self.url.rpartition(":")[2]
            os.kill(launched(port), signal.SIGKILL)


def launched(port: str) -> int:
    """The first process of the server at a port; those it started end with it."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # Others may end meanwhile.
        with suppress(OSError):
            commands[int(path.parent.name)] = path.read_bytes().split(b"\0")
    start = [b"-m", b"sglang.launch_server"]
    (pid,) = [pid for pid, words in commands.items() if words[1:3] == start and port.encode() in words]
    return pid


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["shared memory", "distributed"])
async def test_a_server_killed_in_mid_update_is_lost_and_the_other_serves_on(
    urls: list[str], tmp_path: Path, kind: str
) -> None:
    with sglang_with_loader(tmp_path) as url:
        servers = [Server(urls[0]), Server(url)]
        async with feeding(servers, transport_of(kind, tmp_path)) as made:
            await made.send(1)
            await made.serve(1)
            doomed = Doomed(url)
            servers[1] = doomed
            with pytest.raises(EngineError):
                await made.send(2)
            assert made.lost == [doomed]
            await made.serve(1, servers[:1])
            servers.remove(doomed)
            await made.send(3)
            await made.serve(3, servers)

"""Weights to real SGLang servers: afterwards they sample the same tokens as transformers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports.base import Transport
from agentrl.engine.sglang.transports.cuda_ipc import CudaIpc
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.inside import LOADER, LOADER_FOLDER
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineError
from agentrl.types.seams import Sampling
from agentrl.weights.codec import named_weights
from tests.engine import devices
from tests.engine.feeding import Damaging
from tests.engine.serving import free_port, running, save_tiny, sglang_command
from tests.engine.subjects import VOCAB, delivery_of, logits_of, text_of, tiny

pytestmark = pytest.mark.full

PROMPTS = ([1, 10, 20, 30], [5, 6, 7])
GREEDY = Sampling(12, temperature=0.0)
KINDS = ("cuda ipc", "shared memory", "distributed", "disk", "delta")


def transport_of(kind: str, folder: Path) -> Transport:
    factories: dict[str, Callable[[], Transport]] = {
        "cuda ipc": CudaIpc,
        "shared memory": SharedMemory,
        "distributed": lambda: Distributed(timeout_s=60.0),
        "disk": lambda: Disk(folder / "disk"),
        "delta": lambda: Disk(folder / "disk", full_every=3, mirror=folder / "mirror"),
    }
    return factories[kind]()


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


class Rig(NamedTuple):
    sink: SGLangSink
    servers: list[Server]
    lost: list[Server]
    policies: list[SGLangPolicy]

    async def send(self, version: int) -> None:
        delivery = delivery_of(tiny("qwen3", version))
        if self.sink.takes_device_memory:
            await self.sink.load(devices.PackedSnapshot(list(named_weights(tiny("qwen3", version)))), version)
            return
        async with self.sink.begin(delivery.manifest, version) as transaction:
            for bucket in delivery.buckets:
                await transaction.put(bucket)
            await transaction.commit(delivery.checksum)

    async def expect_version(self, version: int, servers: Sequence[Server] | None = None) -> None:
        """Expect each server to sample the same tokens as transformers with the weights of this version."""
        for server in self.servers if servers is None else servers:
            policy = SGLangPolicy(server.url, vocab_size=VOCAB, decode=text_of)
            for prompt in PROMPTS:
                completion = await policy.generate(prompt, GREEDY, session="a")
                ids = [*prompt, *completion.token_ids.tolist()]
                expected = logits_of(tiny("qwen3", version), ids)[len(prompt) - 1 : -1].argmax(-1)
                assert completion.token_ids.tolist() == expected.tolist()
                assert set(completion.versions.tolist()) == {version}
            await policy.close()


@asynccontextmanager
async def open_rig(servers: Sequence[Server], transport: Transport) -> AsyncIterator[Rig]:
    lost: list[Server] = []
    policies: list[SGLangPolicy] = []

    @asynccontextmanager
    async def hold() -> AsyncIterator[float]:
        async with AsyncExitStack() as stack:
            for policy in policies:
                await stack.enter_async_context(policy.held())
            yield time.perf_counter()
            for policy in policies:
                policy.salt = sink.salt

    sink = SGLangSink(transport, lambda: servers, hold, lambda server, error: lost.append(server))
    yield Rig(sink, list(servers), lost, policies)
    await sink.close()
    for server in servers:
        await server.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_servers_serve_the_new_version_or_the_previous_one(
    urls: list[str], tmp_path: Path, kind: str
) -> None:
    armed: list[bool] = []
    before = set(os.listdir("/dev/shm"))
    transport = Damaging(transport_of(kind, tmp_path), armed)
    async with open_rig([Server(url) for url in urls], transport) as rig:
        for version in (1, 2, 3):
            await rig.send(version)
            await rig.expect_version(version)
        armed.append(True)
        with pytest.raises(EngineError):
            await rig.send(4)
        await rig.expect_version(3)
        assert (rig.sink.version, rig.lost) == (3, [])
        await rig.send(5)
        await rig.expect_version(5)
        await rig.sink.restore(rig.servers[0])
        await rig.expect_version(5)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("agentrl")]


async def test_an_update_under_running_requests_loses_none_and_every_token_has_its_version(
    urls: list[str],
) -> None:
    """A load while a request runs would mix versions in its prefix: the sink waits until none runs.

    Nothing is flushed, so the salt keeps a resumed request from the prefix that older weights computed.
    """
    prompts = [[1, 2, 3 + n] for n in range(3)]
    async with open_rig([Server(url) for url in urls], SharedMemory()) as rig:
        await rig.send(1)
        policies = [SGLangPolicy(server.url, vocab_size=VOCAB, decode=text_of) for server in rig.servers]
        rig.policies.extend(policies)
        rule = Sampling(240, temperature=0.0)
        tasks = {
            asyncio.create_task(policy.generate(prompt, rule, session=f"{prompt}")): prompt
            for policy in policies
            for prompt in prompts
        }
        for policy in policies:
            await policy.generate([9], Sampling(1), session="short")
        await rig.send(2)
        combinations = set()
        for task, prompt in tasks.items():
            completion = await task
            combinations.add(tuple(sorted(set(completion.versions.tolist()))))
            for version in set(completion.versions.tolist()):
                ids = [*prompt, *completion.token_ids.tolist()]
                expected = logits_of(tiny("qwen3", version), ids)[len(prompt) - 1 : -1].argmax(-1)
                mine = completion.versions == version
                assert completion.token_ids[mine].tolist() == expected[mine].tolist()
        assert (1, 2) in combinations, "no request ran across the update"
        for policy in policies:
            await policy.close()
        await rig.expect_version(2)


class Doomed(Server):
    """A server that is killed when it receives weights."""

    async def update_from_tensor(self, *arguments, **more):
        self.kill()
        return await super().update_from_tensor(*arguments, **more)

    async def update_from_group(self, *arguments, **more):
        self.kill()
        return await super().update_from_group(*arguments, **more)

    def kill(self) -> None:
        port = self.url.rpartition(":")[2]
        os.kill(launched(port), signal.SIGKILL)


def launched(port: str) -> int:
    """The first process of the server at a port; its children end with it."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # Other processes may end meanwhile.
        with suppress(OSError):
            commands[int(path.parent.name)] = path.read_bytes().split(b"\0")
    start = [b"-m", b"sglang.launch_server"]
    (pid,) = [
        pid for pid, arguments in commands.items() if arguments[1:3] == start and port.encode() in arguments
    ]
    return pid


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["cuda ipc", "shared memory", "distributed"])
async def test_a_server_killed_in_mid_update_is_reported_and_the_other_keeps_serving(
    urls: list[str], tmp_path: Path, kind: str
) -> None:
    with sglang_with_loader(tmp_path) as url:
        servers = [Server(urls[0]), Server(url)]
        async with open_rig(servers, transport_of(kind, tmp_path)) as rig:
            await rig.send(1)
            await rig.expect_version(1)
            doomed = Doomed(url)
            servers[1] = doomed
            with pytest.raises(EngineError):
                await rig.send(2)
            assert rig.lost == [doomed]
            await rig.expect_version(1, servers[:1])
            servers.remove(doomed)
            await rig.send(3)
            await rig.expect_version(3, servers)

"""Weights through a process group of torch, for servers on any machine: gloo, or NCCL between GPUs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from agentrl.engine.sglang.control import Server, UpdateGroup
from agentrl.engine.sglang.transports.base import Delivery, Loaded, results_of
from agentrl.engine.sglang.transports.inside import SHARED, ranks_with_loader, read_back
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.protocols import Bucket, TensorSpec
from agentrl.serving import bound
from agentrl.weights.checksum import BucketChecksums, bucket_checksums
from agentrl.weights.codec import slices, torch_dtype

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_UNBLOCKING_S = 10.0


class _Sender(Protocol):
    """The common interface of gloo and NCCL."""

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work:
        """Send to all ranks."""

    def abort(self) -> None:
        """Close the connections, also during a collective."""


class _Group(NamedTuple):
    """A process group: its servers, and the communicator of rank 0."""

    name: str
    servers: tuple[Server, ...]
    sender: _Sender


class Distributed:
    """Broadcasts each bucket to all servers at once, from rank 0 of a process group for this purpose.

    The group is independent of the trainer's: torch's default group is neither used nor needed. It is reused
    from one version to the next, and created again where the servers have changed, where one of them does not
    report the version that was last sent to it (it was restarted), or after a failure.

    host: an address of this machine that the servers reach; the rendezvous store listens there. With gloo,
    the tensors themselves use the network interface in GLOO_SOCKET_IFNAME, or the one of the host name.
    backend: gloo transfers through CPU memory, wherever servers keep their weights. nccl sends from this
    process's first GPU, which must not be a server's: NCCL refuses two ranks on one GPU.
    timeout_s: for the rendezvous, and for each bucket.
    check_loaded: read back the loaded weights of a server, where it has our loader and tp_size = 1; it has to
    run on this machine then. Otherwise the server only confirms the update.
    folder: the directory of shared memory files, for reading back.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        backend: Literal["gloo", "nccl"] = "gloo",
        timeout_s: float = 120.0,
        check_loaded: bool = True,
        folder: Path = SHARED,
    ) -> None:
        self._host = host
        self._backend = backend
        self._timeout_s = timeout_s
        self._check_loaded = check_loaded
        self._folder = folder
        self._group: _Group | None = None
        # The rendezvous store. Dropping it fails every rank that still connects to it at once.
        self._store: TCPStore | None = None
        self._sent_versions: dict[Server, int] = {}
        self._readable: set[Server] = set()
        self._expected: tuple[Delivery, BucketChecksums] | None = None

    async def open(self, servers: Sequence[Server]) -> None:
        """Create the group, unless it is still valid.

        Raises:
            EngineUnavailableError: not all ranks joined in time.
            EngineError: a server refused.
        """
        if await self._group_is_valid(servers):
            return
        await self._destroy_group()
        facts = await asyncio.gather(*(server.facts() for server in servers))
        loaders = await asyncio.gather(*(ranks_with_loader(server) for server in servers))
        chosen = zip(servers, loaders, strict=True)
        self._readable = {server for server, ranks in chosen if ranks == 1 and self._check_loaded}
        await self._create_group(servers, [server_facts.tp_size for server_facts in facts])

    @asynccontextmanager
    async def staged(self, servers: Sequence[Server], delivery: Delivery) -> AsyncIterator[None]:
        """Compute the checksums that are compared afterwards."""
        del servers
        self._expected = delivery, await self._checksums(delivery)
        try:
            yield
        finally:
            self._expected = None

    async def _checksums(self, delivery: Delivery) -> BucketChecksums:
        if not self._readable:
            return BucketChecksums({}, 0)
        return await asyncio.to_thread(bucket_checksums, *delivery.buckets)

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Broadcast every bucket; then read back the servers that support it.

        Raises:
            EngineUnavailableError: a server dropped the connection, or took too long.
            EngineError: a server refused.
        """
        if self._group is None or self._group.servers != tuple(servers):
            raise EngineError("the process group has other members; call open with these servers first.")
        complete = False
        try:
            for bucket in delivery.buckets:
                await self._broadcast(self._group, bucket)
            complete = True
        finally:
            if not complete:
                await self._destroy_group()
        self._sent_versions = dict.fromkeys(servers, delivery.version)
        staged = self._expected
        if staged is not None and staged[0] is delivery:
            expected = staged[1]
        else:
            expected = await self._checksums(delivery)
        loaded = await results_of(self._loaded(server, delivery, expected) for server in servers)
        return dict(zip(servers, loaded, strict=True))

    async def close(self) -> None:
        """Destroy the group in this process and in the servers."""
        await self._destroy_group()

    async def _group_is_valid(self, servers: Sequence[Server]) -> bool:
        if self._group is None or self._group.servers != tuple(servers):
            return False
        reported = await asyncio.gather(*(server.weight_version() for server in servers))
        return [self._sent_versions.get(server) for server in servers] == list(reported)

    async def _create_group(self, servers: Sequence[Server], ranks: Sequence[int]) -> None:
        name, size = f"agentrl-{uuid.uuid4().hex}", 1 + sum(ranks)
        timeout = timedelta(seconds=self._timeout_s)
        # The socket is bound before the servers get its port.
        with bound(self._host, 0) as holder:
            holder.listen()
            port = int(holder.getsockname()[1])
            self._store = TCPStore(
                self._host,
                port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=holder.detach(),
            )
        group = UpdateGroup(name, self._host, port, size, self._backend)
        joining = [
            server.init_group(group, 1 + sum(ranks[:number]), self._timeout_s)
            for number, server in enumerate(servers)
        ]
        joined: list[_Sender] = []
        await self._run_collective(asyncio.to_thread(_join, joined, group, timeout), joining)
        self._group = _Group(name, tuple(servers), joined[0])

    async def _broadcast(self, members: _Group, bucket: Bucket) -> None:
        specs, flat = await asyncio.to_thread(_flattened, bucket)
        tensor = torch.from_numpy(flat).to(_DEVICES[self._backend])
        loading = [_load(server, members.name, specs) for server in members.servers]
        await self._run_collective(asyncio.to_thread(_send, members.sender, tensor, self._timeout_s), loading)

    async def _run_collective(
        self, sender: Coroutine[None, None, None], receivers: Sequence[Coroutine[None, None, None]]
    ) -> None:
        """Run all ranks of a collective to its end. Where one fails, the others are aborted."""
        tasks = [asyncio.ensure_future(call) for call in (sender, *receivers)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._timeout_s, return_when="FIRST_EXCEPTION")
            if len(done) == len(tasks) and not any(task.exception() for task in done):
                return
            self._abort_group()
            done, _ = await asyncio.wait(tasks, timeout=min(self._timeout_s, _UNBLOCKING_S))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        # A server's error is closer to the cause than the sender's timeout.
        for task in (*tasks[1:], tasks[0]):
            error = task.exception() if task in done else None
            if error is not None:
                raise error
        raise EngineUnavailableError(
            f"the process group of {len(receivers)} servers took over {self._timeout_s:g} s; see their logs."
        )

    def _abort_group(self) -> None:
        self._store = None
        if self._group is not None:
            self._group.sender.abort()

    async def _destroy_group(self) -> None:
        self._abort_group()
        members, self._group, self._sent_versions = self._group, None, {}
        if members is None:
            return
        leaving = [server.destroy_group(members.name) for server in members.servers]
        for result in await asyncio.gather(*leaving, return_exceptions=True):
            # A server that is not reachable is in no group.
            if isinstance(result, BaseException) and not isinstance(result, EngineError):
                raise result

    async def _loaded(self, server: Server, delivery: Delivery, expected: BucketChecksums) -> Loaded:
        if server not in self._readable:
            return Loaded(None, len(delivery.manifest))
        return await read_back(server, delivery, expected, self._folder)


async def _load(server: Server, group: str, specs: Sequence[TensorSpec]) -> None:
    await server.update_from_group(group, specs)


def _flattened(bucket: Bucket) -> tuple[list[TensorSpec], npt.NDArray[np.uint8]]:
    """A bucket's tensors, ordered so that each is aligned to its dtype: SGLang takes views of the buffer."""
    pieces = sorted(slices(bucket), key=lambda piece: -torch_dtype(piece[0].dtype).itemsize)
    specs = [spec for spec, _ in pieces]
    if specs == list(bucket.tensors):
        return specs, bucket.data
    return specs, np.concatenate([data for _, data in pieces])


def _join(joined: list[_Sender], group: UpdateGroup, timeout: timedelta) -> None:
    """Join as rank 0, under the store prefixes of torch's own groups; blocks until all ranks have joined.

    torch's own functions would register the group with the trainer's groups, or split it from them.
    """
    try:
        store = TCPStore(group.host, group.port, is_master=False, timeout=timeout, wait_for_workers=False)
        group_store = PrefixStore(f"{group.name}/", PrefixStore(group.name, store))
        device_store = PrefixStore(f"{_DEVICES[group.backend]}/", group_store)
        if group.backend == "gloo":
            joined.append(cast("_Sender", ProcessGroupGloo(device_store, 0, group.size, timeout)))
        else:
            joined.append(_nccl(device_store, group.size, timeout))
    except RuntimeError as error:
        raise EngineUnavailableError(f"not all servers joined the process group: {error}") from error


def _nccl(store: PrefixStore, size: int, timeout: timedelta) -> _Sender:
    # Only builds for GPUs have this class.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast("_Sender", ProcessGroupNCCL(store, 0, size, options))


def _send(sender: _Sender, tensor: torch.Tensor, timeout_s: float) -> None:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=timeout_s)
    try:
        sender.broadcast([tensor], options).wait(timedelta(seconds=timeout_s))
        if tensor.is_cuda:
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise EngineUnavailableError(f"a member left the process group: {error}") from error

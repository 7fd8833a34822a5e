"""Weights through a process group of torch, for servers on any machine: gloo, or NCCL between GPUs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from torch._C._distributed_c10d import TCPStore

from agentrl.engine.sglang.control import Server, UpdateGroup
from agentrl.engine.sglang.transports import group_sender
from agentrl.engine.sglang.transports.base import Delivery, Loaded, results_of
from agentrl.engine.sglang.transports.inside import SHARED, ahead_of, ranks_with_loader, read_back
from agentrl.errors import EngineError, EngineUnavailableError, TrainerError
from agentrl.http.serving import bound
from agentrl.types.seams import Snapshot, TensorSpec, Work
from agentrl.weights.checksum import BucketChecksums, bucket_checksums

_UNBLOCKING_S = 10.0


class _Members(NamedTuple):
    """A process group, its servers, and the last snapshot of the process that is rank 0."""

    group: UpdateGroup
    servers: tuple[Server, ...]
    snapshot: Snapshot


class Distributed:
    """Broadcasts each bucket to all servers at once, from rank 0 of a process group for this purpose.

    Rank 0 is the process that has the weights, which may be a trainer's rank on another machine. The group is
    independent of the trainer's: torch's default group is neither used nor needed. It is reused from one
    version to the next, and created again where the servers or that process have changed, where a server does
    not report the version that was last sent to it (it was restarted), or after a failure.

    host: an address of this machine that the servers and rank 0 reach; the rendezvous store listens there.
    With gloo, the tensors themselves use the network interface in GLOO_SOCKET_IFNAME, or the one that leads
    to `host`.
    backend: gloo transfers through CPU memory, wherever servers keep their weights. nccl sends from the first
    GPU of rank 0, which must not be a server's: NCCL refuses two ranks on one GPU.
    timeout_s: for the rendezvous, and for each bucket.
    check_loaded: read back the loaded weights of a server, where it has our loader and tp_size = 1; it has to
    run on this machine then. Otherwise the server only confirms the update.
    folder: the directory of shared memory files, for reading back.
    """

    takes_device_memory = False

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
        self._members: _Members | None = None
        # The rendezvous store. Dropping it fails every rank that still connects to it at once.
        self._store: TCPStore | None = None
        self._sent_versions: dict[Server, int] = {}
        self._readable: set[Server] = set()
        self._expected: tuple[Delivery, BucketChecksums] | None = None

    async def open(self, servers: Sequence[Server], snapshot: Snapshot) -> None:
        """Create the group, unless it is still valid.

        Raises:
            EngineUnavailableError: not all ranks joined in time.
            EngineError: a server refused.
        """
        if await self._group_is_valid(servers, snapshot):
            return
        await self._destroy_group()
        facts = await asyncio.gather(*(server.facts() for server in servers))
        loaders = await asyncio.gather(*(ranks_with_loader(server) for server in servers))
        chosen = zip(servers, loaders, strict=True)
        self._readable = {server for server, ranks in chosen if ranks == 1 and self._check_loaded}
        await self._create_group(servers, [server_facts.tp_size for server_facts in facts], snapshot)

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
        return await delivery.snapshot.run(bucket_checksums)

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Broadcast every bucket; then read back the servers that support it.

        Raises:
            EngineUnavailableError: a server dropped the connection, or took too long.
            EngineError: a server refused.
        """
        if ahead_of(delivery.manifest):
            raise EngineError(
                "SGLang gives the layers that it drafts with no weights of a process group: choose "
                "update_weights_transport = disk, or leave enable_mtp_training out."
            )
        members = self._members
        if members is None or not _is_group_of(members, servers, delivery.snapshot):
            raise EngineError("the process group has other members; call open with these servers first.")
        self._members = members._replace(snapshot=delivery.snapshot)
        complete = False
        try:
            for number in range(len(delivery.snapshot.parts)):
                await self._broadcast(self._members, number)
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

    async def _group_is_valid(self, servers: Sequence[Server], snapshot: Snapshot) -> bool:
        if self._members is None or not _is_group_of(self._members, servers, snapshot):
            return False
        reported = await asyncio.gather(*(server.weight_version() for server in servers))
        return [self._sent_versions.get(server) for server in servers] == list(reported)

    async def _create_group(
        self, servers: Sequence[Server], ranks: Sequence[int], snapshot: Snapshot
    ) -> None:
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
        members = _Members(group, tuple(servers), snapshot)
        await self._run_collective(members, partial(group_sender.join, group, self._timeout_s), joining)
        self._members = members

    async def _broadcast(self, members: _Members, number: int) -> None:
        specs = group_sender.in_order(members.snapshot.parts[number])
        sending = partial(group_sender.broadcast, members.group, number, self._timeout_s)
        loading = [_load(server, members.group.name, specs) for server in members.servers]
        await self._run_collective(members, sending, loading)

    async def _run_collective(
        self, members: _Members, sending: Work[None], receivers: Sequence[Coroutine[None, None, None]]
    ) -> None:
        """Run all ranks of a collective to its end. Where one fails, the others are aborted."""
        sender = members.snapshot.run(sending)
        tasks = [asyncio.ensure_future(call) for call in (sender, *receivers)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._timeout_s, return_when="FIRST_EXCEPTION")
            if len(done) == len(tasks) and not any(task.exception() for task in done):
                return
            await self._abort(members)
            done, _ = await asyncio.wait(tasks, timeout=min(self._timeout_s, _UNBLOCKING_S))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        ended = [task for task in (*tasks[1:], tasks[0]) if task in done]
        errors = [error for task in ended if (error := task.exception()) is not None]
        if errors:
            # A rank that has gone is the cause; else a server's error is closer to it than rank 0's timeout.
            raise next((error for error in errors if isinstance(error, TrainerError)), errors[0])
        raise EngineUnavailableError(
            f"the process group of {len(receivers)} servers took over {self._timeout_s:g} s; see their logs."
        )

    async def _abort(self, members: _Members) -> None:
        """Have rank 0 close its connections, so that every rank ends."""
        self._store = None
        # A process that has gone has no connections; one that hangs is left to the deadlines of the others.
        with suppress(TrainerError, TimeoutError):
            async with asyncio.timeout(_UNBLOCKING_S):
                await members.snapshot.run(partial(group_sender.leave, members.group))

    async def _destroy_group(self) -> None:
        members, self._members, self._sent_versions = self._members, None, {}
        if members is None:
            return
        await self._abort(members)
        leaving = [server.destroy_group(members.group.name) for server in members.servers]
        for result in await asyncio.gather(*leaving, return_exceptions=True):
            # A server that is not reachable is in no group.
            if isinstance(result, BaseException) and not isinstance(result, EngineError):
                raise result

    async def _loaded(self, server: Server, delivery: Delivery, expected: BucketChecksums) -> Loaded:
        if server not in self._readable:
            return Loaded(None, len(delivery.manifest))
        return await read_back(server, delivery, expected, self._folder)


def _is_group_of(members: _Members, servers: Sequence[Server], snapshot: Snapshot) -> bool:
    return members.servers == tuple(servers) and members.snapshot.process == snapshot.process


async def _load(server: Server, group: str, specs: Sequence[TensorSpec]) -> None:
    await server.update_from_group(group, specs)

"""Weights through a process group of torch, for servers on any machine: gloo, or NCCL between GPUs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from agentrl.engine.sglang.control import Server, UpdateGroup
from agentrl.engine.sglang.transports.base import Delivery, Loaded
from agentrl.engine.sglang.transports.inside import SHARED, ranks_with_loader, read_back
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.protocols import Bucket, TensorSpec
from agentrl.serving import bound
from agentrl.weights.checksum import BucketChecksums, bucket_checksums
from agentrl.weights.codec import slices, torch_dtype

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_UNBLOCKING_S = 10.0


class _Sender(Protocol):
    """What gloo and NCCL have in common."""

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work:
        """Send to everyone."""

    def abort(self) -> None:
        """Close the connections under whatever goes on."""


class _Members(NamedTuple):
    """A group that stands: who is in it, and how its sender talks to it."""

    name: str
    servers: tuple[Server, ...]
    sender: _Sender


class Distributed:
    """Broadcasts each bucket to all servers at once, from rank 0 of a group made for that.

    The group is no group of the trainer's: torch's default group is neither used nor needed. It is kept from
    one version to the next, and made anew where the servers are others, one of them does not tell the version
    that it was given last (it was started again), or anything broke.

    host: an address of this machine that the servers reach; rank 0 is met there. With gloo, the tensors
    themselves go through the interface that GLOO_SOCKET_IFNAME names, or the one of the host's name.
    backend: gloo goes through the memory of CPUs, wherever servers keep their weights. nccl sends from this
    process's first GPU, which may be no server's: NCCL refuses two ranks on one.
    timeout_s: for making the group, and for each bucket.
    check_loaded: read back what a server has loaded, where it has our loader and tp_size = 1; it has to
    run on this machine then. Otherwise what is known is that it took every tensor.
    folder: where files are kept in memory, for reading back.
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
        self._members: _Members | None = None
        # Where members find each other. Whoever still looks when it is dropped hears so at once.
        self._meeting_place: TCPStore | None = None
        self._given: dict[Server, int] = {}
        self._readable: set[Server] = set()

    async def open(self, servers: Sequence[Server]) -> None:
        """Make the group, unless it stands.

        Raises:
            EngineUnavailableError: not everyone came in time.
            EngineError: a server refused.
        """
        if await self._stands(servers):
            return
        await self._leave()
        facts = await asyncio.gather(*(server.facts() for server in servers))
        loaders = await asyncio.gather(*(ranks_with_loader(server) for server in servers))
        chosen = zip(servers, loaders, strict=True)
        self._readable = {server for server, ranks in chosen if ranks == 1 and self._check_loaded}
        await self._meet(servers, [one.tp_size for one in facts])

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Broadcast every bucket; then read back what can be.

        Raises:
            EngineUnavailableError: a server broke off, or took too long.
            EngineError: a server refused.
        """
        if self._members is None or self._members.servers != tuple(servers):
            raise EngineError("the process group has other members; call open with these servers before.")
        whole = False
        try:
            for bucket in delivery.buckets:
                await self._broadcast(self._members, bucket)
            whole = True
        finally:
            if not whole:
                await self._leave()
        self._given = dict.fromkeys(servers, delivery.version)
        sent = (
            await asyncio.to_thread(bucket_checksums, *delivery.buckets)
            if self._readable
            else BucketChecksums({}, 0)
        )
        loaded = await asyncio.gather(*(self._loaded(server, delivery, sent) for server in servers))
        return dict(zip(servers, loaded, strict=True))

    async def close(self) -> None:
        """Leave the group, and have the servers leave it."""
        await self._leave()

    async def _stands(self, servers: Sequence[Server]) -> bool:
        if self._members is None or self._members.servers != tuple(servers):
            return False
        told = await asyncio.gather(*(server.weight_version() for server in servers))
        return [self._given.get(server) for server in servers] == list(told)

    async def _meet(self, servers: Sequence[Server], ranks: Sequence[int]) -> None:
        name, size = f"agentrl-{uuid.uuid4().hex}", 1 + sum(ranks)
        timeout = timedelta(seconds=self._timeout_s)
        # A port that is ours before anyone is told of it.
        with bound(self._host, 0) as holder:
            holder.listen()
            port = int(holder.getsockname()[1])
            self._meeting_place = TCPStore(
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
        met: list[_Sender] = []
        await self._together(asyncio.to_thread(_join, met, group, timeout), joining)
        self._members = _Members(name, tuple(servers), met[0])

    async def _broadcast(self, members: _Members, bucket: Bucket) -> None:
        specs, flat = await asyncio.to_thread(_flattened, bucket)
        tensor = torch.from_numpy(flat).to(_DEVICES[self._backend])
        loading = [_load(server, members.name, specs) for server in members.servers]
        await self._together(asyncio.to_thread(_send, members.sender, tensor, self._timeout_s), loading)

    async def _together(
        self, ours: Coroutine[None, None, None], theirs: Sequence[Coroutine[None, None, None]]
    ) -> None:
        """Run both sides of a collective to their end. Where one fails, the others are told to give up."""
        tasks = [asyncio.ensure_future(one) for one in (ours, *theirs)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._timeout_s, return_when="FIRST_EXCEPTION")
            if len(done) == len(tasks) and not any(task.exception() for task in done):
                return
            self._break_off()
            done, _ = await asyncio.wait(tasks, timeout=min(self._timeout_s, _UNBLOCKING_S))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        # What a server says is closer to the cause than that nobody came.
        for task in (*tasks[1:], tasks[0]):
            error = task.exception() if task in done else None
            if error is not None:
                raise error
        raise EngineUnavailableError(
            f"the process group of {len(theirs)} servers took over {self._timeout_s:g} s; see their logs."
        )

    def _break_off(self) -> None:
        self._meeting_place = None
        if self._members is not None:
            self._members.sender.abort()

    async def _leave(self) -> None:
        self._break_off()
        members, self._members, self._given = self._members, None, {}
        if members is None:
            return
        leaving = [server.destroy_group(members.name) for server in members.servers]
        for answer in await asyncio.gather(*leaving, return_exceptions=True):
            # A server that is not there is in no group either.
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer

    async def _loaded(self, server: Server, delivery: Delivery, sent: BucketChecksums) -> Loaded:
        if server not in self._readable:
            return Loaded(None, len(delivery.manifest))
        return await read_back(server, delivery, sent, self._folder)


async def _load(server: Server, group: str, specs: Sequence[TensorSpec]) -> None:
    await server.update_from_group(group, specs)


def _flattened(bucket: Bucket) -> tuple[list[TensorSpec], npt.NDArray[np.uint8]]:
    """A bucket's tensors, ordered so that each begins where its dtype may: SGLang looks at them in place."""
    pieces = sorted(slices(bucket), key=lambda piece: -torch_dtype(piece[0].dtype).itemsize)
    specs = [spec for spec, _ in pieces]
    if specs == list(bucket.tensors):
        return specs, bucket.data
    return specs, np.concatenate([data for _, data in pieces])


def _join(met: list[_Sender], group: UpdateGroup, timeout: timedelta) -> None:
    """Join as rank 0, under the names that torch's own groups have in a store; blocks until all have joined.

    Built by hand: torch's own functions would make it part of the trainer's groups, or split it from them.
    """
    try:
        store = TCPStore(group.host, group.port, is_master=False, timeout=timeout, wait_for_workers=False)
        named = PrefixStore(f"{group.name}/", PrefixStore(group.name, store))
        prefixed = PrefixStore(f"{_DEVICES[group.backend]}/", named)
        if group.backend == "gloo":
            met.append(cast("_Sender", ProcessGroupGloo(prefixed, 0, group.size, timeout)))
        else:
            met.append(_nccl(prefixed, group.size, timeout))
    except RuntimeError as error:
        raise EngineUnavailableError(f"not all servers joined the process group: {error}") from error


def _nccl(store: PrefixStore, size: int, timeout: timedelta) -> _Sender:
    # Only builds for GPUs have it.
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

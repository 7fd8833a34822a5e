"""Control calls of one SGLang server: pausing, weights, versions, health. Free of torch.

    POST /pause_generation      {"mode": "abort"}: running requests end with their tokens, new ones wait
    POST /continue_generation   {}
    POST /flush_cache           400 while a request runs
    POST /abort_request         {"abort_all": true}: every request ends with its tokens
    POST /release_memory_occupation, /resume_memory_occupation   {"tags": ["weights", "kv_cache"]}
    POST /update_weights_from_* {"success": true, "message": ".."}, or 400
    POST /update_weight_version {"new_version": "3"}
    POST /load_lora_adapter     {"lora_name": "..", "lora_path": ".."}, or 400; /unload_lora_adapter
    POST /start_profile         {"output_dir": "..", "num_steps": 200}
    GET  /server_info           tp_size, custom_weight_loader      GET /model_info   weight_version

As observed on SGLang 0.5.15. Crashes of its scheduler are avoided here. Its own flush after an update
crashes it where a request still runs, so every update has `flush_cache: false`, and `flush` is a call of its
own. An unknown name of a loader or a group crashes it, so `facts` returns the loaders. A release while a
request runs, and a resumption of what was not released, crash it too (from its source): see `memory`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.connection import ServerConnection
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.types.seams import MemoryTag, TensorSpec

_FLUSH_RETRY_S = 0.05


class UpdateReply(wire.WireModel):
    """The reply to an update. checksum: of the loaded weights; only `agentrl serve` reports it."""

    success: bool
    message: str = ""
    checksum: int | None = None


class ReleaseReply(wire.WireModel):
    """The reply to a release. freed_bytes: as measured; only `agentrl serve` reports it."""

    freed_bytes: int | None = None


class ServerFacts(wire.WireModel):
    """A server's parallelism and loaders. custom_weight_loader: functions that an update may name.

    SGLang forwards weights to every tensor-parallel rank (tp_size), but not to data-parallel replicas
    (dp_size).
    """

    tp_size: Annotated[int, Field(ge=1)] = 1
    dp_size: Annotated[int, Field(ge=1)] = 1
    custom_weight_loader: list[str] | None = None


class UpdateGroup(NamedTuple):
    """A torch process group: rank 0 sends and hosts the store at host:port; servers are the other ranks."""

    name: str
    host: str
    port: int
    size: int
    backend: str


class ProfileRequest(NamedTuple):
    """What a server traces: its next forward passes (count), and where it writes that."""

    output_dir: str
    num_steps: int


class ServerWeights:
    """The calls of a server that move its weights, or set their version.

    in_doubt: an update got no reply: the server's weights or version may still change, so restart it.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None,
        *,
        timeout_s: float,
        update_timeout_s: float,
    ) -> None:
        self.url = url
        self.in_doubt = False
        self._connection = ServerConnection(url, headers or {})
        self._timeout_s = timeout_s
        self._update_timeout_s = update_timeout_s

    async def weight_version(self) -> int:
        """The version of the weights that it serves; 0 where none was set."""
        body = await self._connection.call("GET", "/model_info", timeout_s=self._timeout_s)
        return wire.version_of(wire.read(wire.ModelInfo, body, f"{self.url}/model_info").weight_version)

    async def set_version(self, version: int) -> None:
        """Set the version of the current weights."""
        payload = {"new_version": str(version), "abort_all_requests": False}
        await self._post_once("/update_weight_version", payload, self._timeout_s)

    async def update_from_disk(self, folder: str, version: int | None = None) -> UpdateReply:
        """Load the safetensors of a directory that the server can read. version: None = it stays.

        A truncated file crashes SGLang: read it here first.
        """
        payload = {"model_path": folder, "flush_cache": False}
        return await self._update("/update_weights_from_disk", payload, version)

    async def update_from_tensor(
        self,
        payloads: Sequence[bytes],
        load_format: str,
        version: int | None = None,
        *,
        drafts: bool = False,
    ) -> UpdateReply:
        """Send every rank its payload: a plain pickle of (name, tensor) pairs, without handles of processes.

        load_format: one of the loaders in `facts`. drafts: the model that the server drafts with gets them,
        too, before the policy; else it stays as it is.
        """
        payload = {
            "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
            "load_format": load_format,
            "flush_cache": False,
            "disable_draft_model": not drafts,
        }
        return await self._update("/update_weights_from_tensor", payload, version)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load adapters from a folder that the server can read, for requests that name them.

        It serves meanwhile. One that is loaded already is refused.
        """
        payload = {"lora_name": name, "lora_path": folder}
        await self._post_once("/load_lora_adapter", payload, self._update_timeout_s)

    async def unload_adapter(self, name: str) -> None:
        """Unload adapters, once the requests that name them have ended."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, self._update_timeout_s)

    async def init_group(self, group: UpdateGroup, rank: int, timeout_s: float) -> None:
        """Join a group; the server's first rank becomes `rank`. Ends when every member has joined."""
        payload = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", payload, timeout_s)

    async def destroy_group(self, name: str) -> None:
        """Leave a group."""
        await self._post("/destroy_weights_update_group", {"group_name": name}, self._timeout_s)

    async def update_from_group(
        self, name: str, specs: Sequence[TensorSpec], version: int | None = None
    ) -> UpdateReply:
        """Load the tensors that rank 0 broadcasts, end to end, as bytes.

        A group that the server did not join crashes its scheduler.
        """
        payload = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        return await self._update("/update_weights_from_distributed", payload, version)

    async def _update(self, path: str, payload: Mapping[str, object], version: int | None) -> UpdateReply:
        version_field = {} if version is None else {"weight_version": str(version)}
        body = await self._post_once(path, {**payload, **version_field}, self._update_timeout_s)
        reply = wire.read(UpdateReply, body, f"the reply of {self.url}{path}")
        if not reply.success:
            raise EngineError(f"{self.url} did not take the weights: {reply.message[:300]}")
        return reply

    async def _post_once(self, path: str, payload: Mapping[str, object], timeout_s: float) -> bytes:
        """Post what must not take effect at an unknown time: without a reply, the server is in doubt."""
        self.in_doubt = True
        try:
            body = await self._post(path, payload, timeout_s)
        except EngineUnavailableError:
            raise
        except EngineError:
            self.in_doubt = False
            raise
        self.in_doubt = False
        return body

    async def _post(self, path: str, payload: Mapping[str, object], timeout_s: float) -> bytes:
        return await self._connection.call("POST", path, json.dumps(payload).encode(), timeout_s=timeout_s)


class Server(ServerWeights):
    """One process of SGLang, or of `agentrl serve`. A server that is started again is another `Server`.

    url: of the server itself, not of a router. headers: sent with every call (`Authorization`).
    timeout_s: of a call that moves no weights. update_timeout_s: of one that does, and of a pause.

    released: memory that it does not have at present.

    Every call raises:
        EngineUnavailableError: the server is not reachable, dropped the connection, or took too long.
        EngineError: it refused; the message has its reason.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 30.0,
        update_timeout_s: float = 600.0,
    ) -> None:
        super().__init__(url, headers, timeout_s=timeout_s, update_timeout_s=update_timeout_s)
        self.released: set[MemoryTag] = set()
        self._facts: ServerFacts | None = None

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    async def pause(self) -> None:
        """End every request with its tokens so far, and hold new ones until `resume`."""
        # The other modes keep requests in the scheduler: its cache would be in use during an update.
        await self._post("/pause_generation", {"mode": "abort"}, self._update_timeout_s)

    async def resume(self) -> None:
        """Accept requests again, unless memory is released.

        Whoever asks for a token then, such as a health check of somebody else, would crash the scheduler.
        """
        if not self.released:
            await self._post("/continue_generation", {}, self._timeout_s)

    async def abort_all(self) -> None:
        """End every request with its tokens so far."""
        await self._post("/abort_request", {"abort_all": True}, self._timeout_s)

    async def end_all(self) -> None:
        """End every request with its tokens so far, also those that arrive meanwhile; wait for the last."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.abort_all()
                while not await self.flush():
                    await asyncio.sleep(_FLUSH_RETRY_S)
                    await self.abort_all()
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.url} has requests {self._timeout_s:g} s after they were aborted; restart it."
            ) from None

    async def flush(self) -> bool:
        """Drop all cached prefixes; False where a request runs, or has not left the scheduler yet."""
        try:
            await self._post("/flush_cache", {}, self._timeout_s)
        except EngineUnavailableError:
            raise
        except EngineError:
            return False
        return True

    async def drain(self) -> None:
        """Wait until no request is in the scheduler any more, and drop all cached prefixes."""
        try:
            async with asyncio.timeout(self._update_timeout_s):
                while not await self.flush():
                    await asyncio.sleep(_FLUSH_RETRY_S)
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.url} has requests in its scheduler after {self._update_timeout_s:g} s; restart it."
            ) from None

    async def release_memory(self, tags: Collection[MemoryTag]) -> int | None:
        """Free this memory; no request may run. The bytes, where the server measures them."""
        path = "/release_memory_occupation"
        body = await self._post(path, {"tags": sorted(tags)}, self._update_timeout_s)
        self.released.update(tags)
        if not body.startswith(b"{"):
            return None
        return wire.read(ReleaseReply, body, f"the reply of {self.url}{path}").freed_bytes

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Allocate memory that was released."""
        await self._post("/resume_memory_occupation", {"tags": sorted(tags)}, self._update_timeout_s)
        self.released.difference_update(tags)

    async def profile(self, folder: str, num_steps: int) -> None:
        """Have it trace its next forward passes (count) into a folder; it ends by itself."""
        await self._post("/start_profile", ProfileRequest(folder, num_steps)._asdict(), self._timeout_s)

    async def facts(self) -> ServerFacts:
        """The server's parallelism and loaders: asked once, since SGLang's scheduler is asked for its own."""
        if self._facts is None:
            body = await self._connection.call("GET", "/server_info", timeout_s=self._timeout_s)
            self._facts = wire.read(ServerFacts, body, f"{self.url}/server_info")
        return self._facts

    async def healthy(self, timeout_s: float) -> bool:
        """Whether the health check succeeds in time. SGLang samples a token for it: a paused server fails."""
        try:
            await self._connection.call("GET", "/health", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections. The server keeps running."""
        await self._connection.close()


_POLL_S = 1.0
_HEALTH_TIMEOUT_S = 30.0


class ExternalServer:
    """A server by its address, for a fleet: `start` waits for it, instead of starting a process.

    first_wait_s: for how long (seconds).
    """

    role = "regular"
    left_s: float | None = None

    def __init__(self, url: str, first_wait_s: float) -> None:
        self.name = self.url = url
        self._first_wait_s = first_wait_s

    @property
    def running(self) -> bool:
        """Always true: a process on another machine cannot be inspected, only its health check."""
        return True

    @property
    def end_reason(self) -> str:
        """How it ended: a process on another machine cannot be inspected."""
        return "it does not run"

    def log_tail(self) -> str:
        """Nothing: its log belongs to another owner."""
        return ""

    async def start(self) -> None:
        """Wait until it is healthy.

        Raises:
            EngineUnavailableError: it is not healthy after first_wait_s.
        """
        server = Server(self.url)
        try:
            async with asyncio.timeout(self._first_wait_s):
                while not await server.healthy(_HEALTH_TIMEOUT_S):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.url} was not healthy after {self._first_wait_s:g} s; start it again."
            ) from None
        finally:
            await server.close()

    async def stop(self) -> None:
        """Do nothing: the process belongs to another owner."""

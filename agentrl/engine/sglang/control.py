"""Control calls of one SGLang server: pausing, weights, versions, health. Free of torch.

    POST /pause_generation      {"mode": "abort"}: what runs ends with what it has, what comes waits
    POST /continue_generation   {}
    POST /flush_cache           400 while a request runs
    POST /update_weights_from_* {"success": true, "message": ".."}, or 400
    POST /update_weight_version {"new_version": "3"}
    GET  /server_info           tp_size, custom_weight_loader      GET /model_info   weight_version

As observed on SGLang 0.5.15. Two ways in which it dies are shut here. Its own flush after an update ends the
scheduler where a request is left, so every update says `flush_cache: false`, and `flush` asks by itself. And
a name of a loader or of a group that it does not know ends the scheduler, so `facts` tells the loaders.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.connection import ServerConnection
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.protocols import TensorSpec

_FLUSH_AGAIN_S = 0.05


class UpdateReply(wire.WireModel):
    """What an update answers. checksum: of what was loaded; only `agentrl serve` tells it."""

    success: bool
    message: str = ""
    checksum: int | None = None


class Facts(wire.WireModel):
    """What a server tells about its processes. custom_weight_loader: functions that it may be asked to call.

    SGLang sends weights to every rank of tensor parallelism (tp_size); to copies of the model (dp_size) not.
    """

    tp_size: Annotated[int, Field(ge=1)] = 1
    dp_size: Annotated[int, Field(ge=1)] = 1
    custom_weight_loader: list[str] | None = None


class UpdateGroup(NamedTuple):
    """A torch process group: its sender is rank 0 and listens at host:port, servers follow."""

    name: str
    host: str
    port: int
    size: int
    backend: str


class Server:
    """One process of SGLang, or of `agentrl serve`. A server that is started again is another `Server`.

    url: of the server itself, not of a router. headers: sent with every call (`Authorization`).
    timeout_s: of a call that moves no weights. update_timeout_s: of one that does, a pause, a flush.

    in_doubt: an update was not answered: what the server holds may still change, so restart it.

    Every call raises:
        EngineUnavailableError: the server is not there, broke off, or took too long.
        EngineError: it refused, and said why.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 30.0,
        update_timeout_s: float = 600.0,
    ) -> None:
        self.url = url
        self.in_doubt = False
        self._connection = ServerConnection(url, headers or {})
        self._timeout_s = timeout_s
        self._update_timeout_s = update_timeout_s

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    async def pause(self) -> None:
        """End every request with what it has, and hold those that come until `resume`."""
        # The other modes keep requests in the scheduler: an update would find its cache in use.
        await self._post("/pause_generation", {"mode": "abort"}, self._update_timeout_s)

    async def resume(self) -> None:
        """Take requests again."""
        await self._post("/continue_generation", {}, self._timeout_s)

    async def flush(self) -> None:
        """Forget what older weights computed; waits for the last request to leave."""
        try:
            async with asyncio.timeout(self._update_timeout_s):
                await self._flush()
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.url} did not flush its cache in {self._update_timeout_s:g} s: requests still run."
            ) from None

    async def weight_version(self) -> int:
        """The version of the weights that it serves; 0 where it was never told one."""
        body = await self._connection.call("GET", "/model_info", timeout_s=self._timeout_s)
        return wire.version_of(wire.read(wire.ModelInfo, body, f"{self.url}/model_info").weight_version)

    async def set_version(self, version: int) -> None:
        """Call the weights that it has now `version`."""
        told = {"new_version": str(version), "abort_all_requests": False}
        await self._post("/update_weight_version", told, self._timeout_s)

    async def facts(self) -> Facts:
        """What it tells about its processes."""
        body = await self._connection.call("GET", "/server_info", timeout_s=self._timeout_s)
        return wire.read(Facts, body, f"{self.url}/server_info")

    async def update_from_disk(self, folder: str, version: int | None = None) -> UpdateReply:
        """Load the safetensors of a folder that the server can read. version: None = it stays.

        A file that cannot be read to its end ends an SGLang: read it before.
        """
        told = {"model_path": folder, "flush_cache": False}
        return await self._update("/update_weights_from_disk", told, version)

    async def update_from_tensor(
        self, payloads: Sequence[bytes], load_format: str, version: int | None = None
    ) -> UpdateReply:
        """Give every rank its payload: a plain pickle of (name, tensor) pairs, without handles of processes.

        load_format: one of the loaders that `facts` tells.
        """
        told = {
            "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
            "load_format": load_format,
            "flush_cache": False,
        }
        return await self._update("/update_weights_from_tensor", told, version)

    async def init_group(self, group: UpdateGroup, rank: int, timeout_s: float) -> None:
        """Join a group; the server's first rank becomes `rank`. Ends when every member has joined."""
        told = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", told, timeout_s)

    async def destroy_group(self, name: str) -> None:
        """Leave a group."""
        await self._post("/destroy_weights_update_group", {"group_name": name}, self._timeout_s)

    async def update_from_group(
        self, name: str, specs: Sequence[TensorSpec], version: int | None = None
    ) -> UpdateReply:
        """Load what rank 0 broadcasts: the tensors end to end, as bytes.

        A group that the server did not join ends its scheduler.
        """
        told = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        return await self._update("/update_weights_from_distributed", told, version)

    async def healthy(self, timeout_s: float) -> bool:
        """Whether it answers in time that it is well. SGLang samples a token for it: a paused one is not."""
        try:
            await self._connection.call("GET", "/health", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections. The server goes on."""
        await self._connection.close()

    async def _flush(self) -> None:
        while True:
            try:
                await self._post("/flush_cache", {}, self._timeout_s)
            except EngineUnavailableError:
                raise
            except EngineError:
                # A request that was told to end is on its way out.
                await asyncio.sleep(_FLUSH_AGAIN_S)
            else:
                return

    async def _update(self, path: str, told: Mapping[str, object], version: int | None) -> UpdateReply:
        named = {} if version is None else {"weight_version": str(version)}
        self.in_doubt = True
        try:
            body = await self._post(path, {**told, **named}, self._update_timeout_s)
        except EngineUnavailableError:
            raise
        except EngineError:
            self.in_doubt = False
            raise
        self.in_doubt = False
        done = wire.read(UpdateReply, body, f"what {self.url}{path} answers")
        if not done.success:
            raise EngineError(f"{self.url} did not take the weights: {done.message[:300]}")
        return done

    async def _post(self, path: str, told: Mapping[str, object], timeout_s: float) -> bytes:
        return await self._connection.call("POST", path, json.dumps(told).encode(), timeout_s=timeout_s)


_LOOK_AGAIN_S = 1.0
_ANSWER_S = 30.0


class ExternalServer:
    """A server by its address, for a fleet: it is waited for, where ours would be started again.

    first_wait_s: how long (seconds).
    """

    role = "regular"

    def __init__(self, url: str, first_wait_s: float) -> None:
        self.name = self.url = url
        self._first_wait_s = first_wait_s

    @property
    def running(self) -> bool:
        """Of a process elsewhere nothing is known but what its server says of itself."""
        return True

    @property
    def returncode(self) -> int | None:
        """Nothing is known of it."""
        return None

    async def start(self) -> None:
        """Wait until it is well.

        Raises:
            EngineUnavailableError: it is not, in all that time.
        """
        server = Server(self.url)
        try:
            async with asyncio.timeout(self._first_wait_s):
                while not await server.healthy(_ANSWER_S):
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.url} was not well in {self._first_wait_s:g} s; start it again."
            ) from None
        finally:
            await server.close()

    async def stop(self) -> None:
        """It is not ours to stop."""

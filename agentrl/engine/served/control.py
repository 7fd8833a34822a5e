"""The endpoints of the server that control its engine: pauses, memory, weights and their version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentrl.engine.embedded.engine import EmbeddedEngine
from agentrl.engine.embedded.sink import update_from_disk
from agentrl.engine.served import requests
from agentrl.errors import EngineError, ModelLoadError
from agentrl.http.serving import BodyReader, Endpoint


class EngineControl:
    """Answers requests of whoever has the control key. path: of the weights that serve, at first `name`."""

    def __init__(self, engine: EmbeddedEngine, bodies: BodyReader, name: str) -> None:
        self._engine, self._bodies = engine, bodies
        self.path = name
        self.is_paused = self._drained = False
        self._updating = asyncio.Lock()

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """The endpoints, by path; all are POST."""
        return {
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/flush_cache": self.flush,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.resume,
            "/update_weights_from_disk": self.update,
            "/update_weight_version": self.rename,
        }

    async def pause(self, request: Request) -> Response:
        """End or keep the running requests, by the mode, and hold new ones."""
        mode = requests.read(requests.Pause, await self._bodies.read(request)).mode
        self.is_paused = True
        # In mode abort the running requests have ended then, and new ones wait.
        self._drained = mode == "abort"
        self._engine.pause()
        if mode == "abort":
            await self._engine.abort()
        if mode == "retract":
            self._engine.memory.drop_caches()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def go_on(self, request: Request) -> Response:
        """Go on after a pause."""
        del request
        self.is_paused = self._drained = False
        self._engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        """Drop all cached prefixes; refused while requests run."""
        del request
        if self._engine.num_requests and not self._drained:
            return Response("Flush cache failed: requests run.\n", 400, media_type="text/plain")
        self._engine.memory.drop_caches()
        return Response("Cache flushed.\n", media_type="text/plain")

    async def release(self, request: Request) -> Response:
        """Free weights, cache or both."""
        tags = requests.read(requests.MemoryRequest, await self._bodies.read(request)).tags
        return JSONResponse({"freed_bytes": await self._engine.release_memory(tags)})

    async def resume(self, request: Request) -> Response:
        """Allocate again what was freed."""
        tags = requests.read(requests.MemoryRequest, await self._bodies.read(request)).tags
        await self._engine.resume_memory(tags)
        return JSONResponse({})

    async def update(self, request: Request) -> Response:
        """Serve the weights of a directory."""
        update = requests.read(requests.Update, await self._bodies.read(request))
        async with self._updating:
            version = requests.read_version(update.weight_version, self._engine.version)
            if update.abort_all_requests:
                await self._engine.abort()
            try:
                checksum = await update_from_disk(self._engine.sink, update.model_path, version)
            except (ModelLoadError, EngineError) as error:
                return JSONResponse({"success": False, "message": str(error)}, 400)
            self.path = update.model_path
        message = f"Succeeded to update model weights. Weight version updated to {version}."
        reply = {"success": True, "message": message, "num_paused_requests": 0, "checksum": checksum}
        return JSONResponse(reply)

    async def rename(self, request: Request) -> Response:
        """Set the version of the current weights."""
        rename = requests.read(requests.Rename, await self._bodies.read(request))
        version = requests.read_version(rename.new_version, self._engine.version)
        if rename.abort_all_requests:
            await self._engine.abort()
        self._engine.memory.rename(version)
        message = f"Weight version updated to {version}"
        return JSONResponse({"success": True, "message": message, "new_version": rename.new_version})

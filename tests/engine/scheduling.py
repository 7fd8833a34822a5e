"""A server with SGLang's weight endpoints and crashes, and our loader inside.

The parameters of its model have SGLang's layout: fused, and padded.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports.inside import LOADER
from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import size_of, torch_dtype
from tests.listening import listening

WIDTH, VOCAB, HEADS, MLP = 4, 5, (6, 2, 2), 3
PADDED_VOCAB, PADDED_MLP = 8, 4


class Fused(nn.Module):
    """`model.layers.0` as SGLang has it; with the names of a checkpoint inside."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(PADDED_VOCAB, WIDTH)
        self.qkv_proj = nn.Linear(WIDTH, sum(HEADS))
        self.gate_up_proj = nn.Linear(WIDTH, 2 * PADDED_MLP, bias=False)
        self.gate_up_proj.output_partition_sizes = [PADDED_MLP, PADDED_MLP]
        self.norm = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.to(dtype)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            part = self.slice_of(name)
            part[tuple(slice(size) for size in tensor.shape)] = tensor

    def slice_of(self, name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        if module in ("q_proj", "k_proj", "v_proj"):
            number = "qkv".index(module[0])
            start = sum(HEADS[:number])
            return getattr(self.qkv_proj, kind).data[start : start + HEADS[number]]
        if module in ("gate_proj", "up_proj"):
            start = PADDED_MLP * (module == "up_proj")
            return self.gate_up_proj.weight.data[start : start + PADDED_MLP]
        return self.get_parameter(name).data if name != "steps" else self.steps


class Layered(nn.Module):
    """`Fused` under the names that transformers has."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = Fused(dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.layer.load_weights((name.removeprefix("layer."), tensor) for name, tensor in weights)


def checkpoint(seed: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    """Weights for `Layered`, as a trainer names them."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {
        "embed_tokens.weight": some(VOCAB, WIDTH),
        **{f"{n}_proj.weight": some(size, WIDTH) for n, size in zip("qkv", HEADS, strict=True)},
        **{f"{n}_proj.bias": some(size) for n, size in zip("qkv", HEADS, strict=True)},
        "gate_proj.weight": some(MLP, WIDTH),
        "up_proj.weight": some(MLP, WIDTH),
        "norm": some(),
        "steps": torch.full((2,), seed),
    }
    return [(f"layer.{name}", tensor) for name, tensor in tensors.items()]


class Scheduler:
    """One server. `app` is the ASGI application.

    calls: paths of POST requests, in order. dead: why it crashed; every response is then 500, as from an
    SGLang without its scheduler. before: called before each request with its path and body, to make it fail.
    served: every set of weights with the version under which it could have been sampled. profiled: what was
    asked to be traced.
    """

    def __init__(self, model: nn.Module | None = None, *, tp_size: int = 1, loader: bool = True) -> None:
        self.model = model or Layered()
        self.version = "default"
        self.paused = False
        self.calls: list[str] = []
        self.released: set[str] = set()
        self.dead: str | None = None
        self.before: Callable[[str, dict], object] = lambda path, body: None
        self.served: list[tuple[str, int]] = []
        self.groups: dict[str, ProcessGroupGloo] = {}
        self.profiled: list[dict] = []
        self._info = {
            "tp_size": tp_size,
            "dp_size": 1,
            "custom_weight_loader": [LOADER] if loader else [],
        }
        posts = {
            "/pause_generation": self._pause,
            "/continue_generation": self._resume,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._restore,
            "/update_weight_version": self._rename,
            "/update_weights_from_tensor": self._tensor,
            "/update_weights_from_disk": self._disk,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/update_weights_from_distributed": self._receive,
            "/start_profile": self._profile,
        }
        gets = {"/server_info": lambda: self._info, "/model_info": self._model_info}
        self.app = Starlette(
            routes=[
                *(Route(path, self._post(path, do), methods=["POST"]) for path, do in posts.items()),
                *(Route(path, self._get(do)) for path, do in gets.items()),
                Route("/health", self._health),
            ]
        )

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async with listening(self.app) as url:
            yield url

    def holds(self, seed: int, dtype: torch.dtype = torch.float32) -> bool:
        """Whether the model has exactly these weights."""
        fresh = Layered(next(self.model.parameters()).dtype)
        fresh.load_weights(checkpoint(seed, dtype))
        mine, theirs = self.model.state_dict(), fresh.state_dict()
        return all(torch.equal(mine[name], theirs[name]) for name in theirs)

    def _post(self, path: str, do: Callable[[dict], Response]):
        async def endpoint(request: Request) -> Response:
            body = json.loads(await request.body() or b"{}")
            self.calls.append(path)
            waiting = self.before(path, body)
            if asyncio.iscoroutine(waiting):
                await waiting
            if self.dead:
                return Response(self.dead, 500)
            # As in SGLang, the HTTP server stays responsive while the scheduler works.
            return await asyncio.to_thread(do, body)

        return endpoint

    def _get(self, do: Callable[[], dict]):
        async def endpoint(request: Request) -> Response:
            return Response(self.dead, 503) if self.dead else JSONResponse(do())

        return endpoint

    async def _health(self, request: Request) -> Response:
        # SGLang samples a token as a health check, which fails while it is paused.
        return Response("", 503 if self.dead or self.paused else 200)

    def _model_info(self) -> dict:
        return {"weight_version": self.version}

    def _pause(self, body: dict) -> Response:
        assert body["mode"] == "abort"
        self.paused = True
        return JSONResponse({})

    def _resume(self, body: dict) -> Response:
        if self.released:
            # Whatever asks for a token now, such as a health check that waits, finds no memory.
            self.dead = "ValueError: Pointer argument (at 0) cannot be accessed"
            return Response(self.dead, 500)
        self.paused = False
        seed = int(self.model.layer.steps[0])
        self.served.append((self.version, seed if self.holds(seed) else -1))
        return JSONResponse({})

    def _flush(self, body: dict) -> Response:
        return Response("", 200)

    def _release(self, body: dict) -> Response:
        # A request may run in a server that is not paused.
        self.dead = None if self.paused else "AssertionError"
        self.released |= set(body["tags"])
        return Response("" if not self.dead else self.dead, 500 if self.dead else 200)

    def _restore(self, body: dict) -> Response:
        if not set(body["tags"]) <= self.released:
            self.dead = "KeyError"
        self.released -= set(body["tags"])
        return Response("" if not self.dead else self.dead, 500 if self.dead else 200)

    def _profile(self, body: dict) -> Response:
        self.profiled.append(body)
        return Response("Start profiling.\n")

    def _rename(self, body: dict) -> Response:
        assert self.paused
        self.version = body["new_version"]
        return JSONResponse({"success": True})

    def _tensor(self, body: dict) -> Response:
        if body["load_format"] != LOADER or LOADER not in self._info["custom_weight_loader"]:
            self.dead = "NotImplementedError"
        elif body["flush_cache"] is not False or not self.paused:
            self.dead = "AssertionError"
        else:
            for payload in body["serialized_named_tensors"]:
                agentrl_sglang.load(self.model, pickle.loads(base64.b64decode(payload)))
        return self._done()

    def _disk(self, body: dict) -> Response:
        if body["flush_cache"] is not False or not self.paused:
            self.dead = "AssertionError"
        else:
            self.model.load_weights(load_file(Path(body["model_path"]) / "model.safetensors").items())
        return self._done()

    def _join(self, body: dict) -> Response:
        name, timeout = body["group_name"], timedelta(seconds=1.5)
        try:
            store = TCPStore(body["master_address"], body["master_port"], body["world_size"], False, timeout)
            for prefix in (name, f"{name}/", "cpu/"):
                store = PrefixStore(prefix, store)
            self.groups[name] = ProcessGroupGloo(store, body["rank_offset"], body["world_size"], timeout)
        except RuntimeError as error:
            return JSONResponse({"success": False, "message": str(error)}, 400)
        return self._done()

    def _leave(self, body: dict) -> Response:
        group = self.groups.pop(body["group_name"], None)
        return JSONResponse({"success": group is not None}, 400 if group is None else 200)

    def _receive(self, body: dict) -> Response:
        group = self.groups.get(body["group_name"])
        if group is None or body["flush_cache"] is not False or not self.paused:
            self.dead = "AssertionError"
            return self._done()
        specs = list(map(TensorSpec, body["names"], map(tuple, body["shapes"]), body["dtypes"]))
        flat = torch.empty(sum(map(size_of, specs)), dtype=torch.uint8)
        try:
            group.broadcast(flat, 0).wait()
        except RuntimeError as error:
            return JSONResponse({"success": False, "message": str(error)}, 400)
        start, tensors = 0, []
        for spec in specs:
            # A view, as in SGLang: torch refuses a tensor that is misaligned for its dtype.
            part = flat[start : start + size_of(spec)].view(torch_dtype(spec.dtype))
            tensors.append((spec.name, part.reshape(spec.shape)))
            start += size_of(spec)
        self.model.load_weights(tensors)
        return self._done()

    def _done(self) -> Response:
        if self.dead:
            return Response(self.dead, 500)
        return JSONResponse({"success": True, "message": "Success"})

"""A server that only takes weights: one copy of the bytes into its memory. python -m benchmarks.receiver FD

It has the endpoints of SGLang that an update calls, and no model: what an update costs beyond that copy is
the sender's.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from agentrl.engine.sglang.transports.group_sender import Communicator
from agentrl.engine.sglang.transports.inside import LOADER
from agentrl.http.serving import bound, serve
from agentrl.processes.child import SendFailure, follow_driver
from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import size_of

_TIMEOUT = timedelta(seconds=120)

Body = Mapping[str, object]


class Receiver:
    """The endpoints. Each bucket overwrites the one before in its memory."""

    def __init__(self) -> None:
        self._memory = torch.zeros(0, dtype=torch.uint8)
        self._version = "0"
        self._groups: dict[str, Communicator] = {}
        posts: Mapping[str, Callable[[Body], None]] = {
            "/pause_generation": self._agree,
            "/continue_generation": self._agree,
            "/update_weight_version": self._rename,
            "/update_weights_from_tensor": self._map,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/update_weights_from_distributed": self._receive,
        }
        gets: Mapping[str, Callable[[], Mapping[str, object]]] = {
            "/server_info": lambda: {"tp_size": 1, "dp_size": 1, "custom_weight_loader": [LOADER]},
            "/model_info": lambda: {"weight_version": self._version},
            "/health": dict,
        }
        self.app = Starlette(
            routes=[
                *(Route(path, _post(work), methods=["POST"]) for path, work in posts.items()),
                *(Route(path, _get(facts)) for path, facts in gets.items()),
            ]
        )

    def _agree(self, body: Body) -> None:
        """Nothing is sampled: there is nothing to pause."""

    def _rename(self, body: Body) -> None:
        self._version = str(body["new_version"])

    def _map(self, body: Body) -> None:
        """Copy every file of an update of shared memory; in the reply no tensor could be compared."""
        payloads = cast(list[str], body["serialized_named_tensors"])
        ((_, request),) = pickle.loads(base64.b64decode(payloads[0]))
        message = json.loads(request.numpy().tobytes())
        for path, _ in message["files"]:
            data = np.memmap(path, np.uint8, mode="r")
            self._room(len(data)).numpy()[:] = data
        names = [tensor[0] for _, tensors in message["files"] for tensor in tensors]
        Path(message["reply"]).write_text(json.dumps({"error": None, "tensors": dict.fromkeys(names)}))

    def _join(self, body: Body) -> None:
        name, size = str(body["group_name"]), int(str(body["world_size"]))
        store: Store = TCPStore(
            str(body["master_address"]), int(str(body["master_port"])), size, False, _TIMEOUT
        )
        for prefix in (name, f"{name}/", "cpu/"):
            store = PrefixStore(prefix, store)
        group = ProcessGroupGloo(store, int(str(body["rank_offset"])), size, _TIMEOUT)
        self._groups[name] = cast(Communicator, group)

    def _leave(self, body: Body) -> None:
        del self._groups[str(body["group_name"])]

    def _receive(self, body: Body) -> None:
        shapes, dtypes = cast(list[list[int]], body["shapes"]), cast(list[str], body["dtypes"])
        specs = [TensorSpec("", tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        room = self._room(sum(map(size_of, specs)))
        self._groups[str(body["group_name"])].broadcast([room], options).wait(_TIMEOUT)

    def _room(self, num_bytes: int) -> torch.Tensor:
        """Memory for a bucket, which is already mapped after the first one of its size."""
        if len(self._memory) < num_bytes:
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]


def _post(work: Callable[[Body], None]) -> Callable[[Request], object]:
    async def endpoint(request: Request) -> Response:
        await run_in_threadpool(work, json.loads(await request.body() or b"{}"))
        return JSONResponse({"success": True, "message": ""})

    return endpoint


def _get(facts: Callable[[], Mapping[str, object]]) -> Callable[[Request], object]:
    async def endpoint(request: Request) -> Response:
        del request
        return JSONResponse(facts())

    return endpoint


def main(descriptor: int) -> None:
    """Serve until the parent ends. descriptor: this process's end of the pipe, which gets the port."""
    pipe = Connection(descriptor)
    follow_driver(pipe)
    with SendFailure(pipe), bound("127.0.0.1", 0) as listener:
        pipe.send(listener.getsockname()[1])
        serve(Receiver().app, listener)


if __name__ == "__main__":
    main(int(sys.argv[1]))

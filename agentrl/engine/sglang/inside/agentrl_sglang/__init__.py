"""Loads weights from shared files inside an SGLang scheduler, and reports CRCs of the model's tensors.

SGLang calls `load` where it was started with `--custom-weight-loader agentrl_sglang.load` and this directory
is on its PYTHONPATH. The module uses only torch and the standard library, because agentrl is not installed
there.

A request is JSON in the bytes of one tensor:

    {"action": "load", "reply": PATH, "file": PATH, "whole": true,
     "tensors": [[name, shape, dtype, offset], ..]}
    {"action": "load_all", "reply": PATH, "files": [[PATH, [[name, shape, dtype, offset], ..]], ..]}
    {"action": "load_device", "reply": PATH, "whole": true,
     "memory": {"num_bytes": N, "cuda": HEX, "device": UUID, "path": ""},
     "parts": [[start, end, content hash, [[name, shape, dtype, offset], ..]], ..]}
    {"action": "read", "reply": PATH, "tensors": [[name, shape, dtype], ..]}

Any of them may have "ahead": what the names of those layers of the policy begin with that the server drafts
with. Then it is handled twice, for the model that drafts and for the policy, and each takes what it holds.

The reply is written to a file of the sender: {"error": null, "tensors": {name: [dtype, CRC-32 of bytes]}}.
Any client of the server may send a request, so the names of both files must have PREFIX, but for a FILE that
is memory without a name: one that a process of this user has open under the name BUCKET. `whole`: this
process holds complete tensors (no tensor parallelism), so all shapes are checked before the first one is
loaded; without it, the CRCs are those of the tensors in the file. A name under `tensors` is null where the
model's layout of the tensor is not supported here.

`load_all` loads complete tensors of several files, then compares every one in the model with its file, bit
for bit. Nothing is served meanwhile, and a CRC would take several times as long. Only tensors that cannot be
compared are in its reply.

`load_device` loads tensors out of the memory of a card, by a handle of CUDA's IPC, or out of shared memory,
by its path. On the sender's own card they are read where they are; to another one each part is copied first.
The hash of every part is compared with the sender's. With `whole`, every tensor of the first version is
compared in the model with the sent one; of later versions, those whose copies are not known (see `copies`).
Nothing is unpickled: a handle is 64 bytes, and no more is read than the allocation holds.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TypedDict

import torch

from .device import bits
from .drafts import Share
from .locations import Locations, Model
from .memory import load_device, parse_memory
from .tensors import BUCKET, PREFIX, SentTensor, map_tensors, open_file, parse_tensor

__all__ = ["BUCKET", "PREFIX", "load"]


def load(model: Model, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Handle a request. Never raises, because that would crash the scheduler: errors go into the reply."""
    with _ReplyFile() as reply:
        request = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
        reply.path = str(request["reply"])
        share = Share(model, request.get("ahead", ()))
        reply.continues = bool(share.ahead)
        if request["action"] == "load_all":
            files = {
                str(path): [parse_tensor(*fields) for fields in tensors] for path, tensors in request["files"]
            }
            reply.tensors = _load_all(model, files, share)
            return
        if request["action"] == "load_device":
            memory = parse_memory(**request["memory"])
            whole = bool(request["whole"])
            reply.tensors = load_device(model, memory, request["parts"], share, whole=whole)
            return
        sent = [parse_tensor(*fields) for fields in request["tensors"]]
        locations = Locations(model, {tensor.name: tensor.shape for tensor in share.of(sent)})
        if request["action"] == "load":
            complete = bool(request["whole"])
            if complete:
                locations.check(share.of(sent))
            loaded = list(map_tensors(str(request["file"]), sent))
            model.load_weights([pair for pair in loaded if share.holds(pair[0])])
            reply.tensors = {} if complete else {name: _crc_of(tensor) for name, tensor in loaded}
        else:
            reply.tensors = {
                tensor.name: _crc_of(_part_of(locations, share, tensor)) if share.holds(tensor.name) else None
                for tensor in sent
            }


def _part_of(locations: Locations, share: Share, sent: SentTensor) -> torch.Tensor | None:
    """Where the model has a tensor that it holds."""
    return locations.of(sent._replace(name=share.name_of(sent.name)))


def _load_all(
    model: Model, files: Mapping[str, Sequence[SentTensor]], share: Share
) -> dict[str, tuple[str, int] | None]:
    """Load the tensors of all files, by path; the result has those that cannot be compared afterwards."""
    held = {path: [each for each in sent if share.holds(each.name)] for path, sent in files.items()}
    sent = [tensor for tensors in held.values() for tensor in tensors]
    locations = Locations(model, {tensor.name: tensor.shape for tensor in share.of(sent)})
    locations.check(share.of(sent))
    loaded = [pair for path, tensors in held.items() for pair in map_tensors(path, tensors)]
    model.load_weights(loaded)
    unread: dict[str, tuple[str, int] | None] = {}
    for tensor, (name, data) in zip(sent, loaded, strict=True):
        part = _part_of(locations, share, tensor)
        if part is None:
            unread[name] = None
        elif not torch.equal(bits(part), bits(data.to(part.device, part.dtype))):
            raise ValueError(f"the model holds another {name} than was sent")
    return unread


class _Reply(TypedDict):
    error: str | None
    tensors: dict[str, tuple[str, int] | None]


class _ReplyFile:
    """Writes the result of its block to a file; suppresses exceptions, which would crash the scheduler.

    continues: what another model of the server has written there stands.
    """

    def __init__(self) -> None:
        self.path = ""
        self.tensors: dict[str, tuple[str, int] | None] = {}
        self.continues = False

    def __enter__(self) -> _ReplyFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is not None and not issubclass(kind, Exception):
            return False
        reply: _Reply = {
            "error": None if kind is None else f"{kind.__name__}: {error}"[:500],
            "tensors": {} if kind is not None else self.tensors,
        }
        # Where the reply cannot be written, the sender detects the empty file. The path may be invalid.
        with (
            suppress(OSError, ValueError, LookupError, TypeError),
            os.fdopen(open_file(self.path, os.O_RDWR), "r+") as file,
        ):
            earlier = file.read() if self.continues else ""
            file.seek(0)
            file.truncate()
            json.dump(_merged(json.loads(earlier), reply) if earlier else reply, file)
        return True


def _merged(earlier: _Reply, reply: _Reply) -> _Reply:
    """The replies of two models to one request: an error of either, and of each tensor what is known."""
    before, now = earlier["tensors"], reply["tensors"]
    known = {name: found for name, found in now.items() if found is not None or name not in before}
    return {"error": earlier["error"] or reply["error"], "tensors": {**before, **known}}


def _crc_of(tensor: torch.Tensor | None) -> tuple[str, int] | None:
    if tensor is None:
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), zlib.crc32(flat.numpy().data)

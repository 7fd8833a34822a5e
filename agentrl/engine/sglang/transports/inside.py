"""The sender's side of `inside/agentrl_sglang`: requests to the loader in a scheduler, and its replies."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports.base import Delivery, Loaded
from agentrl.errors import EngineError
from agentrl.runtime.files import write_text
from agentrl.runtime.temporary import temporary_file
from agentrl.types import JSON
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.checksum import BucketChecksums
from agentrl.weights.codec import slices, torch_dtype

LOADER = "agentrl_sglang.load"
"""The value of `--custom-weight-loader`."""
LOADER_FOLDER = Path(agentrl_sglang.__file__).parents[1]
"""The directory that has to be on the server's PYTHONPATH."""

SHARED = Path("/dev/shm")
"""The directory of shared memory files."""

_PROJECTIONS = ("eh_proj.weight", "input_proj.weight")
_NO_ACCESS = ("FileNotFoundError", "PermissionError")


class Crc(NamedTuple):
    """A tensor in a server's memory: its dtype there, and the CRC-32 of its bytes."""

    dtype: str
    crc: int


class NoAccessError(EngineError):
    """A loader cannot open a file of the sender."""


class LoaderReply(BaseModel):
    """The reply of the loader."""

    model_config = ConfigDict(frozen=True)

    error: str | None
    tensors: dict[str, Crc | None]


@contextmanager
def shared_file(folder: Path) -> Iterator[Path]:
    """A new, empty file that only this user may open; it is removed after the block.

    Raises:
        EngineError: the file cannot be created.
    """
    with ExitStack() as stack:
        try:
            path = stack.enter_context(temporary_file(agentrl_sglang.PREFIX, folder))
        except OSError as error:
            raise EngineError(
                f"no file can be created in {folder} ({error.strerror}); free some memory."
            ) from error
        yield path


@contextmanager
def shared_files(folder: Path, count: int) -> Iterator[Sequence[Path]]:
    """Several of `shared_file`."""
    with ExitStack() as files:
        yield [files.enter_context(shared_file(folder)) for _ in range(count)]


async def ranks_with_loader(server: Server) -> int:
    """The number of tensor-parallel ranks of a server with our loader; 0 = it does not have the loader.

    Raises:
        EngineError: the server did not reply, or has data-parallel replicas.
    """
    facts = await server.facts()
    if facts.dp_size > 1:
        raise EngineError(
            f"{server.url} has dp_size = {facts.dp_size}; start that many servers instead, with dp_size = 1."
        )
    return facts.tp_size if LOADER in (facts.custom_weight_loader or ()) else 0


async def call_loader(
    server: Server, ranks: int, message: Mapping[str, JSON], folder: Path
) -> Sequence[Mapping[str, Crc | None]]:
    """Send a request to the loader of every rank; returns the reported tensors of each.

    Where it names layers that draft (`ahead`), the model that a server drafts with gets it, too.

    Raises:
        EngineError: a loader failed, or did not reply.
    """
    with shared_files(folder, ranks) as replies:
        payloads = [_payload({**message, "reply": str(path)}) for path in replies]
        await server.update_from_tensor(payloads, LOADER, drafts=bool(message.get("ahead")))
        return [_read_reply(server, path) for path in replies]


def ahead_of(manifest: Iterable[TensorSpec]) -> list[JSON]:
    """What the names of those layers begin with that a server drafts with, as the loader is told."""
    return [
        spec.name.removesuffix(projection)
        for spec in manifest
        for projection in _PROJECTIONS
        if spec.name.endswith(f".{projection}")
    ]


async def read_back(server: Server, delivery: Delivery, expected: BucketChecksums, folder: Path) -> Loaded:
    """Compare the weights of a server without tensor parallelism with those that were sent.

    A tensor that it keeps in another dtype is compared with the sent one, cast to that dtype.

    Raises:
        EngineError: the weights cannot be read, or differ.
    """
    tensors: JSON = [[spec.name, list(spec.shape), spec.dtype] for spec in delivery.manifest]
    message: dict[str, JSON] = {"action": "read", "tensors": tensors, "ahead": ahead_of(delivery.manifest)}
    (crcs,) = await call_loader(server, 1, message, folder)
    differing = await delivery.snapshot.run(partial(_first_difference, crcs, expected.crcs))
    if differing is not None:
        raise EngineError(f"{server.url} holds another {differing} than was sent; send it again.")
    return Loaded(expected.checksum, sum(crcs.get(spec.name) is None for spec in delivery.manifest))


def _first_difference(
    read: Mapping[str, Crc | None], sent: Mapping[str, int], buckets: Sequence[Bucket]
) -> str | None:
    """The first tensor that a server holds with other bytes than were sent. sent: CRCs of the sent bytes."""
    for bucket in buckets:
        for spec, data in slices(bucket):
            crc = read.get(spec.name)
            if crc is not None and crc.crc != _expected_crc(spec, data, crc.dtype, sent):
                return spec.name
    return None


def _expected_crc(spec: TensorSpec, data: npt.NDArray[np.uint8], dtype: str, crcs: Mapping[str, int]) -> int:
    return crcs[spec.name] if dtype == spec.dtype else _cast_crc(spec, data.tobytes(), dtype)


def _cast_crc(spec: TensorSpec, data: bytes, dtype: str) -> int:
    if not data:
        return 0
    tensor = torch.frombuffer(bytearray(data), dtype=torch_dtype(spec.dtype)).to(torch_dtype(dtype))
    return zlib.crc32(tensor.view(torch.uint8).numpy().data)


def _payload(message: Mapping[str, JSON]) -> bytes:
    """A message as pickled tensors, by value: without shared-memory handles of this process."""
    bytes_B = np.frombuffer(json.dumps(message).encode(), np.uint8).copy()
    return pickle.dumps([("agentrl", torch.from_numpy(bytes_B))])


def _read_reply(server: Server, path: Path) -> Mapping[str, Crc | None]:
    body = path.read_bytes()
    if not body:
        raise EngineError(
            f"the loader in {server.url} left no reply at {path}; run it on this machine, as this user."
        )
    try:
        reply = LoaderReply.model_validate_json(body)
    except ValidationError as error:
        raise EngineError(f"the loader in {server.url} sent an invalid reply: {body[:100]!r}") from error
    if reply.error is not None and reply.error.startswith(_NO_ACCESS):
        raise NoAccessError(f"{server.url} cannot open a file of weights: {reply.error}")
    if reply.error is not None:
        raise EngineError(f"{server.url} did not load the weights: {reply.error}")
    return reply.tensors


def plugin_folder(folder: Path, *, adapters: bool = False) -> Path:
    """Write what has SGLang find the plugins next to the loader: a folder for the PYTHONPATH of its servers.

    adapters: also that for servers whose adapters change.

    Raises:
        OSError: the disk does not take it.
    """
    described = folder / "agentrl_sglang_plugins-1.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    names = [
        "agentrl_sglang_times",
        "agentrl_sglang_routed",
        "agentrl_sglang_types",
        *(["agentrl_sglang_adapters"] if adapters else []),
    ]
    write_text(described / "METADATA", "Metadata-Version: 2.1\nName: agentrl_sglang_plugins\nVersion: 1\n")
    entries = "".join(f"{name} = {name}:register\n" for name in names)
    write_text(described / "entry_points.txt", f"[sglang.srt.plugins]\n{entries}")
    return folder

"""The loader inside SGLang's scheduler: it loads, reports the model's tensors, and never raises."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports import inside
from agentrl.engine.sglang.transports.bucket_files import in_memory, write_bucket
from agentrl.engine.sglang.transports.cuda_ipc import request_of
from agentrl.types import JSON
from agentrl.types.seams import Bucket
from agentrl.weights.codec import bytes_of, pack_buckets
from agentrl.weights.device import Packed
from agentrl.weights.shared import SharedBuffer
from tests.engine.devices import packed_of
from tests.engine.scheduling import Layered, checkpoint

ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
}
REPLY, FILE = f"{agentrl_sglang.PREFIX}reply", f"{agentrl_sglang.PREFIX}file"


class Careful(pickle.Unpickler):
    """Unpickles tensors by value only. SGLang's own also allows others, such as handles."""

    def find_class(self, module: str, name: str) -> object:
        assert (module, name) in ALLOWED
        return super().find_class(module, name)


def call(folder: Path, model: torch.nn.Module, **message: JSON) -> Mapping[str, object]:
    """Call the loader as a server does; returns its reply."""
    reply = folder / REPLY
    reply.touch()
    payload = inside._payload({**message, "reply": str(reply)})
    agentrl_sglang.load(model, Careful(io.BytesIO(payload)).load())
    return json.loads(reply.read_text())


def load(folder: Path, model: torch.nn.Module, weights, **changes: JSON) -> Mapping[str, object]:
    (bucket,) = pack_buckets(weights, 1 << 20)
    tensors = write_bucket(folder / FILE, 0, [bucket])
    message = {"action": "load", "file": str(folder / FILE), "tensors": tensors, "whole": True}
    return call(folder, model, **(message | changes))


def listed(weights) -> JSON:
    return [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in weights]


def crcs(weights) -> dict[str, list[object]]:
    return {
        name: [str(tensor.dtype).removeprefix("torch."), zlib.crc32(bytes_of(tensor).data)]
        for name, tensor in weights
    }


def test_crcs_are_of_the_fused_and_padded_parameters(tmp_path: Path) -> None:
    model, weights = Layered(), checkpoint(1)
    assert load(tmp_path, model, weights) == {"error": None, "tensors": {}}
    assert call(tmp_path, model, action="read", tensors=listed(weights)) == {
        "error": None,
        "tensors": crcs(weights),
    }
    for name in ("q_proj.weight", "v_proj.bias", "up_proj.weight", "embed_tokens.weight", "norm", "steps"):
        place = model.layer.slice_of(name)
        before = place.clone()
        place += 1
        reply = call(tmp_path, model, action="read", tensors=listed(weights))["tensors"]
        assert [changed for changed in reply if reply[changed] != crcs(weights)[changed]] == [f"layer.{name}"]
        place.copy_(before)


def load_all(folder: Path, model: torch.nn.Module, weights) -> Mapping[str, object]:
    """Load weights from several files, of which each has some tensors."""
    files: list[JSON] = []
    for number, bucket in enumerate(pack_buckets(weights, 100)):
        path = folder / f"{FILE}-{number}"
        files.append([str(path), write_bucket(path, 0, [bucket])])
    assert len(files) > 2
    return call(folder, model, action="load_all", files=files)


def test_all_files_are_loaded_then_compared_bit_for_bit(tmp_path: Path) -> None:
    model, weights = Layered(), checkpoint(1)
    weights[0][1][0, 0], weights[0][1][0, 1] = torch.nan, -0.0
    assert load_all(tmp_path, model, weights) == {"error": None, "tensors": {}}
    assert call(tmp_path, model, action="read", tensors=listed(weights))["tensors"] == crcs(weights)
    assert load_all(tmp_path, Layered(torch.bfloat16), weights)["error"] is None
    plain = model.load_weights
    for name in ("embed_tokens.weight", "q_proj.weight", "v_proj.bias", "up_proj.weight", "norm", "steps"):

        def damaging(loaded, name=name) -> None:
            plain(loaded)
            model.layer.slice_of(name)[()] += 1

        model.load_weights = damaging
        assert f"holds another layer.{name} than was sent" in load_all(tmp_path, model, weights)["error"]
    wrong = [*weights[:-1], ("layer.other", torch.zeros(2))]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "has no tensor layer.other" in load_all(tmp_path, model, wrong)["error"]
    assert all(
        torch.equal(before[name].nan_to_num(), model.state_dict()[name].nan_to_num()) for name in before
    )


def test_fused_parameters_without_padding_are_read_back(tmp_path: Path) -> None:
    model, weights = Layered(), checkpoint(1)
    load(tmp_path, model, weights)
    order = [pair for pair in reversed(weights) if "_proj" in pair[0] and "up" not in pair[0]]
    reply = call(tmp_path, model, action="read", tensors=listed(order))["tensors"]
    assert reply == crcs(order)


class OfBlocks(torch.nn.Module):
    """Queries, keys and values in one matrix of fp8, with a scale for each block of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = torch.nn.Module()
        self.qkv_proj.output_partition_sizes = [8, 4, 4]
        self.qkv_proj.weight = self._parameter(torch.zeros(16, 16).to(torch.float8_e4m3fn))
        self.qkv_proj.weight_scale_inv = self._parameter(torch.zeros(4, 4))

    def _parameter(self, tensor: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            module, _, kind = name.rpartition(".")
            rows = {"q": (0, 8), "k": (8, 12), "v": (12, 16)}[module[0]]
            start, end = (row // (4 if "scale" in kind else 1) for row in rows)
            getattr(self.qkv_proj, kind)[start:end] = tensor


def test_scales_of_fused_layers_are_compared_in_their_own_rows(tmp_path: Path) -> None:
    holder, weights = torch.nn.Module(), []
    holder.self_attn = OfBlocks()
    prefix = "self_attn."
    holder.load_weights = lambda named: holder.self_attn.load_weights(
        (name.removeprefix(prefix), tensor) for name, tensor in named
    )
    for name, rows in (("q", 8), ("k", 4), ("v", 4)):
        numbers = torch.randn(rows, 16).to(torch.float8_e4m3fn)
        weights.append((f"{prefix}{name}_proj.weight", numbers))
        weights.append((f"{prefix}{name}_proj.weight_scale_inv", torch.rand(rows // 4, 4)))
    assert load_all(tmp_path, holder, weights) == {"error": None, "tensors": {}}
    reply = call(tmp_path, holder, action="read", tensors=listed(weights))
    assert reply == {"error": None, "tensors": crcs(weights)}
    # A scale that is lost on its way is found.
    whole = holder.load_weights
    holder.load_weights = lambda named: whole(pair for pair in named if "k_proj.weight_scale" not in pair[0])
    changed = [(name, tensor * 2 if "scale" in name else tensor) for name, tensor in weights]
    assert "k_proj.weight_scale_inv" in str(load_all(tmp_path, holder, changed)["error"])


class Latent(torch.nn.Module):
    """What latent attention projects its states to: in SGLang's DeepseekV2AttentionMLA one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_qkv_a_proj_with_mqa = torch.nn.Linear(4, 8, bias=False)

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        parts = {name.split(".")[1]: tensor for name, tensor in weights}
        self.fused_qkv_a_proj_with_mqa.weight.copy_(
            torch.cat([parts["q_a_proj"], parts["kv_a_proj_with_mqa"]])
        )


def test_fused_projections_of_latent_attention_are_compared(tmp_path: Path) -> None:
    holder = torch.nn.Module()
    holder.self_attn = Latent()
    holder.load_weights = holder.self_attn.load_weights
    sizes = {"kv_a_proj_with_mqa": 5, "q_a_proj": 3}
    weights = [(f"self_attn.{name}.weight", torch.randn(rows, 4)) for name, rows in sizes.items()]
    load(tmp_path, holder, weights)
    reply = call(tmp_path, holder, action="read", tensors=listed(weights))
    assert reply == {"error": None, "tensors": crcs(weights)}


def test_ranks_with_shards_report_the_tensors_they_received(tmp_path: Path) -> None:
    weights = [("anything", torch.arange(5, dtype=torch.bfloat16)), ("nothing", torch.empty(0, 3))]
    model = Layered()
    model.load_weights = list
    assert load(tmp_path, model, weights, whole=False) == {"error": None, "tensors": crcs(weights)}


def test_experts_are_not_read(tmp_path: Path) -> None:
    reply = call(tmp_path, Layered(), action="read", tensors=[["mlp.experts.0.up_proj.weight", [1], "int8"]])
    assert reply == {"error": None, "tensors": {"mlp.experts.0.up_proj.weight": None}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tensors": [["layer.other", [2], "float32", 0]]}, "has no tensor layer.other"),
        ({"tensors": [["layer.norm", [2], "float32", 0]]}, "the server's model has ()"),
        ({"tensors": [["layer.steps", [3], "int64", 0]]}, "the server's model has (2,)"),
        ({"tensors": [["layer.steps", [2], "int65", 0]]}, "no such dtype"),
        ({"tensors": [["layer.steps", [2], "load", 0]]}, "no such dtype"),
        ({"tensors": [["layer.steps", [-2], "int64", 0]]}, "no such dtype, shape"),
        ({"tensors": [["layer.steps", [2], "int64", -8]]}, "offset"),
        ({"tensors": [["layer.steps", [2], "int64", 1 << 20]]}, "beyond the end"),
        ({"tensors": 3}, "TypeError"),
        ({"action": None, "tensors": [["layer.other", [1], "int8"]]}, "has no tensor"),
        ({"file": f"/no/such/{FILE}"}, "FileNotFoundError"),
        ({"file": "/dev/null"}, "its name does not begin with agentrl-weights-"),
        ({"file": f"/{FILE}/"}, "its name does not begin with agentrl-weights-"),
        ({"file": f"{FILE}\0"}, "ValueError"),
        ({"whole": None, "tensors": [["layer.other", [1], "float32", 0]]}, "AttributeError"),
    ],
)
def test_an_invalid_request_is_reported_and_changes_nothing(
    tmp_path: Path, changes: dict[str, JSON], sentence: str
) -> None:
    model = Layered()
    load(tmp_path, model, checkpoint(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reply = load(tmp_path, model, checkpoint(2), **changes)
    assert sentence in reply["error"]
    assert reply["tensors"] == {}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_links_are_not_followed(tmp_path: Path) -> None:
    link = tmp_path / f"{FILE}-link"
    link.symlink_to(tmp_path / FILE)
    assert "OSError" in load(tmp_path, Layered(), checkpoint(1), file=str(link))["error"]


def test_only_files_with_a_senders_prefix_are_opened(tmp_path: Path) -> None:
    model = Layered()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load(tmp_path, Layered(), checkpoint(1))
    (tmp_path / FILE).rename(tmp_path / "model.bin")
    reply = load(tmp_path, model, checkpoint(2), file=str(tmp_path / "model.bin"))
    assert "model.bin is no file of a sender" in reply["error"]
    (tmp_path / f"{FILE}-folder").mkdir()
    reply = load(tmp_path, model, checkpoint(2), file=str(tmp_path / f"{FILE}-folder"))
    assert "is no file of this user" in reply["error"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def held(weights) -> Bucket:
    """A bucket as a trainer's rank has it."""
    (bucket,) = pack_buckets(weights, 1 << 20)
    buffer = SharedBuffer(len(bucket.data))
    buffer.bytes_B.numpy()[:] = bucket.data
    return Bucket(bucket.tensors, buffer.bytes_B.numpy(), buffer)


def test_memory_without_a_name_is_loaded(tmp_path: Path) -> None:
    weights = checkpoint(1)[-1:] + checkpoint(1)[:-1]
    model, bucket = Layered(), held(weights)
    (file,) = in_memory(False, [bucket])
    assert file is not None
    reply = call(tmp_path, model, action="load_all", files=[[file.path, file.tensors]])
    assert reply == {"error": None, "tensors": {}}
    assert call(tmp_path, model, action="read", tensors=listed(weights))["tensors"] == crcs(weights)


def test_a_bucket_in_which_a_tensor_is_not_aligned_has_no_file() -> None:
    assert in_memory(False, [held(checkpoint(1))]) == [None]


def test_no_other_open_file_of_the_user_is_read_or_written(tmp_path: Path) -> None:
    """Neither other memory, a pipe that nobody writes to, or a file; and memory takes no reply."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    read_end, write_end = os.pipe()
    memory, file = os.memfd_create("another"), os.open(precious, os.O_RDWR)
    bucket = held(checkpoint(1))
    for descriptor in (memory, file, read_end, 1_000_000):
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        reply = load(tmp_path, Layered(), checkpoint(1), file=path)
        assert "is no memory of a sender" in reply["error"] or "FileNotFoundError" in reply["error"]
    before = bucket.data.tobytes()
    for path in (bucket.file.path, f"/proc/{os.getpid()}/fd/{file}"):
        payload = inside._payload({"action": "read", "reply": path, "tensors": []})
        agentrl_sglang.load(Layered(), Careful(io.BytesIO(payload)).load())
    assert bucket.data.tobytes() == before
    assert precious.read_bytes() == b"precious"
    for descriptor in (memory, file, read_end, write_end):
        os.close(descriptor)


@pytest.mark.parametrize("name", ["precious", f"{FILE}/precious", f"precious-{FILE}"])
def test_a_reply_overwrites_no_other_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    for action in ("load", "read"):
        payload = inside._payload({"action": action, "reply": str(path), "tensors": []})
        agentrl_sglang.load(Layered(), Careful(io.BytesIO(payload)).load())
        assert path.read_text() == "precious"


def test_a_shorter_reply_overwrites_a_longer_one(tmp_path: Path) -> None:
    (tmp_path / REPLY).write_text("x" * 1000)
    assert call(tmp_path, Layered(), action="read", tensors=[]) == {"error": None, "tensors": {}}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"reply": "/no/such/folder/agentrl-weights-reply"}',
        b'{"reply": "agentrl-weights-\\u0000"}',
        b'{"reply": "agentrl-weights-\\ud800"}',
        b'{"reply": 3}',
    ],
)
def test_bytes_that_are_no_request_raise_nothing(body: bytes) -> None:
    agentrl_sglang.load(Layered(), [("agentrl", torch.tensor(list(body), dtype=torch.uint8))])
    agentrl_sglang.load(Layered(), [])


def test_an_interrupt_is_no_reply(tmp_path: Path) -> None:
    model = Layered()

    def interrupted(weights: object) -> None:
        raise KeyboardInterrupt

    model.load_weights = interrupted
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, model, checkpoint(1))


def test_it_imports_only_torch_and_the_standard_library() -> None:
    module, _, function = inside.LOADER.partition(".")
    files = list((inside.LOADER_FOLDER / module).glob("*.py"))
    assert hasattr(agentrl_sglang, function)
    assert len(files) > 1
    needed = set()
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        match node:
            case ast.Import(names=names):
                needed |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(name), level=0):
                needed.add(name)
    assert {name.partition(".")[0] for name in needed} - sys.stdlib_module_names == {"torch"}


def load_device(
    folder: Path, model: torch.nn.Module, packed: Packed, **changes: JSON
) -> Mapping[str, object]:
    return call(folder, model, **(request_of(packed.weights, is_whole=True) | changes))


def test_the_memory_of_a_device_is_loaded_then_compared_bit_for_bit(tmp_path: Path) -> None:
    model, weights = Layered(), checkpoint(1)
    weights[0][1][0, 1] = -0.0
    packed = packed_of(weights)
    assert len(packed.weights.parts) > 3
    for _ in range(2):
        assert load_device(tmp_path, model, packed) == {"error": None, "tensors": {}}
        assert call(tmp_path, model, action="read", tensors=listed(weights))["tensors"] == crcs(weights)
    assert load_device(tmp_path, Layered(torch.bfloat16), packed)["error"] is None
    for name in ("embed_tokens.weight", "q_proj.weight", "v_proj.bias", "up_proj.weight", "norm", "steps"):
        other = Layered()

        def damaging(loaded, name=name, other=other, plain=other.load_weights) -> None:
            plain(loaded)
            other.layer.slice_of(name)[()] += 1

        other.load_weights = damaging
        assert f"holds another layer.{name} than was sent" in load_device(tmp_path, other, packed)["error"]
    for part in packed.weights.parts:
        packed.memory.bytes_B[part.start] ^= 1
        assert "holds other bytes than was sent" in load_device(tmp_path, model, packed)["error"]
        # A rank with shards compares no tensor with its model, and yet these bytes.
        assert "holds other bytes" in load_device(tmp_path, model, packed, whole=False)["error"]
        packed.memory.bytes_B[part.start] ^= 1
    assert load_device(tmp_path, model, packed)["error"] is None


def test_a_request_for_the_memory_of_a_device_is_checked_before_the_model_changes(tmp_path: Path) -> None:
    model, packed = Layered(), packed_of(checkpoint(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    request = request_of(packed.weights, is_whole=True)
    memory, (*rest, last) = request["memory"], request["parts"]
    size = memory["num_bytes"]
    start, end, content, ((name, shape, dtype, offset), *tensors) = last
    other = tmp_path / "secret"
    other.write_bytes(b"?" * size)

    def part(**changes) -> JSON:
        fields = {"start": start, "end": end, "content": content} | changes
        return [*rest, [*fields.values(), last[3]]]

    def tensor(*fields: object) -> JSON:
        return [*rest, [start, end, content, [[*fields], *tensors]]]

    handle = {"num_bytes": size, "path": "", "device": "GPU-0"}
    hostile = {
        "a path and a handle": {"memory": {**memory, "cuda": "ab" * 64}},
        "neither": {"memory": {**memory, "path": ""}},
        "a short handle": {"memory": {**handle, "cuda": "ab" * 63}},
        "a long handle": {"memory": {**handle, "cuda": "ab" * 65}},
        "a handle that is no hexadecimal": {"memory": {**handle, "cuda": "zz" * 64}},
        "a handle of another type": {"memory": {**handle, "cuda": 5}},
        "a handle where there is no card": {"memory": {**handle, "cuda": "ab" * 64}},
        "an unknown field": {"memory": {**memory, "pickle": "x"}},
        "a missing field": {"memory": {"num_bytes": size, "path": memory["path"]}},
        "another file": {"memory": {**memory, "path": str(other)}},
        "more bytes than there are": {"memory": {**memory, "num_bytes": size + 1}},
        "less than no bytes": {"memory": {**memory, "num_bytes": -1}},
        "a size that is no integer": {"memory": {**memory, "num_bytes": float(size)}},
        "a size that is a truth": {"memory": {**memory, "num_bytes": True}},
        "a part beyond the end": {"parts": part(end=size + 1)},
        "a part before the start": {"parts": part(start=-1)},
        "a part that ends before it starts": {"parts": part(start=end, end=start)},
        "a part between bytes": {"parts": part(start=0.5)},
        "a hash that is no integer": {"parts": part(content=str(content))},
        "a tensor beyond its part": {"parts": tensor(name, shape, dtype, end)},
        "a tensor before its part": {"parts": tensor(name, shape, dtype, offset - 8)},
        "a tensor off its alignment": {"parts": tensor(name, shape, dtype, offset + 1)},
        "a tensor of another shape": {"parts": tensor(name, [2**40, 2**40], dtype, offset)},
        "an unknown tensor": {"parts": tensor("layer.other", shape, dtype, offset)},
        "a dtype that is none": {"parts": tensor(name, shape, "load", offset)},
    }
    for what, change in hostile.items():
        assert load_device(tmp_path, model, packed, **change)["error"], what
        assert all(torch.equal(before[key], model.state_dict()[key]) for key in before), what
    assert load_device(tmp_path, model, packed)["error"] is None

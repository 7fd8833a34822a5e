"""What runs inside SGLang's scheduler: it loads, tells what is held, and never raises."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import stat
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports import inside
from agentrl.engine.sglang.transports.shared_memory import _write_bucket
from agentrl.errors import EngineError
from agentrl.types import JSON
from agentrl.weights import pack_buckets
from agentrl.weights.codec import bytes_of
from tests.engine.scheduling import Layered, checkpoint

ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
}
REPLY, FILE = f"{agentrl_sglang.PREFIX}reply", f"{agentrl_sglang.PREFIX}file"


class Careful(pickle.Unpickler):
    """Takes what a tensor by value is made of. SGLang's own allows this and more, handles among it."""

    def find_class(self, module: str, name: str) -> object:
        assert (module, name) in ALLOWED
        return super().find_class(module, name)


def call(folder: Path, model: torch.nn.Module, **message: JSON) -> Mapping[str, object]:
    """Ask the loader as a server would; gives its reply."""
    reply = folder / REPLY
    reply.touch()
    payload = inside._payload({**message, "reply": str(reply)})
    agentrl_sglang.load(model, Careful(io.BytesIO(payload)).load())
    return json.loads(reply.read_text())


def load(folder: Path, model: torch.nn.Module, named, **changes: JSON) -> Mapping[str, object]:
    (bucket,) = pack_buckets(named, 1 << 20)
    tensors = _write_bucket(folder / FILE, bucket)
    message = {"action": "load", "file": str(folder / FILE), "tensors": tensors, "whole": True}
    return call(folder, model, **(message | changes))


def listed(named) -> JSON:
    return [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in named]


def crcs(named) -> dict[str, list[object]]:
    return {
        name: [str(tensor.dtype).removeprefix("torch."), zlib.crc32(bytes_of(tensor).data)]
        for name, tensor in named
    }


def test_what_is_told_is_what_fused_and_padded_parameters_hold(tmp_path: Path) -> None:
    model, named = Layered(), checkpoint(1)
    assert load(tmp_path, model, named) == {"error": None, "tensors": {}}
    assert call(tmp_path, model, action="read", tensors=listed(named)) == {
        "error": None,
        "tensors": crcs(named),
    }
    for name in ("q_proj.weight", "v_proj.bias", "up_proj.weight", "embed_tokens.weight", "norm", "steps"):
        place = model.layer.place(name)
        before = place.clone()
        place += 1
        told = call(tmp_path, model, action="read", tensors=listed(named))["tensors"]
        assert [one for one in told if told[one] != crcs(named)[one]] == [f"layer.{name}"]
        place.copy_(before)


def test_fused_parameters_without_padding_lie_as_the_tensors_say(tmp_path: Path) -> None:
    model, named = Layered(), checkpoint(1)
    load(tmp_path, model, named)
    order = [pair for pair in reversed(named) if "_proj" in pair[0] and "up" not in pair[0]]
    told = call(tmp_path, model, action="read", tensors=listed(order))["tensors"]
    assert told == crcs(order)


def test_ranks_that_hold_parts_tell_what_arrived(tmp_path: Path) -> None:
    named = [("anything", torch.arange(5, dtype=torch.bfloat16)), ("nothing", torch.empty(0, 3))]
    model = Layered()
    model.load_weights = list
    assert load(tmp_path, model, named, whole=False) == {"error": None, "tensors": crcs(named)}


def test_experts_are_not_read(tmp_path: Path) -> None:
    told = call(tmp_path, Layered(), action="read", tensors=[["mlp.experts.0.up_proj.weight", [1], "int8"]])
    assert told == {"error": None, "tensors": {"mlp.experts.0.up_proj.weight": None}}


@pytest.mark.parametrize(
    ("changes", "said"),
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
def test_what_makes_no_sense_is_told_and_changes_nothing(
    tmp_path: Path, changes: dict[str, JSON], said: str
) -> None:
    model = Layered()
    load(tmp_path, model, checkpoint(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told = load(tmp_path, model, checkpoint(2), **changes)
    assert said in told["error"]
    assert told["tensors"] == {}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_links_are_not_followed(tmp_path: Path) -> None:
    link = tmp_path / f"{FILE}-link"
    link.symlink_to(tmp_path / FILE)
    assert "OSError" in load(tmp_path, Layered(), checkpoint(1), file=str(link))["error"]


def test_only_files_are_opened_that_are_named_as_a_senders(tmp_path: Path) -> None:
    model = Layered()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load(tmp_path, Layered(), checkpoint(1))
    (tmp_path / FILE).rename(tmp_path / "model.bin")
    told = load(tmp_path, model, checkpoint(2), file=str(tmp_path / "model.bin"))
    assert "model.bin is no file of a sender" in told["error"]
    (tmp_path / f"{FILE}-folder").mkdir()
    told = load(tmp_path, model, checkpoint(2), file=str(tmp_path / f"{FILE}-folder"))
    assert "is no file of this user" in told["error"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["precious", f"{FILE}/precious", f"precious-{FILE}"])
def test_a_reply_overwrites_no_other_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    for action in ("load", "read"):
        payload = inside._payload({"action": action, "reply": str(path), "tensors": []})
        agentrl_sglang.load(Layered(), Careful(io.BytesIO(payload)).load())
        assert path.read_text() == "precious"


def test_a_shorter_reply_is_whole(tmp_path: Path) -> None:
    (tmp_path / REPLY).write_text("x" * 1000)
    assert call(tmp_path, Layered(), action="read", tensors=[]) == {"error": None, "tensors": {}}


@pytest.mark.parametrize(
    "words",
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
def test_words_that_are_no_request_end_nothing(words: bytes) -> None:
    agentrl_sglang.load(Layered(), [("agentrl", torch.tensor(list(words), dtype=torch.uint8))])
    agentrl_sglang.load(Layered(), [])


def test_an_interrupt_is_no_reply(tmp_path: Path) -> None:
    model = Layered()

    def interrupted(weights: object) -> None:
        raise KeyboardInterrupt

    model.load_weights = interrupted
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, model, checkpoint(1))


def test_it_needs_nothing_of_ours() -> None:
    module, _, function = inside.LOADER.partition(".")
    path = inside.LOADER_FOLDER / f"{module}.py"
    assert hasattr(agentrl_sglang, function)
    needed = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                needed |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(name)):
                needed.add(name)
    assert {name.partition(".")[0] for name in needed} - sys.stdlib_module_names == {"torch"}


def test_shared_files_are_private_and_go_with_their_block(tmp_path: Path) -> None:
    with inside.shared_files(tmp_path, 2) as paths:
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]
        for path in paths:
            os.utime(path, (0, 0))
        inside.sweep(tmp_path)
        assert all(path.exists() for path in paths), "a file in use was removed"
    assert list(tmp_path.iterdir()) == []
    stale, fresh, other = (tmp_path / name for name in ("agentrl-weights-a", "agentrl-weights-b", "x"))
    for path in (stale, fresh, other):
        path.touch()
    os.utime(stale, (0, 0))
    os.utime(other, (0, 0))
    inside.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == [fresh, other]
    with pytest.raises(EngineError, match="takes no file"), inside.shared_file(tmp_path / "none"):
        pass

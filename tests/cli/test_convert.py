"""`agentrl convert`, as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from agentrl.checkpoints.saving import save_model
from agentrl.cli import main
from agentrl.weights import checksum, named_weights
from tests.trainer.megatron.models import model_of
from tests.trainer.tiny import tokenizer

WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = None
from agentrl.cli import main
main(["convert", "hf", "megatron"])
main(["convert", "megatron", "back"])
"""


@pytest.fixture(autouse=True)
def _model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(model_of("qwen3"), tokenizer(), "hf")


def told(capsys, *arguments):
    main(["convert", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_there_and_back_says_the_same_checksum(tmp_path, capsys):
    there = told(capsys, "hf", "tp2", "--tensor-model-parallel-size", "2")
    back = told(capsys, "tp2", "back")
    weights = list(named_weights(model_of("qwen3")))
    assert there == {
        "source": "hf",
        "target": "tp2",
        "direction": "to Megatron",
        "dtype": "float32",
        "cast_from": None,
        "tensors": len(weights),
        "bytes": sum(tensor.nbytes for _, tensor in weights),
        "checksum": checksum(weights),
        "seconds": there["seconds"],
    }
    changed = {"source": "tp2", "target": "back", "direction": "to Hugging Face"}
    assert back == {**there, **changed, "seconds": back["seconds"]}
    assert AutoTokenizer.from_pretrained("back").vocab_size == tokenizer().vocab_size
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "tp2", "back"}


def test_a_person_is_told_what_was_done(capsys):
    main(["convert", "hf", "bf16", "--dtype", "bfloat16"])
    out = capsys.readouterr().out
    assert "✓ converting hf 6/6 done" in out
    assert "bf16: to Megatron, 47 tensors" in out
    assert "bytes of bfloat16 (cast from float32), checksum" in out


def test_megatron_itself_is_not_needed():
    command = [sys.executable, "-c", WITHOUT_MEGATRON]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("hf full", "full is there already, and would be lost; name another target, or remove it."),
        ("hf full/kept", "full/kept is there already, and would be lost"),
        ("hf hf/inside", "hf/inside lies inside of hf; name a target beside it."),
        ("full out", "full holds neither a config.json nor a megatron.json; name a Hugging Face or"),
        ("no-such out", "no-such holds neither a config.json nor a megatron.json"),
        (
            "hf out --tensor-model-parallel-size 3",
            "tensor_model_parallel_size = 3 does not divide the model's 4 attention heads; lower it.",
        ),
        (
            "hf out --tensor-model-parallel-size 4",
            "tensor_model_parallel_size = 4 does not divide the model's 2 heads of keys and values",
        ),
        ("hf out --tensor-model-parallel-size 0", "'--tensor-model-parallel-size': 0 is not in the range"),
        ("hf out --dtype int8", "'int8' is not one of 'float32', 'bfloat16'."),
        ("megatron out --tensor-model-parallel-size 2", "leave --tensor-model-parallel-size out."),
        ("hf full/kept/out", "full/kept/out was not written: "),
    ],
)
def test_a_mistake_is_a_sentence_and_nothing_is_lost(tmp_path, capsys, arguments, says):
    main(["convert", "hf", "megatron"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("somebody's")
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["convert", *arguments.split()])
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("agentrl: ")
    assert says in err
    assert err.count("\n") == 1
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == before
    assert (tmp_path / "full" / "kept").read_text() == "somebody's"


def test_an_empty_folder_may_be_the_target(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert told(capsys, "hf", "empty")["direction"] == "to Megatron"
    assert (tmp_path / "empty" / "megatron.json").is_file()

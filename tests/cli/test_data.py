"""`agentrl data check`."""

from __future__ import annotations

import json

import pytest

from agentrl.cli import main
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from tests.data.files import ROWS, write_lines, write_parquet

KEYS = ("--input-key=question", "--label-key=answer")


def checked(capsys, *arguments, code=0):
    """What is printed; a check that finds something wrong ends with a code."""
    if code == 0:
        main(["data", "check", *arguments])
    else:
        with pytest.raises(SystemExit) as left:
            main(["data", "check", *arguments])
        assert left.value.code == code
    return capsys.readouterr()


@pytest.mark.parametrize("write", [write_lines, write_parquet])
def test_all_of_a_file_is_counted_measured_and_shown(tmp_path, capsys, write):
    path = write(tmp_path / f"a.{'jsonl' if write is write_lines else 'parquet'}")
    found = json.loads(checked(capsys, str(path), *KEYS, "--json").out)
    lengths = sorted(len(row["question"]) for row in ROWS)
    assert (found["ok"], found["prompts"], found["bad"], found["labels"]) == (True, 40, 0, 40)
    assert (found["turns"], found["unit"], found["tools"]) == ({"1": 40}, "characters", 0)
    assert (found["lengths"]["min"], found["lengths"]["max"]) == (lengths[0], lengths[-1])
    assert found["lengths"]["mean"] == pytest.approx(sum(lengths) / 40)
    assert found["rendered"] == [f"user: What is {n} + {n}?" for n in (0, 13, 26)]
    shown = checked(capsys, f"{path}@[5:8]", *KEYS).out
    for word in (
        "prompts",
        "3",
        "with an answer",
        "characters, median",
        "user: What is 6 + 6?",
        "fingerprint",
    ):
        assert word in shown


def test_with_a_tokenizer_lengths_are_tokens_and_prompts_what_the_model_sees(tmp_path, capsys):
    tokenizer = train_tokenizer(["What is it?"], special_tokens=(), vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "model")
    path = write_lines(tmp_path / "a.jsonl", [{"input": "What is it?"}, {"input": "What is it? " * 9}])
    arguments = (str(path), f"--tokenizer={tmp_path / 'model'}", "--json")
    found = json.loads(checked(capsys, *arguments).out)
    (first, *_) = found["rendered"]
    assert first == "<|user|> What is it?<|end|><|assistant|>"
    assert (found["unit"], found["lengths"]["min"]) == ("tokens", len(tokenizer.encode(first)))
    inline = json.loads(checked(capsys, *arguments, "--dialect=inline").out)
    assert (inline["unit"], inline["prompts"]) == ("tokens", 2)


def test_every_bad_row_is_counted_and_the_first_are_named(tmp_path, capsys):
    rows = [*ROWS, {"answer": "1"}, *ROWS, *([{"question": 3}] * 30)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    printed = checked(capsys, str(path), "--input-key=question", "--json", code=2)
    found = json.loads(printed.out)
    assert (found["ok"], found["prompts"], found["bad"], len(found["problems"])) == (False, 80, 31, 20)
    assert found["problems"][0].startswith(f"{path}, line 41: there is no `question`. It has `answer`")
    assert f"{path}, line 82: `question` is 3" in found["problems"][1]
    shown = checked(capsys, str(path), "--input-key=question", code=2).out
    assert f"error {path}, line 41: there is no `question`" in shown
    assert "and 11 more." in shown


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.jsonl", "there is no file or folder"),
        ("a.parquet", "there is no `input`. It has `question`"),
        ("a.jsonl@[1]", "a slice is path@[start:stop]"),
    ],
)
def test_what_cannot_be_read_at_all_is_one_sentence(tmp_path, capsys, name, says):
    write_parquet(tmp_path / "a.parquet")
    said = checked(capsys, str(tmp_path / name), code=2).err
    assert said.startswith("agentrl: ")
    assert says in said
    assert said.count("\n") == 1

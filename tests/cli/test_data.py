"""`agentrl data check`."""

from __future__ import annotations

import json

import pytest

from agentrl.cli import main
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from tests.data.files import ROWS, write_lines, write_parquet

KEYS = ("--input-key=question", "--label-key=answer")


def run_check(capsys, *arguments, code=0):
    """The output of the command, which ends with this exit code."""
    if code == 0:
        main(["data", "check", *arguments])
    else:
        with pytest.raises(SystemExit) as caught:
            main(["data", "check", *arguments])
        assert caught.value.code == code
    return capsys.readouterr()


@pytest.mark.parametrize("write", [write_lines, write_parquet])
def test_the_report_has_counts_lengths_and_rendered_prompts(tmp_path, capsys, write):
    path = write(tmp_path / f"a.{'jsonl' if write is write_lines else 'parquet'}")
    report = json.loads(run_check(capsys, str(path), *KEYS, "--json").out)
    lengths = sorted(len(row["question"]) for row in ROWS)
    assert (report["ok"], report["prompts"], report["bad"], report["labels"]) == (True, 40, 0, 40)
    assert (report["turns"], report["unit"], report["tools"]) == ({"1": 40}, "characters", 0)
    assert (report["lengths"]["min"], report["lengths"]["max"]) == (lengths[0], lengths[-1])
    assert report["lengths"]["mean"] == pytest.approx(sum(lengths) / 40)
    assert report["rendered"] == [f"user: What is {n} + {n}?" for n in (0, 13, 26)]
    output = run_check(capsys, f"{path}@[5:8]", *KEYS).out
    for word in (
        "prompts",
        "3",
        "with an answer",
        "characters, median",
        "user: What is 6 + 6?",
        "fingerprint",
    ):
        assert word in output


def test_with_a_tokenizer_lengths_are_tokens_and_prompts_are_rendered(tmp_path, capsys):
    tokenizer = train_tokenizer(["What is it?"], special_tokens=(), vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "model")
    path = write_lines(tmp_path / "a.jsonl", [{"input": "What is it?"}, {"input": "What is it? " * 9}])
    arguments = (str(path), f"--tokenizer={tmp_path / 'model'}", "--json")
    report = json.loads(run_check(capsys, *arguments).out)
    (first, *_) = report["rendered"]
    assert first == "<|user|> What is it?<|end|><|assistant|>"
    assert (report["unit"], report["lengths"]["min"]) == ("tokens", len(tokenizer.encode(first)))
    inline = json.loads(run_check(capsys, *arguments, "--dialect=inline").out)
    assert (inline["unit"], inline["prompts"]) == ("tokens", 2)


def test_a_column_of_answers_without_any_is_a_mistake(tmp_path, capsys):
    rows = [{"question": "What?", "answer": None}, {"question": "Where?", "answer": None}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    said = run_check(capsys, str(path), *KEYS, code=2).out
    assert "no row has an answer in `answer`" in " ".join(said.split())
    assert json.loads(run_check(capsys, str(path), KEYS[0], "--json").out)["ok"]


def test_every_bad_row_is_counted_and_the_first_are_reported(tmp_path, capsys):
    rows = [*ROWS, {"answer": "1"}, *ROWS, *([{"question": 3}] * 30)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    printed = run_check(capsys, str(path), "--input-key=question", "--json", code=2)
    report = json.loads(printed.out)
    assert (report["ok"], report["prompts"], report["bad"], len(report["problems"])) == (False, 80, 31, 20)
    assert report["problems"][0].startswith(f"{path}, line 41: there is no `question`. It has `answer`")
    assert f"{path}, line 82: `question` is 3" in report["problems"][1]
    output = run_check(capsys, str(path), "--input-key=question", code=2).out
    assert f"error {path}, line 41: there is no `question`" in output
    assert "and 11 more." in output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", "there is no file or folder"),
        ("a.parquet", "there is no `input`. It has `question`"),
        ("a.jsonl@[1]", "a slice is path@[start:stop]"),
    ],
)
def test_an_unreadable_file_is_a_one_line_error(tmp_path, capsys, name, message):
    write_parquet(tmp_path / "a.parquet")
    stderr = run_check(capsys, str(tmp_path / name), code=2).err
    assert stderr.startswith("agentrl: ")
    assert message in stderr
    assert stderr.count("\n") == 1


DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
"""Of DAPO-Math-17k (arXiv:2503.14476), as published."""
LETTER_PROMPT = (
    "Answer the question. The last line of your response should be of the following format: 'Answer: $LETTER'"
)
BOXED_PROMPT = "{} Put your final answer within \\boxed{{}}."
TAGGED_PROMPT = "You can directly provide the answer inside <answer> and </answer>. Question: {}"
GSM8K_PROMPT = "{} Write the final answer after ####."
PLAIN_PROMPT = "{} Write the answer:"


@pytest.mark.parametrize(
    ("prompt", "label", "fitting"),
    [
        (DAPO_PROMPT, "34", {"dapo", "number"}),
        (BOXED_PROMPT, "34", {"math", "deepscaler", "number"}),
        (GSM8K_PROMPT, "34", {"number", "exact_match", "f1"}),
        (TAGGED_PROMPT, "34", {"number"}),
        (PLAIN_PROMPT, "34", {"exact_match", "f1", "number", "math", "dapo", "deepscaler"}),
        (PLAIN_PROMPT, "Paris", {"exact_match", "f1", "math", "dapo", "deepscaler"}),
        (LETTER_PROMPT, "C", {"gpqa", "dapo"}),
        (PLAIN_PROMPT, None, set()),
        (PLAIN_PROMPT, "", set()),
        (PLAIN_PROMPT, [], set()),
    ],
)
def test_rows_whose_label_a_grader_does_not_pay_are_named(tmp_path, capsys, prompt, label, fitting):
    rows = [{"input": prompt.format(f"{n} + 17?"), "answer": label} for n in range(3)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    for grader in ("exact_match", "f1", "number", "gpqa", "dapo", "math", "deepscaler"):
        fits = grader in fitting
        arguments = (str(path), "--label-key=answer", f"--reward={grader}", "--json")
        report = json.loads(run_check(capsys, *arguments, code=0 if fits else 2).out)
        assert report["ok"] == fits, (grader, report["unfit"])
        assert [sentence.split(": ")[0] for sentence in report["unfit"]] == [
            f"{path}, line {n}" for n in (1, 2, 3) if not fits
        ]


def test_rows_without_tests_are_named_and_an_empty_answer_must_not_pay(tmp_path, capsys):
    path = write_lines(tmp_path / "a.jsonl", [{"input": "?", "answer": "9"}])
    output = run_check(capsys, str(path), "--label-key=answer", "--reward=code", code=2).out
    assert "line 1 has no tests of programs in its label or `tests`" in output


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_long_prompts_and_long_errors_are_cut(tmp_path, capsys, as_json):
    path = tmp_path / "long.jsonl"
    names = {f"{n:04}" * 1_000: n for n in range(100)}
    path.write_text(f"{json.dumps({'question': 'x' * 3_000_000, 'answer': 1})}\n{json.dumps(names)}\n")
    output = run_check(capsys, str(path), *KEYS, *as_json, code=2).out
    assert "characters are left out ...]" in output
    assert len(output) < 30_000


def test_a_line_that_is_too_long_is_a_sentence(tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b"{}\n")
        # A hole in the file, which takes no place on the disk.
        file.truncate(100 << 20)
    printed = run_check(capsys, str(path), code=2).err
    assert "line 2 is longer than 67,108,864 bytes; write each row on a line of its own" in printed
    assert len(printed) < 1_000

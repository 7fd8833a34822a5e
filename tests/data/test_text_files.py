"""Prompts from tables of text, and from files under gzip: the rows that the writer's library wrote."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess

import pyarrow as pa
import pytest
from pyarrow import csv as arrow_csv

from agentrl.data import Columns, FileSource
from agentrl.data.conversations import Dialogues
from agentrl.data.rows import packed
from agentrl.errors import DataError

COLUMNS = Columns("question", "answer", "facts")
CELLS = [
    "007",
    "a, b",
    'she said "no"',
    "two\nlines",
    "",
    "Grüße, 世界",
    " spaces ",
    "1e3",
    "null",
    "=1+1",
    "a\tb",
]
ROWS = [
    {"question": f"q{n} {cell}", "answer": cell, "facts": json.dumps({"n": n})}
    for n, cell in enumerate(CELLS)
]


def read(path, columns=COLUMNS):
    source = FileSource(str(path), columns, shuffle=False, split="train")
    return [source.task(number) for number in range(source.num_tasks)]


def written(path, *, delimiter=",", encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


@pytest.mark.parametrize(
    ("name", "delimiter", "encoding"),
    [("a.csv", ",", "utf-8"), ("a.tsv", "\t", "utf-8"), ("A.CSV", ",", "utf-8-sig")],
)
def test_cells_are_text_as_it_was_written(tmp_path, name, delimiter, encoding):
    tasks = read(written(tmp_path / name, delimiter=delimiter, encoding=encoding))
    assert [task.answer for task in tasks] == CELLS
    assert [task.prompt[0].text for task in tasks] == [row["question"] for row in ROWS]
    assert [task.metadata for task in tasks] == [{"n": number} for number in range(len(ROWS))]


def test_a_table_of_another_library_is_read(tmp_path):
    table = pa.table({name: [row[name] for row in ROWS] for name in ROWS[0]})
    arrow_csv.write_csv(table, tmp_path / "a.csv")
    assert [task.answer for task in read(tmp_path / "a.csv")] == CELLS


def test_a_cell_of_messages_is_a_conversation(tmp_path):
    messages = [{"role": "user", "content": "Hi, you"}, {"role": "assistant", "content": "Hello"}]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(messages)]])
    (dialogue,) = Dialogues(str(tmp_path / "a.csv"), messages_key="messages", tools_key=None)
    assert [turn.action.text for turn in dialogue.turns] == ["Hello"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("question,answer\na,b\n1,2,3\n", "a.csv, line 3: 3 cells under 2 columns; put a cell that holds"),
        ('question,answer\n"a\nb",1\nx\n', "a.csv, line 4: 1 cells under 2 columns"),
        ("question,question\na,b\n", "a.csv: two columns are called `question`; rename one."),
        ('question,answer\n"a,b\n', "a.csv, line 2: unexpected end of data; mend it."),
        ("question\na\n", "a.csv, line 2: there is no `answer`"),
        ("question,answer\n", "holds no prompts"),
        ("", "holds no prompts"),
    ],
)
def test_a_broken_table_is_one_sentence(tmp_path, content, sentence):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.csv", Columns("question", "answer"))
    assert sentence in str(caught.value)


def test_a_table_in_another_encoding_is_one_sentence(tmp_path):
    (tmp_path / "a.csv").write_bytes("question\nGrüße\n".encode("latin-1"))
    with pytest.raises(DataError, match="byte 12 is not UTF-8"):
        read(tmp_path / "a.csv", Columns("question"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_a_file_under_gzip_has_the_rows_of_the_file(tmp_path, name):
    path = tmp_path / name
    if path.suffix in (".csv", ".tsv"):
        written(path, delimiter="\t" if path.suffix == ".tsv" else ",")
    else:
        text = "\n".join(map(json.dumps, ROWS)) if path.suffix == ".jsonl" else json.dumps(ROWS)
        path.write_text(text)
    plain = read(path)
    fingerprint = FileSource(str(path), COLUMNS, split="train").fingerprint
    subprocess.run(["gzip", str(path)], check=True)
    unpacked = read(tmp_path / f"{name}.gz")
    assert [(task.prompt, task.answer, task.metadata) for task in unpacked] == [
        (task.prompt, task.answer, task.metadata) for task in plain
    ]
    assert FileSource(f"{path}.gz", COLUMNS, split="train").fingerprint == fingerprint


def test_splits_of_a_folder_are_found_in_the_names_of_packed_files(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl.gz").write_bytes(gzip.compress(json.dumps({"question": split}).encode()))
    source = FileSource(str(tmp_path), Columns("question"), split="test")
    assert [source.task(n).prompt[0].text for n in range(source.num_tasks)] == ["test"]


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b'{"question": "a"}', mtime=0)[:-9]])
def test_a_damaged_file_is_one_sentence(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is damaged \(.+\); pack it again\."):
        read(tmp_path / "a.jsonl.gz", Columns("question"))


def test_what_unpacks_to_too_much_is_refused_while_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "_MAX_UNPACKED_BYTES", 2 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b" " * (64 << 20)))
    with pytest.raises(DataError, match=r"unpacks to more than 0 GiB; split it, or unpack it\."):
        read(tmp_path / "a.jsonl.gz", Columns("question"))


def test_a_parquet_file_under_gzip_is_no_data(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(DataError, match="prompts are read from"):
        read(tmp_path / "a.parquet.gz", Columns("question"))

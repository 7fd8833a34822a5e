"""Prompts from Parquet and Arrow files: the same contract as for lines, and bounded memory."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data import Columns, FileSource, PromptStream
from agentrl.data.order import PIECES_PER_WINDOW
from agentrl.data.rows import open_rows, parquet
from agentrl.errors import ConfigError, DataError, MissingExtraError
from agentrl.runtime import extras
from tests.data.files import ROWS, write_arrow, write_lines, write_parquet

COLUMNS = Columns("question", "answer", "facts")
MANY = [{"question": f"question {n}", "answer": n, "ballast": "x" * 50} for n in range(500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files with the same 40 rows, and with 500."""
    directory = tmp_path_factory.mktemp("columnar")
    write_lines(directory / "rows.jsonl")
    write_parquet(directory / "rows.parquet", row_group_size=9)
    write_arrow(directory / "rows.arrow")
    write_arrow(directory / "contents.arrow", stream=False)
    write_parquet(directory / "many.parquet", MANY, row_group_size=170)
    return directory


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Reduce the rows of a piece, so that a small file has many pieces."""
    monkeypatch.setattr(parquet, "PIECE_ROWS", 16)


NAMES = ("rows.parquet", "rows.arrow", "contents.arrow")
every = pytest.mark.parametrize("name", NAMES)


def source(path, columns=COLUMNS, **settings):
    return FileSource(str(path), columns, **settings)


@every
def test_rows_are_those_of_the_same_lines(folder, name):
    lines, same = source(folder / "rows.jsonl", shuffle=False), source(folder / name, shuffle=False)
    assert same.num_tasks == 40
    for k in range(45):
        task, line = same.task(k), lines.task(k)
        assert (task.prompt, task.answer, task.metadata) == (line.prompt, line.answer, line.metadata)


@every
@given(st.none() | st.integers(-50, 50), st.none() | st.integers(-50, 50))
def test_slices_are_pythons(folder, name, start, stop):
    text = f"{folder / name}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = [row["answer"] for row in ROWS[start:stop]]
    if not expected:
        with pytest.raises(DataError, match="holds no prompts"):
            FileSource(text, COLUMNS)
        return
    in_order, shuffled = FileSource(text, COLUMNS, shuffle=False), FileSource(text, COLUMNS, seed=1)
    assert [in_order.task(k).answer for k in range(len(expected))] == expected
    assert sorted(shuffled.task(k).answer for k in range(len(expected))) == sorted(expected)


@given(st.integers(0, 99), st.integers(0, 3))
def test_every_epoch_is_a_permutation_of_all_rows(folder, seed, epoch):
    rows = source(folder / "many.parquet", Columns("question", "answer"), seed=seed)
    answers = [int(rows.task(epoch * 500 + k).answer) for k in range(500)]
    assert sorted(answers) == list(range(500))
    assert answers != list(range(500))
    # A batch has rows of several pieces.
    assert len({answer // 16 for answer in answers[:16]}) >= PIECES_PER_WINDOW - 1


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=20))
def test_prompts_do_not_depend_on_the_order_of_requests(folder, ordinals):
    path = folder / "many.parquet"
    first, second = source(path, Columns("question"), seed=3), source(path, Columns("question"), seed=3)
    prompts = [first.prompt(ordinal) for ordinal in ordinals]
    assert [second.prompt(ordinal) for ordinal in reversed(ordinals)] == prompts[::-1]


def test_a_row_group_is_decoded_once_for_a_window(folder, monkeypatch):
    rows = open_rows(str(folder / "many.parquet"), ("question",), split="train")
    calls = []
    iter_batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda *args, **kwargs: calls.append(kwargs) or iter_batches(*args, **kwargs),
    )
    rows.prefetch([160, 100, 30, 499])
    assert [kwargs["row_groups"] for kwargs in calls] == [[0], [2]]
    assert [rows.row(k)["question"] for k in (160, 30, 100, 499)] == [
        f"question {k}" for k in (160, 30, 100, 499)
    ]
    assert len(calls) == 2
    assert all(kwargs["columns"] == ("question",) for kwargs in calls)


@pytest.mark.full
def test_memory_is_bounded(tmp_path):
    """A file of 130 MB is read in a fresh process; after the first prompt its memory stays as it is."""
    rows = [{"input": f"{n} " + f"{n * 7919 % 10_007} " * 120} for n in range(200_000)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=50_000, compression="none")
    code = (
        "import sys, pyarrow.parquet; from agentrl.data import *\n"
        "from agentrl.data.rows import parquet; parquet.PIECE_ROWS = 4096\n"
        "most = lambda: next(int(line.split()[1]) for line in open('/proc/self/status') if 'VmHWM' in line)\n"
        "before = most()\n"
        "stream = PromptStream(FileSource(sys.argv[1], Columns(), seed=1))\n"
        "stream.next()\n"
        "first = most()\n"
        "for _ in range(199_999): stream.next()\n"
        "print((first - before) * 1024, (most() - first) * 1024)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    num_chars = sum(len(row["input"]) for row in rows)
    assert num_chars > 1.1e8
    first, later = map(int, process.stdout.split())
    assert first < num_chars * 0.7
    assert later < num_chars / 5


def test_two_processes_give_the_same_prompts(folder):
    code = (
        "import sys; from agentrl.data import *\n"
        "source = FileSource(sys.argv[1], Columns('question', 'answer'), seed=5)\n"
        "print(source.fingerprint, *[source.prompt(k) for k in range(0, 1200, 50)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code, str(folder / "many.parquet")],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert "question" in outputs[0]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_dates_and_decimals_become_text_and_bytes_are_an_error(tmp_path, name):
    write = write_parquet if name.endswith("parquet") else write_arrow
    values = {
        "day": datetime.date(2026, 1, 2),
        "price": Decimal("1.50"),
        "at": datetime.datetime(2026, 1, 2, 3),
    }
    row = {"input": "a", "facts": {**values, "none": None}, "answer": [1, 2], "raw": b"x"}
    path = write(tmp_path / name, [row])
    task = source(path, Columns(metadata="facts", label="answer")).task(0)
    assert task.metadata == {"day": "2026-01-02", "price": "1.50", "at": "2026-01-02T03:00:00"}
    assert task.answer == "[1, 2]"
    with pytest.raises(DataError, match="row 1: `raw` holds bytes, which is neither text"):
        source(path, Columns(label="raw"))


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "kind", "labels"),
    [
        ([34, None, -7], pa.int64(), ["34", None, "-7"]),
        ([34.0, NAN, 0.00001], pa.float64(), ["34", None, "0.00001"]),
        ([0.1, 1e-5, 1e22], pa.float32(), ["0.1", "0.00001", "1e22"]),
        ([0.5, 0.1, NAN], pa.float16(), ["0.5", "0.1", None]),
        ([Decimal("0.00000001"), None, Decimal("1.50")], pa.decimal128(20, 8), ["0.00000001", None, "1.5"]),
        ([["a", None], [], [None]], pa.list_(pa.string()), ["a", None, None]),
        ([[0.1], [2.0, NAN], None], pa.list_(pa.float32()), ["[0.1]", "[2]", None]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_labels_are_the_numbers_that_were_written(tmp_path, values, kind, labels, nested):
    """Python's decimal reads them: no exponent, no `.0` of a column of integers with a null, no 32 bits."""
    array = pa.array(values, kind)
    if nested:
        array = pa.StructArray.from_arrays([array], ["truth"])
    table = pa.table({"input": pa.array(["a"] * 3), "answer": array})
    for name, write in (("a.parquet", pq.write_table), ("b.parquet", _as_pandas_writes)):
        write(table, tmp_path / name)
        read = source(
            tmp_path / name,
            Columns(label="answer.truth" if nested else "answer"),
            shuffle=False,
            is_checked=False,
        )
        for number, label in enumerate(labels):
            if nested and values[number] is None:
                continue  # a null field of a struct is left out, and the row is refused by name
            answer = read.task(number).answer
            assert answer == label or Decimal(answer) == Decimal(label), (number, answer)
            assert answer is None or "e" not in answer


def _as_pandas_writes(table, path):
    """The table with every column of integers with a null as one of floats."""
    for number, field in enumerate(table.schema):
        if pa.types.is_integer(field.type) and table[number].null_count:
            floats = [NAN if value is None else float(value) for value in table[number].to_pylist()]
            table = table.set_column(number, field.name, pa.array(floats))
    pq.write_table(table, path)


def test_null_fields_of_messages_are_left_out(tmp_path):
    user, system = {"role": "user", "content": "a", "name": "me"}, {"role": "system", "content": "b"}
    rows = [{"prompt": [system, user], "reward_model": {"ground_truth": "7", "style": "rule"}}]
    task = source(
        write_parquet(tmp_path / "a.parquet", rows), Columns("prompt", "reward_model.ground_truth")
    ).task(0)
    assert [(message.role, message.text, message.name) for message in task.prompt] == [
        ("system", "b", None),
        ("user", "a", "me"),
    ]
    assert task.answer == "7"


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_missing_column_is_an_error_when_the_file_is_opened(folder, name):
    with pytest.raises(DataError) as caught:
        source(folder / name, Columns("questions"))
    assert (
        f"{name}: there is no `questions`. Did you mean `question`? It has `question`, `answer`, `facts`"
        in str(caught.value)
    )


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1 is how it begins", "torn"])
def test_a_broken_file_is_a_one_line_error(folder, tmp_path, suffix, content):
    path = tmp_path / f"a.{suffix}"
    content_of_file = (folder / f"rows.{suffix}").read_bytes()
    path.write_bytes(content_of_file[: len(content_of_file) // 2] if content == "torn" else content)
    with pytest.raises(DataError) as caught:
        source(path).task(0)
    assert "a." in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_error_of_a_null_prompt_has_its_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"input": "a"}, {"input": None}])
    with pytest.raises(
        DataError, match=r"a.parquet, row 2: `input` is null, not a string or a list of messages"
    ):
        source(path, Columns())


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_other_content_has_another_fingerprint(folder, tmp_path, name):
    write = write_parquet if name.endswith("parquet") else write_arrow
    first = source(write(tmp_path / name)).fingerprint
    source(write(tmp_path / name)).check(first)
    write(tmp_path / name, [*ROWS[:-1], {**ROWS[-1], "answer": "0"}])
    with pytest.raises(ConfigError, match="not those that the run began with"):
        source(tmp_path / name).check(first)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"input": f"{n}"} for n in range(500)], row_group_size=100)
    prompts = PromptStream(FileSource(str(path), Columns(), seed=0))
    prompts.next()
    write_parquet(path, [{"input": f"{n}"} for n in range(400)], row_group_size=100)
    with pytest.raises(DataError, match="has changed since it was opened; start again"):
        [prompts.next() for _ in range(500)]


def test_without_pyarrow_the_error_names_the_extra(folder, monkeypatch):
    find_spec = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "pyarrow" else find_spec(name))
    for name in ("rows.parquet", "rows.arrow"):
        with pytest.raises(MissingExtraError, match=r"needs pyarrow: pip install 'agentrl\[data\]'"):
            source(folder / name)
    assert source(folder / "rows.jsonl").num_tasks == 40

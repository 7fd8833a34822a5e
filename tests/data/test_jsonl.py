"""Prompts from JSON lines: by number, in any order; errors have the number of the line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data import Columns, FileSource, PromptStream
from agentrl.data.rows import jsonl, open_rows
from agentrl.errors import ConfigError, DataError
from tests.data.files import ROWS, write_lines

COLUMNS = Columns("question", "answer", "facts")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("lines") / "rows.jsonl")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "many.jsonl"
    return write_lines(path, [{"question": f"question {n}", "answer": n} for n in range(3000)])


def source(path, columns=COLUMNS, **settings):
    return FileSource(str(path), columns, **settings)


def test_a_row_becomes_a_task(lines):
    task = source(lines, shuffle=False, split="train").task(3)
    assert task.id == f"{lines}:3"
    assert [(message.role, message.content) for message in task.prompt] == [("user", "What is 3 + 3?")]
    assert (task.answer, task.metadata, task.split) == ("6", {"n": 3}, "train")


@pytest.mark.parametrize("name", ["lines", "many"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_epoch_is_a_permutation_of_all_rows(request, name, seed):
    rows = source(request.getfixturevalue(name), Columns("question"), seed=seed)
    epochs = [[rows.task(epoch * rows.num_tasks + k).id for k in range(rows.num_tasks)] for epoch in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len(set(epochs[0])) == rows.num_tasks
    assert len({tuple(epoch) for epoch in epochs}) == 3


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=20))
def test_prompts_do_not_depend_on_the_order_of_requests(many, ordinals):
    first, second = source(many, Columns("question"), seed=3), source(many, Columns("question"), seed=3)
    prompts = [first.prompt(ordinal) for ordinal in ordinals]
    assert [second.prompt(ordinal) for ordinal in reversed(ordinals)] == prompts[::-1]
    assert [prompt.index for prompt in prompts] == ordinals


def test_two_processes_give_the_same_prompts(many):
    code = (
        "import sys; from agentrl.data import *\n"
        "source = FileSource(sys.argv[1], Columns('question', 'answer'), seed=5)\n"
        "print(source.fingerprint, *[source.prompt(k) for k in range(0, 4000, 100)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code, str(many)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert "question" in outputs[0]


BOUNDS = st.none() | st.integers(-50, 50)


@given(BOUNDS, BOUNDS)
def test_slices_are_pythons(lines, start, stop):
    text = f"{lines}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = ROWS[start:stop]
    if not expected:
        with pytest.raises(DataError, match="holds no prompts"):
            FileSource(text, COLUMNS)
        return
    sliced = FileSource(text, COLUMNS, shuffle=False)
    tasks = [sliced.task(k) for k in range(len(expected))]
    assert [task.answer for task in tasks] == [row["answer"] for row in expected]
    assert [task.id for task in tasks] == [f"{lines}:{row['facts']['n']}" for row in expected]
    assert sliced.task(len(expected)) == tasks[0]


@pytest.mark.parametrize("text", ["x.jsonl@[1]", "x.jsonl@[a:b]", "x.jsonl@[1:2:3]", "x.jsonl@[1:2"])
def test_an_invalid_slice_is_an_error(text):
    with pytest.raises(DataError, match=r"a slice is path@\[start:stop\], such as x.jsonl@\[0:100\]"):
        FileSource(text, COLUMNS)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\n\n", "\n \n"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n\n"])
def test_line_ends_and_empty_lines_do_not_count(tmp_path, ending, last):
    path = tmp_path / "a.jsonl"
    texts = [json.dumps({"input": f"line {n}"}) for n in range(100)]
    path.write_bytes(b"\xef\xbb\xbf" + (ending.join(texts) + last).encode())
    rows = open_rows(str(path), ("input",), split="train")
    assert [rows.row(k)["input"] for k in range(len(rows))] == [f"line {n}" for n in range(100)]
    expected = 100 if ending in ("\n", "\r\n") else 199
    assert rows.where(99) == f"{path}, line {expected}"


@given(
    st.lists(st.sampled_from(["{}", " {}", "", " ", "\t", "\r", '{"a": 1}' * 9]), max_size=90),
    st.integers(1, 40),
)
def test_rows_are_found_however_the_file_is_read(tmp_path_factory, lines, chunk):
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    content = "\n".join(lines).encode()
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_READ_AT_ONCE", chunk)
        rows = jsonl.JsonlRows(path)
    expected = [number for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    assert [rows.where(k) for k in range(len(rows))] == [f"{path}, line {number}" for number in expected]
    # A run that began with an earlier version resumes: the hash is of every byte.
    assert rows.fingerprint == hashlib.blake2b(content, digest_size=16).hexdigest()


def test_a_long_line_is_indexed_without_being_held(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"input": "' + b"x" * (40 << 20) + b'"}\n{"input": "short"}\n')
    tracemalloc.start()
    try:
        rows = jsonl.JsonlRows(path)
        # What is not held cannot be copied again for each part of the line that is read.
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert (len(rows), rows.row(1)) == (2, {"input": "short"})
    assert rows.fingerprint == hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


@pytest.mark.parametrize("chunk", [1, 7, 1 << 18])
@pytest.mark.parametrize("end", ["", "\n", '\n{"input": "b"}\n'])
def test_a_line_that_is_too_long_is_a_sentence(tmp_path, monkeypatch, chunk, end):
    monkeypatch.setattr(jsonl, "_MAX_LINE_BYTES", 40)
    monkeypatch.setattr(jsonl, "_READ_AT_ONCE", chunk)
    path = tmp_path / "long.jsonl"
    line = json.dumps({"input": "x" * 20})
    path.write_text('{"input": "a"}\n\n' + line.ljust(40) + end)
    assert [jsonl.JsonlRows(path).row(k)["input"][0] for k in range(2)] == ["a", "x"]
    path.write_text('{"input": "a"}\n\n' + line.ljust(41) + end)
    with pytest.raises(
        DataError, match=r"line 3 is longer than 40 bytes; write each row on a line of its own"
    ):
        jsonl.JsonlRows(path)


def test_json_files_hold_a_list_or_lines(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=1))
    write_lines(tmp_path / "lines.json")
    for name in ("list.json", "lines.json"):
        rows = source(tmp_path / name, shuffle=False)
        assert [rows.task(k).answer for k in range(40)] == [row["answer"] for row in ROWS]


GOOD = b'{"input": "what?"}\n'
BAD = {
    "torn": (b'{"input": "what', "no JSON: unterminated string starting at at character 11"),
    "no object": (b"[1, 2]", "a list, not an object"),
    "a number": (b"3", "a number, not an object"),
    "null": (b"null", "null, not an object"),
    "no utf-8": (b'{"input": "\xff"}', "byte 12 is not UTF-8"),
    "nan": (b'{"input": NaN}', "NaN is no number of JSON"),
    "deep": (b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
    "two objects": (b'{"input": "a"} {"input": "b"}', "extra data"),
    "no column": (b'{"inputs": "what?"}', "there is no `input`. Did you mean `inputs`? It has `inputs`"),
    "empty": (b'{"input": " "}', "`input` is empty"),
    "no text": (b'{"input": 3}', "`input` is 3, not a string or a list of messages"),
    "no messages": (b'{"input": []}', "`input` is an empty list"),
    "no message": (b'{"input": ["a"]}', "a message 1 that is no object"),
    "role": (b'{"input": [{"role": "human", "content": "a"}]}', "a message 1 of the role 'human'; roles are"),
    "content": (b'{"input": [{"role": "user", "content": 3}]}', "neither a string nor a list of parts"),
    "part": (
        b'{"input": [{"role": "user", "content": [{"type": "audio"}]}]}',
        "neither text nor an image_url",
    ),
    "address": (
        b'{"input": [{"role": "user", "content": [{"image_url": "http://127.0.0.1/y.png"}]}]}',
        "an image that cannot be used: an image is a data URL",
    ),
    "answered": (
        b'{"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "ends with a message of the assistant",
    ),
    "calls": (
        b'{"input": [{"role": "user", "content": "a", "tool_calls": [{}]}]}',
        "`tool_calls` is no list",
    ),
    "call": (
        b'{"input": [{"role": "assistant", "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": ""}]}',
        "a tool call that lacks a name",
    ),
    "surrogate": (b'{"input": "\\ud800"}', "half a surrogate pair"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_error_of_a_bad_line_has_its_file_its_number_and_the_fault(tmp_path, name):
    line, message = BAD[name]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(GOOD * 40 + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(DataError) as caught:
        FileSource(str(path), Columns())
    error = str(caught.value)
    assert error.startswith(f"{path}, line 42: ")
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        (Columns(label="gold"), {"input": "a"}, "there is no `gold`"),
        (Columns(metadata="facts"), {"input": "a", "facts": [1]}, "`facts` is no object; metadata_key names"),
        (Columns(metadata="facts"), {"input": "a", "facts": "x"}, "`facts` is no object; metadata_key names"),
        (Columns(tools="tools"), {"input": "a", "tools": "x"}, "`tools` is a string that is no JSON"),
        (Columns(tools="tools"), {"input": "a", "tools": {"a": 1}}, "`tools` is no list of tools"),
        (
            Columns(tools="tools"),
            {"input": "a", "tools": [{"name": "f"}]},
            "`tools` has a tool 1 without a name",
        ),
        (Columns("a.b"), {"a": {"c": 1}}, "there is no `a.b`"),
    ],
)
def test_the_error_of_a_bad_column_has_its_line_and_setting(tmp_path, columns, row, message):
    with pytest.raises(DataError) as caught:
        FileSource(str(write_lines(tmp_path / "a.jsonl", [row])), columns)
    assert f"a.jsonl, line 1: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no file or folder"),
        ("empty.jsonl", "", "holds no prompts (there are no rows)"),
        ("blank.jsonl", "\n\n", "holds no prompts"),
        ("empty.json", "[]", "holds no prompts"),
        ("object.json", '{"input": [', "line 1: no JSON"),
        ("words.txt", "a", "convert it"),
    ],
)
def test_a_file_without_prompts_is_an_error(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        FileSource(str(tmp_path / name), Columns())
    assert message in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("label", "answer", "metadata"),
    [
        ("Paris", "Paris", {}),
        (72, "72", {}),
        (0.5, "0.5", {}),
        (True, "true", {}),
        (None, None, {}),
        (["Paris", "Lutetia"], "Paris", {"answers": ["Paris", "Lutetia"]}),
        (["Paris", None], "Paris", {"answers": ["Paris"]}),
        ([], None, {}),
        ([None], None, {}),
        ("", "", {}),
        (0.00001, "0.00001", {}),
        (34.0, "34", {}),
        ([0.00001, 2.0], "[0.00001, 2]", {}),
        ([1, 2], "[1, 2]", {}),
        ({"é": 1}, '{"é": 1}', {}),
    ],
)
def test_a_label_becomes_the_answer(tmp_path, label, answer, metadata):
    path = write_lines(tmp_path / "a.jsonl", [{"input": "a", "reward": {"truth": label}}])
    task = FileSource(str(path), Columns(label="reward.truth")).task(0)
    assert (task.answer, task.metadata) == (answer, metadata)


def test_messages_have_the_fields_of_chat_endpoints(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief.", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "There."},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    row = {"input": messages, "tools": tools}
    task = FileSource(str(write_lines(tmp_path / "a.jsonl", [row])), Columns(tools="tools")).task(0)
    assert [message.role for message in task.prompt] == ["system", "user", "assistant", "tool"]
    assert task.prompt[1].text == "Where?"
    (call,) = task.prompt[2].tool_calls
    assert (call.name, call.arguments, call.id, task.prompt[3].tool_call_id) == (
        "look",
        {"at": "it"},
        "c1",
        "c1",
    )
    assert task.metadata["tools"] == [{"name": "look", "description": "", "parameters": {"type": "object"}}]


def test_of_a_large_file_only_the_first_rows_are_checked_when_it_is_opened(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"input": "a"}] * 20_001)
    with path.open("a") as file:
        file.write("{}\n")
    rows = FileSource(str(path), Columns(), shuffle=False)
    with pytest.raises(DataError, match=r"line 20002: there is no `input`. It has nothing"):
        rows.task(20_001)


def test_other_content_has_another_fingerprint_and_a_moved_file_the_same(tmp_path, lines):
    first = source(lines).fingerprint
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(lines.read_bytes())
    source(moved).check(first)
    moved.write_bytes(lines.read_bytes().replace(b"What is 7 + 7", b"What is 7 - 7"))
    for other in (source(moved), source(f"{lines}@[1:]"), source(lines, Columns("question"))):
        with pytest.raises(ConfigError, match="not those that the run began with"):
            other.check(first)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"input": f"{n}"} for n in range(1000)])
    prompts = PromptStream(FileSource(str(path), Columns(), seed=0))
    prompts.next()
    with path.open("r+b") as file:
        file.write(b'{"input": "x"}' * 3)
        file.truncate()
    with pytest.raises(DataError, match="has changed since it was opened; start again"):
        [prompts.next() for _ in range(1000)]


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers())
def test_a_number_becomes_the_decimal_that_it_is_read_as(tmp_path_factory, number, integer):
    path = write_lines(
        tmp_path_factory.mktemp("numbers") / "a.jsonl",
        [{"input": "a", "answer": value} for value in (number, integer, float(integer % 10**15))],
    )
    rows = FileSource(str(path), Columns(label="answer"), shuffle=False)
    first, second, third = (rows.task(k).answer for k in range(3))
    assert (Decimal(first), set(first) <= set("-.0123456789")) == (Decimal(repr(number)), True)
    assert (second, third) == (str(integer), str(integer % 10**15))

import datetime
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import lines

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(JSON_VALUES)
def test_every_value_survives_the_round_trip_through_strict_json(value):
    line = lines.to_line(value)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    json.loads(line.decode(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert same(lines.from_line(line), value)


def test_lone_surrogates_survive_and_other_text_stays_readable():
    assert "Zürich" in lines.to_line({"a": "Zürich"}).decode()
    assert lines.from_line(lines.to_line({"a": "x\ud800", "b": "ü"})) == {"a": "x\ud800", "b": "ü"}


def read(reader, line):
    """The value with its types, or what says that there is none."""
    try:
        return repr(reader(line))
    except ValueError:
        return "no JSON"


ODD = [
    *(b"-0", b"1e400", b"1e-400", b"5e-324", b"0.1234567890123456789", b"9007199254740993", b"1" * 4000),
    *(b"1" * 5000, b"01", b"1.", b"nan", b"NaN", b"-Infinity", b"[1,]", b"", b" 1 ", b"1 2"),
    *(rb'"\ud800"', rb'"\ud83d\ude00"', rb'"\udc00\ud800"', rb'"\u0000"', b'"a\x01"', b'"\xff"'),
    *(b'"\xed\xa0\x80"', b'{"a":1,"a":2}', b'{"$float":"nan"', b"\xef\xbb\xbf1"),
    *(b"[" * 150 + b"]" * 150, b"[" * 400 + b"]" * 400, b"[" * 400 + b"]" * 399),
]


@pytest.mark.parametrize("line", ODD)
def test_every_line_is_read_as_the_standard_library_reads_it(line):
    assert read(lines.from_line, line) == read(lambda line: json.loads(line.decode()), line)


@given(st.text() | JSON_VALUES.map(json.dumps) | st.floats().map(lambda value: f"{value:.25e}"))
def test_any_text_is_read_as_the_standard_library_reads_it(text):
    assert read(lines.from_line, text.encode()) == read(lambda line: json.loads(line.decode()), text.encode())


def test_values_without_a_form_in_json_become_text():
    value = {"n": np.int64(3), "x": np.float32(0.5), "nan": np.float32("nan"), "a": np.arange(2)}
    back = lines.from_line(lines.to_line({**value, "day": datetime.date(2026, 1, 2)}))
    assert back["n"] == 3
    assert back["x"] == 0.5
    assert math.isnan(back["nan"])
    assert back["a"] == [0, 1]
    assert back["day"] == "2026-01-02"


def test_data_that_resembles_an_encoded_float_is_unchanged():
    for value in ({"$float": "nan", "unit": "m"}, {"$float": "1.5"}, {"$float": None}):
        assert lines.from_line(lines.to_line(value)) == value


def test_an_incomplete_last_line_is_skipped_and_then_replaced(tmp_path):
    path = tmp_path / "x.jsonl"
    lines.append(path, [lines.to_line({"n": 1}), lines.to_line({"n": 2})])
    with path.open("ab") as file:
        file.write(b'{"torn": ')
    assert list(lines.read(path)) == [{"n": 1}, {"n": 2}]
    lines.append(path, [lines.to_line({"n": 3})])
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n{"n":3}\n'


def test_a_file_of_one_incomplete_line_starts_over(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"[1, 2")
    lines.append(path, [lines.to_line(3)])
    assert path.read_bytes() == b"3\n"


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n{oops\n{}\n")
    with pytest.raises(ValueError, match=r"x\.jsonl line 2 is not JSON"):
        list(lines.read(path))

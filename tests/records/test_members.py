import gzip
import json
import subprocess
import zlib

import pytest

from agentrl.errors import RecordError
from agentrl.records import lines, members


def row(value):
    return {"n": value}


def rows(values):
    return [row(value) for value in values]


def member(*values):
    return gzip.compress(b"".join(lines.to_line(row(value)) for value in values))


def test_what_is_written_is_read_back_and_any_tool_for_gzip_reads_it(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    end = members.append(path, map(lines.to_line, [row(1), {"a": "\u2028\r"}]), at=0)
    end = members.append(path, [lines.to_line(row(3))], at=end)
    assert list(members.read(path)) == [row(1), {"a": "\u2028\r"}, row(3)]
    assert end == path.stat().st_size == members.end_of_members(path)
    said = subprocess.run(["zcat", str(path)], capture_output=True, check=True).stdout
    assert [json.loads(line) for line in said.split(b"\n")[:-1]] == [row(1), {"a": "\u2028\r"}, row(3)]
    assert gzip.decompress(path.read_bytes()) == said


def test_a_file_that_was_cut_anywhere_holds_its_whole_members_and_goes_on(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    first, second = member(1, 2), member(3)
    for length in range(len(first) + len(second) + 1):
        path.write_bytes((first + second)[:length])
        whole = [1, 2] * (length >= len(first)) + [3] * (length == len(first + second))
        assert list(members.read(path)) == rows(whole)
        members.append(path, [lines.to_line(row(4))], at=members.end_of_members(path))
        assert list(members.read(path)) == rows([*whole, 4])
        assert gzip.decompress(path.read_bytes())


def test_members_larger_than_a_read_and_many_in_one_are_told_apart(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    # Digits without a pattern stay large.
    large = ["".join(str(pow(7, n, 1009)) for n in range(k, k + 900_000)) for k in (0, 5)]
    path.write_bytes(b"".join(member(value) for value in [*range(500), *large, "last"]))
    assert list(members.read(path)) == rows([*range(500), *large, "last"])


def test_where_there_is_no_file_there_is_nothing_yet(tmp_path):
    assert members.end_of_members(tmp_path / "x.jsonl.gz") == 0


def test_a_broken_member_in_the_middle_is_named_and_nothing_is_cut_off(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    first, second = member(1), member(2)
    path.write_bytes(first + b"?" + second[1:] + member(3))
    for broken in (members.end_of_members, lambda path: list(members.read(path))):
        with pytest.raises(ValueError, match=rf"x\.jsonl\.gz is broken from byte {len(first)} on"):
            broken(path)


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(member(1) + gzip.compress(b"{}\n{oops\n"))
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz line 3 is not JSON"):
        list(members.read(path))


@pytest.mark.parametrize("text", [b"2\n", b"[]\n", b'"x"\n', b"[" * 100_000 + b"\n", b"9" * 100_000 + b"\n"])
def test_a_line_that_is_no_object_is_named(tmp_path, text):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(member(1) + gzip.compress(text))
    with pytest.raises(RecordError, match=rf"{path} line 2 (holds no object|is not JSON)"):
        list(members.read(path))


def test_what_unpacks_to_more_than_a_gibibyte_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    packer = zlib.compressobj(wbits=31)
    with path.open("wb") as file:
        for _ in range(1025):
            file.write(packer.compress(b" " * (1 << 20)))
        file.write(packer.flush())
    assert path.stat().st_size < 2 << 20
    with pytest.raises(RecordError, match="unpacks to more than 1,073,741,824 bytes"):
        list(members.read(path))

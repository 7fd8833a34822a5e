import gzip
import json
import subprocess

import pytest

from agentrl.observe import lines, members


def member(*values):
    return gzip.compress(b"".join(map(lines.to_line, values)))


def test_what_is_written_is_read_back_and_any_tool_for_gzip_reads_it(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    end = members.append(path, map(lines.to_line, [1, {"a": "\u2028\r"}]), at=0)
    end = members.append(path, map(lines.to_line, [3]), at=end)
    assert list(members.read(path)) == [1, {"a": "\u2028\r"}, 3]
    assert end == path.stat().st_size == members.end_of_members(path)
    said = subprocess.run(["zcat", str(path)], capture_output=True, check=True).stdout
    assert [json.loads(line) for line in said.split(b"\n")[:-1]] == [1, {"a": "\u2028\r"}, 3]
    assert gzip.decompress(path.read_bytes()) == said


def test_a_file_that_was_cut_anywhere_holds_its_whole_members_and_goes_on(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    first, second = member(1, 2), member(3)
    for length in range(len(first) + len(second) + 1):
        path.write_bytes((first + second)[:length])
        whole = [1, 2] * (length >= len(first)) + [3] * (length == len(first + second))
        assert list(members.read(path)) == whole
        members.append(path, [lines.to_line(4)], at=members.end_of_members(path))
        assert list(members.read(path)) == [*whole, 4]
        assert gzip.decompress(path.read_bytes())


def test_members_larger_than_a_read_and_many_in_one_are_told_apart(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    # Digits without a pattern stay large.
    large = ["".join(str(pow(7, n, 1009)) for n in range(k, k + 900_000)) for k in (0, 5)]
    path.write_bytes(b"".join(member(value) for value in [*range(500), *large, "last"]))
    assert list(members.read(path)) == [*range(500), *large, "last"]


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
    path.write_bytes(member(1) + gzip.compress(b"2\n{oops\n"))
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz line 3 is not JSON"):
        list(members.read(path))

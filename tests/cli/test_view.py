"""`agentrl view` on the command line; tests/view/episodes checks what it writes."""

from __future__ import annotations

import gzip
import json

import pytest

from agentrl.cli import main
from tests.cli.light import run_light
from tests.view.episodes.journals import entry, failed, searched, write, write_benchmark


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder with a run and a scored benchmark."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "x", {1: [entry(searched()), failed()]})
    write(tmp_path / "scored" / "a", {1: [entry(searched())]})
    return tmp_path


def test_a_run_is_named_and_its_pages_are_in_its_folder(runs, capsys):
    main(["view", "x"])
    *_, about, address = capsys.readouterr().out.splitlines()
    assert about.startswith("2 episodes, ")
    assert address == (runs / "runs" / "x" / "view" / "index.html").as_uri()
    assert "<h1>x</h1>" in (runs / "runs" / "x" / "view" / "index.html").read_text()


@pytest.mark.parametrize(
    ("folder", "out"),
    [("scored", "scored/view"), ("runs/x/trajectories/step_000001.jsonl.gz", "runs/x/trajectories/view")],
)
def test_any_folder_with_journals_has_pages_and_so_has_one_file(runs, capsys, folder, out):
    main(["view", folder, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["page"] == f"{out}/index.html"
    assert printed["num_bytes"] > 10_000
    assert (printed["num_episodes"], printed["num_files"]) in [(1, 1), (2, 1)]


def test_the_page_of_a_benchmark_has_links_to_the_pages_in_its_folder(runs):
    folder = write_benchmark(runs / "bench", {"x": [entry(searched())]})
    page = folder / "benchmark.html"
    main(["view", "bench", "--out", "elsewhere"])
    assert "href" not in page.read_text()
    main(["view", "bench"])
    text = page.read_text()
    assert '<a href="view/index.html">' in text
    assert '<a href="view/index.html#file=cells%2FA-v0--x%2Feval_test_000000">x</a>' in text
    assert '<a href="../benchmark.html">' in (folder / "view" / "index.html").read_text()


def test_the_core_alone_writes_pages_without_the_texts_of_tokens(runs):
    (runs / "runs" / "x" / "model").mkdir()
    (runs / "runs" / "x" / "model" / "tokenizer.json").write_text("{}")
    done = run_light(runs, "view", "x", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert not list((runs / "runs" / "x" / "view" / "data").glob("tokens-*"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["view", "y"], "there is no folder y, and no run of that name in runs"),
        (["view", "x", "--out", "runs/x"], "holds no pages of `agentrl view`; name another --out"),
        (["view", "empty"], "empty holds no journal"),
        (["view", "x", "--out", "a-file/pages"], "the pages cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(runs, capsys, arguments, sentence):
    (runs / "empty").mkdir()
    (runs / "a-file").write_text("x")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert sentence in line


@pytest.mark.parametrize("command", [["view"], ["export", "--format", "messages", "--out", "out.jsonl"]])
# With the time of packing a name of a test would be another one in each process that collects it.
@pytest.mark.parametrize(
    "content",
    [b"", b"words\n", b'{"a": 1}\n', gzip.compress(b'{"a": 1}\n', mtime=0), gzip.compress(b"", mtime=0)],
)
def test_a_file_that_is_no_journal_is_one_sentence(runs, capsys, command, content):
    for name in ("notes.txt", "step_000001.jsonl.gz"):
        (runs / name).write_bytes(content)
        before = sorted(runs.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main([*command, name])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line
        assert "journal" in line
        assert sorted(runs.rglob("*")) == before
